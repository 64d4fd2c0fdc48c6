"""How long a client may take to send a request, and how large its head may be, against uvicorn's own server code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from env_server.service import serve
from env_server.service.serve import DeadlineProtocol

LARGEST = 100_000
ENDLESS = 2_000_000
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
SOON_S = 0.05

Message = MutableMapping[str, Any]


async def application(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Answer with the length of the body; echo on a WebSocket."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
        return
    length = 0
    while (message := await receive())["type"] == "http.request":
        length += len(message["body"])
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"%06d" % length})


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    config = uvicorn.Config(
        application, ws="websockets-sansio", ws_max_size=LARGEST, lifespan="off", log_config=None, proxy_headers=False
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: DeadlineProtocol(config, state, {}), "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writers.append(writer)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.close()
        server.close()
        await server.wait_closed()


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REQUEST_S", SOON_S)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf of it", GET + b"GET / HT"],
    ids=["silence", "half a head", "half a body", "half a second request"],
)
@pytest.mark.usefixtures("short_deadline")
async def test_a_client_that_does_not_finish_its_request_is_hung_up_on(beginning: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(beginning)
        replies = await reader.read()  # to the end, when the connection is closed
        assert replies.count(b" 200 ") == beginning.startswith(GET)


@pytest.mark.usefixtures("short_deadline")
async def test_a_websocket_may_be_silent() -> None:
    async with serving() as connect:
        _, silent = await connect()  # hung up on in the end, which shows that the time is over
        reader, writer = await connect()
        writer.write(
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        later, _ = await connect()
        assert await later.read() == b""
        writer.write(b"\x81\x82\0\0\0\0hi")
        assert await reader.readexactly(4) == b"\x81\x02hi"
        silent.close()


async def test_requests_of_the_largest_size_are_answered_one_after_the_other() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        for _ in range(20):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGEST + b"x" * LARGEST)
            assert (await reader.readuntil(b"%06d" % LARGEST)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "flood",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * ENDLESS,
        b"GET /" + b"x" * ENDLESS,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * ENDLESS,
    ],
    ids=["a long header", "a long path", "many headers"],
)
async def test_a_head_without_end_is_refused(flood: bytes) -> None:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(flood)
        with suppress(ConnectionResetError):  # the rest of it was never read
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 400 ")
