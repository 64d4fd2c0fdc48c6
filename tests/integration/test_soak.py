"""A small soak: clients leave in every way that a client can, and the server keeps nothing of them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load_generator import CLOSE, HANDSHAKE, PING, PONG, TEXT, frame
from benchmarks.server_process import SERVE, ServerProcess
from benchmarks.traffic import scripts
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset
from tests.integration.service import write_data

CLIENTS, SLOTS = 24, 12
"""Clients at once, and what the server admits, so that some wait and some are refused."""
SETTINGS = {
    "SQLENV_MAX_SESSIONS": str(SLOTS),
    "SQLENV_QUEUE_SIZE": "4",
    "SQLENV_QUEUE_TIMEOUT_S": "0.05",
    "SQLENV_IDLE_TIMEOUT_S": "2",
}
WARM_UP, SESSIONS = 150, 450
TIMEOUT_S = 90.0
"""For a reply, and for the server to let go of everything."""
POOLED_FILES = 32
"""Databases that may be opened after the warm-up."""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) + {number} FROM n"
REFUSED_FRAMES = ("{", "[]", "null", '{"type":"dance"}', '{"type":"state","data":1}', '{"type":"step"}', '"\\ud800"')
"""Frames that get an error and change nothing."""
BROKEN_FRAMES = (
    b"\x83\x80\x00\x00\x00\x00",
    b"\xf1\x80\x00\x00\x00\x00",
    b"\x81\x02{}",
    b"\x80\x81\x00\x00\x00\x00x",
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b"x" * 1_100_000),
)
"""Bytes on which a WebSocket server has to close the connection."""


class Full(Exception):  # noqa: N818
    """The server has no slot."""


class Client:
    """One WebSocket that can send anything and leave in any way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, episode: list[str]) -> None:
        self.reader, self.writer, self.episode = reader, writer, episode

    def send(self, text: str) -> None:
        self.writer.write(frame(text.encode()))

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when the server has closed."""
        while True:
            try:
                first, size = await self.reader.readexactly(2)
                if size >= 126:
                    size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
                payload = await self.reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if first & 0xF == TEXT:
                message: dict[str, Any] = json.loads(payload)
                return message
            if first & 0xF == PING:
                self.writer.write(frame(payload, PONG))
            if first & 0xF == CLOSE:
                return None

    async def ask(self, text: str) -> dict[str, Any]:
        self.send(text)
        message = await self.receive()
        assert message is not None, f"closed after {text[:200]}"
        if message["data"].get("code") == "CAPACITY_REACHED":
            raise Full
        return message

    async def play(self, steps: int | None = None) -> None:
        """Play an episode, or its first steps; each reply is the one to its step."""
        await self.ask(self.episode[0])
        for number, text in enumerate(self.episode[1:][:steps], start=1):
            assert (await self.ask(text))["data"]["observation"]["step_count"] == number

    async def until_closed(self) -> None:
        while await self.receive():
            pass

    def drop(self) -> None:
        """Leave with a reset instead of a close frame."""
        own: socket.socket = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def polite(client: Client, rng: random.Random) -> None:
    await client.play()
    client.send('{"type":"close"}')
    await client.until_closed()


async def dropping(client: Client, rng: random.Random) -> None:
    await client.play(rng.randrange(8))


async def dropping_a_query(client: Client, rng: random.Random) -> None:
    await client.play(0)
    action = {"action_type": "QUERY", "argument": ENDLESS.format(number=rng.getrandbits(60))}
    client.send(json.dumps({"type": "step", "data": action}))
    await asyncio.sleep(rng.random() * 0.1)  # where the query has got to when its client leaves


async def nonsense(client: Client, rng: random.Random) -> None:
    await client.play(0)
    for text in client.episode[1:]:
        assert (await client.ask(rng.choice(REFUSED_FRAMES)))["type"] == "error"
        assert (await client.ask(text))["type"] == "observation"


async def breaking_the_protocol(client: Client, rng: random.Random) -> None:
    await client.play(rng.randrange(4))
    client.writer.write(rng.choice(BROKEN_FRAMES))
    client.writer.write_eof()
    await client.until_closed()


async def half_closing(client: Client, rng: random.Random) -> None:
    await client.play(rng.randrange(8))
    client.writer.write_eof()
    await client.until_closed()


async def pipelining(client: Client, rng: random.Random) -> None:
    await client.play(0)
    for text in client.episode[1:]:
        client.send(text)
    for number in range(1, len(client.episode)):
        message = await client.receive()
        assert message is not None
        assert message["data"]["observation"]["step_count"] == number


async def silent(client: Client, rng: random.Random) -> None:
    """Read until the server has had enough."""
    await client.play(rng.randrange(4))
    await client.until_closed()


async def deaf(client: Client, rng: random.Random) -> None:
    """Ask much and read nothing."""
    await client.play(0)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket's transport
    for text in client.episode[1:] * 20:
        client.send(text)


Way = Callable[[Client, random.Random], Awaitable[None]]
WAYS: dict[Way, int] = {
    polite: 30,
    dropping: 12,
    dropping_a_query: 8,
    nonsense: 8,
    breaking_the_protocol: 4,
    half_closing: 4,
    pipelining: 4,
    silent: 1,
    deaf: 2,
}


@asynccontextmanager
async def connection(port: int, episode: list[str]) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port), episode)
    try:
        client.writer.write(HANDSHAKE)
        status = await client.reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in status[:16]
        yield client
    finally:
        client.drop()


async def crowd(port: int, episodes: list[list[str]], sessions: int, seed: int) -> Counter[str]:
    """Open so many sessions, `CLIENTS` at a time; return how many left in which way."""
    rng, counts, slots = random.Random(seed), Counter[str](), asyncio.Semaphore(CLIENTS)

    async def one(way: Way) -> None:
        async with slots, asyncio.timeout(TIMEOUT_S), connection(port, rng.choice(episodes)) as client:
            try:
                await way(client, rng)
            except Full:
                counts["full"] += 1
            else:
                counts[way.__name__] += 1

    async with asyncio.TaskGroup() as group:
        for way in rng.choices(list(WAYS), list(WAYS.values()), k=sessions):
            group.create_task(one(way))
    return counts


def settled(server: ServerProcess) -> tuple[int, int, int]:
    """Wait until the server has let go of every session and query; return its threads, sockets and files."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ready = json.loads(server.get("/ready"))
        opened, closed = (server.metric(f"sqlenv_sessions_{each}_total") for each in ("opened", "closed"))
        queries = server.metric("sqlenv_pool_waiting") + server.metric("sqlenv_pool_running")
        left = (ready["active_sessions"], ready["waiting"], opened - closed, queries)
        if not any(left):
            return (server.threads(), *server.handles())
        assert time.monotonic() < deadline, f"sessions, waiting, unaccounted for, queries: {left}"
        time.sleep(0.1)


def test_nothing_is_left_of_badly_behaved_clients(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = str(write_data(pets, tmp_path_factory.mktemp("pets")))
    episodes = scripts(load_dataset(data), "groups", 100, 1)
    log = Path(tmp_path_factory.mktemp("soak")) / "server.log"
    with ServerProcess([*SERVE, "--data", data], log, SETTINGS) as server:
        asyncio.run(crowd(server.port, episodes, WARM_UP, seed=0))
        threads, sockets, files = settled(server)
        counts = asyncio.run(crowd(server.port, episodes, SESSIONS, seed=1))
        later = settled(server)
        assert later[0] <= threads
        assert later[1] <= sockets + 2  # the test's own, on their way out
        assert later[2] <= files + POOLED_FILES
        refused = server.metric_by_label("sqlenv_refused_total")
        closed = server.metric_by_label("sqlenv_sessions_closed_total")
        assert server.stop() == 0
    assert set(counts) == {"full", *(way.__name__ for way in WAYS)}
    assert sum(refused.values()) >= counts["full"]
    assert closed["idle"] > 0
    assert not {"other", "error"} & (set(refused) | set(closed))
    assert not [line for line in log.read_text().splitlines() if "Traceback" in line or '"level": "error"' in line]
