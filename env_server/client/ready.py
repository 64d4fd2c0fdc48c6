"""What a SQLEnv server says of itself at GET /ready: whether it takes sessions, its load, and what it serves."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl

from pydantic import ValidationError

from env_server.client.connection import refused, unreachable
from env_server.client.errors import DeadlineError, ProtocolError
from env_server.client.servers import Server
from env_server.client.tls import client_context
from env_server.types import Ready

MAX_BYTES = 1_000_000
"""More than any /ready says."""


async def fetch_ready(server: Server, token: str | None, timeout_s: float, tls: ssl.SSLContext | None = None) -> Ready:
    """Ask the server. Raises ClientError; ProtocolError where it is some other kind of server.

    `tls` is what the certificate of a server behind wss:// is checked with, `tls.client_context()` without.
    """
    if server.secure and tls is None:
        tls = client_context(server)
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await asyncio.to_thread(_get, server, "/ready", token, timeout_s, tls)
    except TimeoutError as error:
        raise DeadlineError(
            server.name, f"no answer to GET /ready in {timeout_s:g} s; is `sqlenv serve` running there?"
        ) from error
    except OSError as error:
        raise unreachable(server, error) from error
    except http.client.HTTPException as error:
        raise ProtocolError(server.name, f"its answer to GET /ready is not HTTP: {error!r}") from error
    if status == 404:
        if await _is_inference(server, token, timeout_s, tls):
            raise ProtocolError(
                server.name,
                "it is a server of `sqlenv inference`, which --vllm_server_base_url takes; --env wants one of "
                "`sqlenv serve`",
            )
        raise ProtocolError(server.name, "it has no GET /ready, so it is no SQLEnv server, or its path is wrong")
    # A server that drains says so with 503 and the same body.
    if status not in (200, 503):
        raise refused(server, status, body)
    try:
        return Ready.model_validate_json(body)
    except ValidationError as error:
        if status != 200:
            raise refused(server, status, body) from error
        raise ProtocolError(server.name, "it is no SQLEnv server: its GET /ready says something else") from error


async def _is_inference(server: Server, token: str | None, timeout_s: float, tls: ssl.SSLContext | None) -> bool:
    """Whether it lists models, as vLLM does."""
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await asyncio.to_thread(_get, server, "/v1/models", token, timeout_s, tls)
        listed = json.loads(body)
    except (TimeoutError, OSError, http.client.HTTPException, ValueError):
        return False
    return status == 200 and isinstance(listed, dict) and "data" in listed


def _get(
    server: Server, path: str, token: str | None, timeout_s: float, tls: ssl.SSLContext | None
) -> tuple[int, bytes]:
    """One GET over a connection of its own, to the very address: `http.client` would look the name up again."""
    connection = http.client.HTTPConnection(server.netloc)
    try:
        connection.sock = _connected(server, timeout_s, tls)
        headers = {"Host": server.netloc, "Connection": "close"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", f"{server.path}{path}", headers=headers)
        response = connection.getresponse()
        return response.status, response.read(MAX_BYTES)
    finally:
        connection.close()


def _connected(server: Server, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((server.address or server.host, server.port), timeout_s)
    if tls is None or not server.secure:
        return plain
    try:
        return tls.wrap_socket(plain, server_hostname=server.host)
    except BaseException:
        plain.close()
        raise
