"""Connections to servers: kept, replaced where a server closed them, bounded in time, closed by a cancelled request.

The server is a socket that does what a test says, so that every byte and every close is the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from inference.vllm.connections import KeptConnections

HELLO = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
Answer = Callable[[int, int, asyncio.StreamWriter], Awaitable[None]]
"""Answers a request: which connection it came on, which one on it, and where the answer goes."""


class Server:
    """A server on loopback that answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[tuple[int, bytes]] = []
        """The connection, and the request with its body."""
        self.ended = asyncio.Event()
        """A connection was closed by the client."""
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, count = self.connections, 0
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(x[15:]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")), 0)
                self.requests.append((number, head + await reader.readexactly(length)))
                await self._answer(number, count, writer)
                count += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening, httpx.AsyncClient(transport=KeptConnections(), trust_env=False, timeout=30.0) as client:
        yield server, client


async def hello(_: int, __: int, writer: asyncio.StreamWriter) -> None:
    writer.write(HELLO)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


def test_a_connection_is_kept_and_what_is_sent_arrives() -> None:
    async def test() -> None:
        async with answering(hello) as (server, client):
            for number in range(3):
                reply = await client.post(f"{server.url}/v1/x", json={"number": number}, params={"a": "b c"})
                assert (reply.status_code, reply.text) == (200, "hello")
            assert [number for number, _ in server.requests] == [0, 0, 0]
            _, last = server.requests[-1]
            assert last.startswith(b"POST /v1/x?a=b+c HTTP/1.1\r\nHost: 127.0.0.1:")
            assert last.endswith(b'\r\n\r\n{"number":2}')

    run(test)


def test_each_request_in_flight_has_a_connection_of_its_own() -> None:
    everyone = asyncio.Barrier(8)

    async def together(_: int, __: int, writer: asyncio.StreamWriter) -> None:
        await everyone.wait()
        writer.write(HELLO)

    async def test() -> None:
        async with answering(together) as (server, client):
            for _ in range(2):
                replies = await asyncio.gather(*(client.get(server.url) for _ in range(8)))
                assert {reply.text for reply in replies} == {"hello"}
            assert server.connections == 8

    run(test)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + HELLO,
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
def test_answers_of_every_form_are_read_byte_by_byte(head: bytes) -> None:
    async def slowly(_: int, __: int, writer: asyncio.StreamWriter) -> None:
        for byte in head:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async def test() -> None:
        async with answering(slowly) as (server, client):
            replies = [await client.get(server.url) for _ in range(2)]
            assert [reply.text for reply in replies] == ["hello", "hello"]
            assert replies[0].status_code == (503 if b"503" in head else 200)
            assert server.connections == (2 if b"close" in head else 1)

    run(test)


def test_a_connection_that_was_closed_while_it_was_idle_is_replaced() -> None:
    async def once(_: int, count: int, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await writer.drain()
        writer.close()

    async def test() -> None:
        async with answering(once) as (server, client):
            for _ in range(5):
                assert (await client.post(server.url, content=b"x")).text == "hello"
            assert server.connections == 5

    run(test)


def test_one_that_is_closed_as_the_request_comes_is_replaced_once() -> None:
    async def not_the_second(_: int, count: int, writer: asyncio.StreamWriter) -> None:
        if count:
            raise ConnectionError
        writer.write(HELLO)

    async def test() -> None:
        async with answering(not_the_second) as (server, client):
            for _ in range(3):
                assert (await client.post(server.url, content=b"x")).text == "hello"
            assert [number for number, _ in server.requests] == [0, 0, 1, 1, 2]

    run(test)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Le", httpx.RemoteProtocolError),
        (HELLO[:-1], httpx.RemoteProtocolError),
        (b"nonsense\r\n\r\n", httpx.RemoteProtocolError),
    ],
)
def test_a_new_connection_that_breaks_is_a_failure_and_nothing_is_sent_twice(
    said: bytes, error: type[httpx.TransportError]
) -> None:
    async def breaking(_: int, __: int, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        raise ConnectionError

    async def test() -> None:
        async with answering(breaking) as (server, client):
            with pytest.raises(error):
                await client.post(server.url, content=b"x")
            assert len(server.requests) == 1

    run(test)


def test_half_an_answer_on_a_kept_connection_is_a_failure_too() -> None:
    async def half_the_second(_: int, count: int, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO[:20] if count else HELLO)
        await writer.drain()
        if count:
            raise ConnectionError

    async def test() -> None:
        async with answering(half_the_second) as (server, client):
            assert (await client.get(server.url)).text == "hello"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(server.url)
            assert len(server.requests) == 2

    run(test)


def test_nobody_there_is_a_failure_to_connect() -> None:
    async def test() -> None:
        async with answering(hello) as (server, client):
            pass
        async with httpx.AsyncClient(transport=KeptConnections(), trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(server.url)

    run(test)


def test_a_deadline_and_a_cancelled_request_close_the_connection() -> None:
    async def never(_: int, __: int, writer: asyncio.StreamWriter) -> None:
        """Read on: the end of the connection is seen."""

    async def test() -> None:
        async with answering(never) as (server, client):
            with pytest.raises(httpx.ReadTimeout):
                await client.get(server.url, timeout=httpx.Timeout(0.01, connect=30.0))
            await server.ended.wait()
            server.ended.clear()
            waiting = asyncio.create_task(client.get(server.url))
            while len(server.requests) < 2:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            await server.ended.wait()
            assert waiting.cancelled()
            assert server.connections == 2

    run(test)


def test_closing_the_client_closes_what_is_kept() -> None:
    async def test() -> None:
        async with answering(hello) as (server, client):
            await client.get(server.url)
            assert not server.ended.is_set()
            await client.aclose()
            await server.ended.wait()

    run(test)
