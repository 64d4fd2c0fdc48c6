"""GET /ready of a SQLEnv server: whether it takes sessions, its load, and what it serves. Needs httpx."""

from __future__ import annotations

import ssl

import httpx
from pydantic import ValidationError

from env_server.client.connection import Server, client_context, connection_error, status_error
from env_server.client.errors import DeadlineError, ProtocolError
from env_server.types import Ready


async def fetch_ready(server: Server, token: str | None, timeout_s: float, tls: ssl.SSLContext | None = None) -> Ready:
    """Ask the server. Raises ClientError; ProtocolError where it is some other kind of server."""
    tls = tls or (client_context(server) if server.secure else None)
    async with httpx.AsyncClient(verify=tls or False, timeout=timeout_s, trust_env=False) as client:
        try:
            response = await _get(client, server, token, "/ready")
            if response.status_code == 404:
                raise ProtocolError(server.name, await _not_ours(client, server, token))
        except httpx.TimeoutException as error:
            raise DeadlineError(
                server.name, f"no answer to GET /ready in {timeout_s:g} s; is `sqlenv serve` running there?"
            ) from error
        except httpx.NetworkError as error:
            raise connection_error(server, _root(error)) from error
        except httpx.HTTPError as error:
            if "disconnected" in str(error):
                raise connection_error(server, EOFError(str(error))) from error
            raise ProtocolError(server.name, f"its answer to GET /ready is not HTTP: {error!r}") from error
    # A server that drains says so with 503 and the same body.
    if response.status_code not in (200, 503):
        raise status_error(server, response.status_code, response.content)
    try:
        return Ready.model_validate_json(response.content)
    except ValidationError as error:
        if response.status_code != 200:
            raise status_error(server, response.status_code, response.content) from error
        raise ProtocolError(server.name, "it is no SQLEnv server: its GET /ready says something else") from error


async def _get(client: httpx.AsyncClient, server: Server, token: str | None, path: str) -> httpx.Response:
    """Ask the server's very address, where one was found."""
    url = httpx.URL(f"{'https' if server.secure else 'http'}://{server.netloc}{server.path}{path}")
    headers = {"Host": server.netloc} | ({"Authorization": f"Bearer {token}"} if token else {})
    at = url.copy_with(host=server.address) if server.address else url
    return await client.get(at, headers=headers, extensions={"sni_hostname": server.host})


async def _not_ours(client: httpx.AsyncClient, server: Server, token: str | None) -> str:
    """Return what a server without /ready is: one that lists models, as vLLM does, is `sqlenv inference`'s."""
    try:
        listed = (await _get(client, server, token, "/v1/models")).json()
    except (httpx.HTTPError, ValueError):
        listed = None
    if isinstance(listed, dict) and "data" in listed:
        return "it is a server of `sqlenv inference`: give it as --vllm_server_base_url, and one of `sqlenv serve` here"
    return "it has no GET /ready, so it is no SQLEnv server, or its path is wrong"


def _root(error: BaseException) -> BaseException:
    """Return the system's error under httpx's."""
    while not isinstance(error, OSError) and (cause := error.__cause__ or error.__context__):
        error = cause
    return error
