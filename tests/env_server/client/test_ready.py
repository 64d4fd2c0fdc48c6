"""GET /ready: what is read from it, and what is said when it is something else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from env_server.client.errors import AuthenticationError, ClientError, ConnectionLostError, DeadlineError, ProtocolError
from env_server.client.ready import fetch_ready
from env_server.client.servers import Server, parse_servers
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, Ready, ReadyStatus
from tests.env_server.conftest import RunningServer
from tests.env_server.serving import PlayingServer, running_server


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets, token="geheim") as running:
        yield running


def fetch(url: str, token: str | None = "geheim", timeout_s: float = 30.0) -> Ready:
    (server,) = parse_servers(url)
    return asyncio.run(fetch_ready(server, token, timeout_s))


def test_load_and_data(service: RunningServer, pets: Dataset) -> None:
    ready = fetch(service.http)
    assert ready.data == served_data(pets, AnswerMode.VALUE, EnvSettings())
    assert (ready.status, ready.max_sessions, ready.waiting) == (ReadyStatus.READY, 1, 0)
    with pytest.raises(AuthenticationError, match="SQLENV_TOKEN"):
        fetch(service.http, token=None)


def test_a_server_that_drains_still_says_so(server: PlayingServer) -> None:
    server.status = "draining"
    assert fetch(server.url).status is ReadyStatus.DRAINING


def test_the_very_address_is_asked(server: PlayingServer) -> None:
    there = Server("ws", "some.name.invalid", server.port, address="127.0.0.1")
    assert asyncio.run(fetch_ready(there, "geheim", 30.0)).status is ReadyStatus.READY


def test_another_kind_of_server(server: PlayingServer) -> None:
    with pytest.raises(ProtocolError, match="no GET /ready"):
        fetch(f"{server.url}/elsewhere")
    served: dict[str, Any] = {"name": "a blog"}
    server.served = served
    with pytest.raises(ProtocolError, match="no SQLEnv server"):
        fetch(server.url)
    server.status = "draining"
    with pytest.raises(ClientError, match="HTTP 503"):
        fetch(server.url)


def test_nobody_there(server: PlayingServer) -> None:
    server.die()
    with pytest.raises(ConnectionLostError, match="cannot be reached"):
        fetch(server.url)


MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MODELS), MODELS), "a server of `sqlenv inference`"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "no GET /ready"),
        (b"", "no GET /ready"),
    ],
)
async def test_a_server_that_generates_is_told_from_others(models: bytes, said: str) -> None:
    replies = {b"/ready": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"/v1/models": models}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(replies[head.split()[1]])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError, match=said):
            await fetch_ready(Server("ws", "127.0.0.1", port), None, 30.0)


async def answering(reply: bytes, timeout_s: float) -> None:
    """Ask a server that answers with these bytes, and never ends the connection."""
    asked: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.write(reply)

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        await fetch_ready(Server("ws", "127.0.0.1", listening.sockets[0].getsockname()[1]), None, timeout_s)
    finally:
        listening.close()
        for writer in asked:
            writer.close()
            await writer.wait_closed()


def test_what_is_no_http() -> None:
    with pytest.raises(ProtocolError, match="is not HTTP"):
        asyncio.run(answering(b"220 mail.example ESMTP\r\n", 30.0))


def test_no_answer_in_time() -> None:
    with pytest.raises(DeadlineError, match=r"no answer to GET /ready in 0\.2 s"):
        asyncio.run(answering(b"", 0.2))
