"""One socket: what it sends, what each failure is called, and that nothing is waited for without end."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from benchmarks.server_process import reserved_ports
from env_server.client.connection import MAX_FRAME_BYTES, Connection, Server, Timeouts, parse_servers, status_error
from env_server.client.errors import (
    AuthenticationError,
    ClientError,
    ConnectionLostError,
    DeadlineError,
    ProtocolError,
    RemoteActionError,
    ServerBusyError,
    ServerDrainingError,
)
from env_server.dataset import Dataset
from tests.env_server.serving import Close, Deed, Die, Hang, PlayingServer, error_frame, running_server

SOON = Timeouts(connect_s=0.2, request_s=0.2)
"""For what is meant to pass; nothing is asserted about how long it takes."""


@pytest.fixture
def server(pets: Dataset) -> Iterator[PlayingServer]:
    with running_server(pets, token="geheim") as running:
        yield running


def server_at(url: str) -> Server:
    (server,) = parse_servers(url)
    return server


@asynccontextmanager
async def opened(
    server: PlayingServer, token: str | None = "geheim", timeouts: Timeouts | None = None
) -> AsyncIterator[Connection]:
    connection = await Connection.open(server_at(server.url), token, timeouts)
    try:
        yield connection
    finally:
        await connection.close()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def tcp_server(talk: Talk) -> AsyncIterator[Server]:
    """A server that does this on every connection, and then reads until the client goes."""
    talks: list[asyncio.Task[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.append(task)
        with suppress(ConnectionError):
            await talk(reader, writer)
            await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server_at(f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    listening.close()
    await asyncio.gather(*talks)


async def test_requests_are_frames_of_the_wire_format(server: PlayingServer) -> None:
    async with opened(server) as connection:
        await connection.request("reset")
        reply = await connection.request("reset", {"question_id": "cats", "episode_id": "e"})
        assert reply["observation"]["question"] == "How many cats are there?"
        assert (reply["reward"], reply["done"]) == (0.0, False)
        await connection.request("step", {"action_type": "ANSWER", "argument": "2"})
        assert await connection.request("state") == {"episode_id": "e", "step_count": 1}
    assert server.requests == [
        {"type": "reset"},
        {"type": "reset", "data": {"question_id": "cats", "episode_id": "e"}},
        {"type": "step", "data": {"action_type": "ANSWER", "argument": "2"}},
        {"type": "state"},
    ]


async def test_the_handshake_carries_the_token_and_asks_for_no_compression(server: PlayingServer) -> None:
    async with opened(server):
        pass
    server.token = None
    async with opened(server, token=None):
        pass
    headers, without_a_token = server.headers
    assert "Authorization" not in without_a_token
    assert headers["Authorization"] == "Bearer geheim"
    assert headers["Host"] == f"127.0.0.1:{server.port}"
    assert "Sec-WebSocket-Extensions" not in headers


async def test_the_address_decides_where_to_and_the_name_stays_in_the_handshake(server: PlayingServer) -> None:
    there = Server("ws", "some.name.invalid", server.port, address="127.0.0.1")
    connection = await Connection.open(there, "geheim")
    await connection.close()
    assert server.headers[0]["Host"] == f"some.name.invalid:{server.port}"


async def test_the_token_is_in_no_error_and_in_no_log(server: PlayingServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with opened(server) as connection:
        await connection.request("reset")
    with pytest.raises(AuthenticationError) as failed:
        await Connection.open(server_at(server.url), "geheimer")
    client_records = [r.getMessage() for r in caplog.records if not r.name.startswith("websockets.server")]
    assert not [text for text in client_records if "geheim" in text]
    assert "geheim" not in str(failed.value)
    assert "--env_token or SQLENV_TOKEN" in str(failed.value)


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (403, AuthenticationError, "allows this neither with nor without"),
        (404, ProtocolError, "check its path"),
        (400, ProtocolError, "HTTP 400"),
        (302, ProtocolError, "HTTP 302"),
        (429, ServerBusyError, "takes no sessions now"),
        (500, ConnectionLostError, "HTTP 500"),
        (502, ConnectionLostError, "HTTP 502"),
    ],
)
def test_what_a_status_says(status: int, kind: type[ClientError], text: str) -> None:
    error = status_error(server_at("ws://host:8000"), status, b"not now")
    assert type(error) is kind
    assert text in str(error)


async def test_a_refused_handshake(server: PlayingServer) -> None:
    server.refuse_with = 503
    with pytest.raises(ServerDrainingError, match=r"stopping or not up yet, HTTP 503 \(not now\)") as failed:
        await Connection.open(server_at(server.url), "geheim")
    assert f"ws://127.0.0.1:{server.port}" in str(failed.value)


async def test_a_port_where_nothing_listens() -> None:
    with reserved_ports() as (port,), pytest.raises(ConnectionLostError, match=r"cannot be reached: .*Is it running"):
        await Connection.open(server_at(f"ws://127.0.0.1:{port}"))


HTTP_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        (None, DeadlineError, r"no connection in 0\.2 s"),
        (b"", ConnectionLostError, "hung up"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ProtocolError, "handshake"),
        (HTTP_OK, ProtocolError, "HTTP 200"),
    ],
    ids=["silence", "hangs up", "SSH", "HTTP"],
)
async def test_what_is_no_websocket_server(reply: bytes | None, kind: type[ClientError], text: str) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if reply is not None:
            writer.write(reply)
        if reply == b"":
            writer.close()

    async with tcp_server(talk) as there:
        with pytest.raises(kind, match=text):
            await Connection.open(there, timeouts=SOON if reply is None else None)


async def test_tls_where_there_is_none(server: PlayingServer) -> None:
    with pytest.raises((ProtocolError, ConnectionLostError)):
        await Connection.open(server_at(server.url.replace("ws://", "wss://")))


@pytest.mark.parametrize(
    ("deed", "kind", "text"),
    [
        (Close(1000), ConnectionLostError, "the connection was closed"),
        (Close(1001, "bye"), ServerDrainingError, "it is stopping: bye"),
        (Close(1012), ServerDrainingError, "it is stopping"),
        (Close(1008, "no"), AuthenticationError, "closed the connection as not allowed: no"),
        (Close(1009), ProtocolError, "takes no request of this size"),
        (Close(1011, "oops"), ConnectionLostError, "closed: oops"),
        (Close(1013), ServerBusyError, "takes no sessions now"),
        (Die(), ConnectionLostError, "the connection was closed"),
        (error_frame("SESSION_ERROR"), ConnectionLostError, "ended the session, SESSION_ERROR: said the server"),
        (error_frame("FACTORY_ERROR"), ConnectionLostError, "ended the session, FACTORY_ERROR: said the server"),
        (error_frame("CAPACITY_REACHED"), ServerBusyError, "no session free: said the server"),
        ("not JSON", ProtocolError, "its reply is not OpenEnv's: not JSON"),
        ("[" * 100_000, ProtocolError, "its reply is not OpenEnv's"),
        ("[]", ProtocolError, "its reply is not OpenEnv's"),
        ('{"type": "observation"}', ProtocolError, "its reply is not OpenEnv's"),
        ('{"type": "observation", "data": 3}', ProtocolError, "it answered 'observation' where 'observation' was due"),
        ('{"type": "state", "data": {}}', ProtocolError, "it answered 'state' where 'observation' was due"),
        ("x" * (MAX_FRAME_BYTES + 1), ProtocolError, f"its reply is larger than {MAX_FRAME_BYTES} bytes"),
        (b"\xff\xfe", ProtocolError, "its reply is not OpenEnv's"),
    ],
)
async def test_a_request_that_gets_no_answer_says_why(
    server: PlayingServer, deed: Deed, kind: type[ClientError], text: str
) -> None:
    server.script = lambda _: deed
    async with opened(server) as connection:
        with pytest.raises(kind) as failed:
            await connection.request("reset")
        assert type(failed.value) is kind
        assert text in str(failed.value)
        assert len(str(failed.value)) < 600
        assert not connection.usable


async def test_no_answer_in_time_drops_the_connection(server: PlayingServer) -> None:
    server.script = lambda _: Hang()
    async with opened(server, timeouts=SOON) as connection:
        with pytest.raises(DeadlineError, match=r"no answer to a reset in 0\.2 s"):
            await connection.request("reset")
        assert not connection.usable
        await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)


async def test_a_cancelled_request_frees_the_session_at_once(server: PlayingServer) -> None:
    server.script = lambda _: Hang()
    async with opened(server) as connection:
        task = asyncio.create_task(connection.request("reset"))
        await asyncio.to_thread(server.wait_until, lambda: bool(server.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not connection.usable
        await asyncio.to_thread(server.wait_until, lambda: server.sessions == 0)


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (("step", {"action_type": "ANSWER"}), "EXECUTION_ERROR", {}),
        (("reset", {"question_id": "dogs"}), "EXECUTION_ERROR", {}),
        (("reset", {"nothing": 1}), "VALIDATION_ERROR", {}),
        (("step", {"script": True}), "VALIDATION_ERROR", {"errors": [{"msg": "no"}]}),
    ],
)
async def test_what_the_server_complains_about_does_not_end_the_session(
    server: PlayingServer, request_: tuple[str, dict[str, Any]], code: str, details: dict[str, Any]
) -> None:
    server.script = lambda asked: error_frame(code, **details) if "script" in asked.get("data", {}) else None
    async with opened(server) as connection:
        with pytest.raises(RemoteActionError) as failed:
            await connection.request(*request_)
        assert (failed.value.code, failed.value.details) == (code, details)
        assert connection.usable
        await connection.request("reset")
    assert server.opened == 1


async def test_a_closing_frame_is_read_from_a_socket_that_was_closed_while_idle(server: PlayingServer) -> None:
    """As the service closes an idle session: an error frame nobody asked for, then the end."""
    async with opened(server) as connection:
        await asyncio.to_thread(server.wait_until, lambda: server.sessions == 1)
        await asyncio.to_thread(server.say_and_close, error_frame("SESSION_ERROR", "the session was idle"))
        await connection._socket.wait_closed()
        assert not connection.usable
        with pytest.raises(ConnectionLostError, match="SESSION_ERROR: the session was idle"):
            await connection.request("reset")


async def test_one_request_at_a_time(server: PlayingServer) -> None:
    async with opened(server) as connection:
        first = asyncio.create_task(connection.request("reset"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one request at a time"):
            await connection.request("state")
        assert (await first)["done"] is False
        assert connection.usable


async def test_what_cannot_be_sent_leaves_the_session_alone(server: PlayingServer) -> None:
    async with opened(server) as connection:
        for data in ({"seed": object()}, {"seed": float("nan")}):
            with pytest.raises((TypeError, ValueError)):
                await connection.request("reset", data)
        await connection.request("reset")


async def test_closing_twice_and_after_the_server_went(server: PlayingServer) -> None:
    async with opened(server) as connection:
        server.die()
        await connection.close()
        await connection.close()
        assert not connection.usable


@pytest.fixture(autouse=True)
def quiet_server_log() -> Iterator[None]:
    """The test's own server logs what the tests do to it."""
    logger = logging.getLogger("websockets.server")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


PROGRAM = """
import resource, sys
from env_server.client.connection import allow_open_files
soft, hard, needed = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(needed), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "allowed"),
    [
        (300, 4_000, 2_000, 2_000),
        (1_024, 4_000, 100, 1_024),
        (300, 1_000, 2_000, 1_000),
        (200, 200, 10, 200),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(soft: int, hard: int, needed: int, allowed: int) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, (soft, hard, needed))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(allowed)] * 2
