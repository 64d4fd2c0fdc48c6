"""The clients of the soak: sessions that play, and leave in every way that a client can.

    python -m benchmarks.soak_client SPEC.json

Some play episodes to the end and close; others drop the connection, also while a query runs, close one half of it,
send garbage, pipeline, fall silent, or ask without ever reading. Silent and deaf ones keep their sockets open until the
process ends: to the server they look like a machine that has gone. Counts are printed twice a second, as JSON lines.
The process plays until it is killed or told to stop by a line, and then holds the silent ones until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import uvloop
from pydantic import BaseModel

from benchmarks.load_generator import CLOSE, PING, PONG, TEXT, frame

REPLY_S = 30.0
"""A reply that takes longer counts as a hang."""
REPORT_S = 0.5
SMALL_BUFFER = 4_096
"""Bytes that the kernel takes in for a session that never reads."""
DEAF_EPISODES = 200
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) + {number} FROM n"
REFUSED_FRAMES = ("{", "[]", "null", '{"type":"dance"}', '{"type":"state","data":1}', '{"type":"step"}', '"\\ud800"')
"""Frames that are answered with an error and change nothing."""
BROKEN_FRAMES = (
    b"\x83\x80\x00\x00\x00\x00",
    b"\xf1\x80\x00\x00\x00\x00",
    b"\x81\x02{}",
    b"\x80\x81\x00\x00\x00\x00x",
    b"GET / HTTP/1.1\r\n\r\n",
    frame(b"x" * 1_100_000),
)
"""Bytes that a WebSocket server has to close the connection on."""


class Soak(BaseModel):
    """What the clients of one process do."""

    port: int
    episodes_file: Path
    """Scripted episodes: a JSON list of lists of messages."""
    sessions: int
    """Sessions at once."""
    seed: int
    silent: int
    """Sessions at most that fall silent, or deaf, and stay so."""


class Gone(Exception):  # noqa: N818
    """The server has closed the connection."""


class Client:
    """One WebSocket, without a safety net: it can send anything and leave in any way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int = 0) -> Client:
        """Open a session. Raises Gone, ConnectionError."""
        own = socket.socket()
        own.setblocking(False)
        if receive_buffer:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
        except BaseException:
            own.close()
            raise
        client = cls(*await asyncio.open_connection(sock=own))
        try:
            await client._shake_hands()
        except BaseException:
            client.drop()
            raise
        return client

    async def _shake_hands(self) -> None:
        self._writer.write(HANDSHAKE)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 101 " not in status[:16]:
            raise Gone(status.decode(errors="replace"))

    def send(self, text: str) -> None:
        """Send a message."""
        self._writer.write(frame(text.encode()))

    def send_bytes(self, data: bytes) -> None:
        """Send what need not be a frame."""
        self._writer.write(data)

    async def receive(self) -> dict[str, object]:
        """Return the next message. Raises Gone when there is none, TimeoutError."""
        async with asyncio.timeout(REPLY_S):
            while True:
                try:
                    opcode, payload = await self._frame()
                except (asyncio.IncompleteReadError, ConnectionError) as error:
                    raise Gone(str(error)) from None
                if opcode == TEXT:
                    message: dict[str, object] = json.loads(payload)
                    return message
                if opcode == PING:
                    self._writer.write(frame(payload, PONG))
                elif opcode == CLOSE:
                    raise Gone("closed")

    async def _frame(self) -> tuple[int, bytes]:
        head = await self._reader.readexactly(2)
        size = head[1]
        if size >= 126:
            size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
        return head[0] & 0xF, await self._reader.readexactly(size)

    async def until_closed(self) -> None:
        """Read until the server closes."""
        try:
            while True:
                await self.receive()
        except Gone:
            return

    def half_close(self) -> None:
        """End the stream in one direction."""
        self._writer.write_eof()

    def stop_reading(self) -> None:
        """Read nothing from now on: no replies, no pings, no end of the stream."""
        cast(asyncio.Transport, self._writer.transport).pause_reading()

    def drop(self) -> None:
        """Leave with a reset instead of a close frame."""
        own: socket.socket = self._writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def close(self) -> None:
        """Leave as one should."""
        self.send('{"type":"close"}')
        await self.until_closed()
        self._writer.close()


class Refused(Exception):  # noqa: N818
    """The server has no place."""


class Clients:
    """All sessions of this process."""

    def __init__(self, soak: Soak) -> None:
        self._soak = soak
        self._chance = random.Random(soak.seed)
        self._episodes: list[list[str]] = json.loads(soak.episodes_file.read_bytes())
        self._kept: list[Client] = []
        self._ways: dict[Callable[[Client], Awaitable[None]], int] = {
            self._polite: 60,
            self._dropping: 12,
            self._dropping_a_query: 8,
            self._sending_nonsense: 8,
            self._breaking_the_protocol: 4,
            self._half_closing: 4,
            self._pipelining: 4,
            self._silent: 2,
            self._deaf: 1,
        }
        self.counts: Counter[str] = Counter()
        self.surprises: list[str] = []
        """What a server must not do, in words."""

    async def play(self) -> None:
        """Open one session after the other, for ever; to be cancelled."""
        while True:
            (way,) = self._chance.choices(list(self._ways), list(self._ways.values()))
            if way in (self._silent, self._deaf) and len(self._kept) >= self._soak.silent:
                continue
            try:
                client = await Client.connect(self._soak.port, SMALL_BUFFER if way == self._deaf else 0)
            except (Gone, ConnectionError, asyncio.IncompleteReadError) as error:
                self.surprises.append(f"no connection: {error!r}")
                continue
            try:
                await way(client)
                self.counts[way.__name__] += 1
            except Refused:
                self.counts["refused"] += 1
                client.drop()
            except Gone as gone:
                self.surprises.append(f"{way.__name__}: the server closed the socket ({gone})")
            except TimeoutError:
                self.surprises.append(f"{way.__name__}: no reply within {REPLY_S:g} s")
                client.drop()
            except asyncio.CancelledError:
                client.drop()
                raise

    async def _start(self, client: Client) -> list[str]:
        """Start an episode; return its other messages."""
        first, *rest = self._chance.choice(self._episodes)
        await self._ask(client, first)
        self.counts["episodes"] += 1
        return rest

    async def _ask(self, client: Client, message: str) -> dict[str, object]:
        client.send(message)
        reply = await client.receive()
        data = reply["data"]
        assert isinstance(data, dict)
        if reply["type"] == "error":
            if data["code"] == "CAPACITY_REACHED":
                raise Refused
            self.surprises.append(f"{message[:200]} was answered with {data['code']}: {data['message']}")
        return data

    async def _episode(self, client: Client, steps: int | None = None) -> None:
        """Play an episode, or its first steps, and check that the replies are the ones to these steps."""
        messages = (await self._start(client))[:steps]
        for number, message in enumerate(messages, start=1):
            observation = (await self._ask(client, message))["observation"]
            assert isinstance(observation, dict)
            self.counts["steps"] += 1
            if observation["step_count"] != number:
                self.surprises.append(f"step {number} was answered with step {observation['step_count']}")

    async def _polite(self, client: Client) -> None:
        for _ in range(self._chance.randint(1, 2)):
            await self._episode(client)
        await client.close()

    async def _dropping(self, client: Client) -> None:
        await self._episode(client, self._chance.randrange(8))
        client.drop()

    async def _dropping_a_query(self, client: Client) -> None:
        await self._start(client)
        query = ENDLESS.format(number=self._chance.getrandbits(60))
        for _ in range(self._chance.randint(1, 3)):
            client.send(json.dumps({"type": "step", "data": {"action_type": "QUERY", "argument": query}}))
        await asyncio.sleep(self._chance.random() * 0.1)
        client.drop()

    async def _sending_nonsense(self, client: Client) -> None:
        for message in await self._start(client):
            nonsense = self._chance.choice(REFUSED_FRAMES)
            client.send(nonsense)
            reply = await client.receive()
            if reply["type"] != "error":
                self.surprises.append(f"{nonsense} was answered with {reply['type']}")
            await self._ask(client, message)
            self.counts["steps"] += 1
        await client.close()

    async def _breaking_the_protocol(self, client: Client) -> None:
        await self._episode(client, self._chance.randrange(4))
        client.send_bytes(self._chance.choice(BROKEN_FRAMES))
        if self._chance.random() < 0.5:
            client.half_close()
            await client.until_closed()
        client.drop()

    async def _half_closing(self, client: Client) -> None:
        await self._episode(client, self._chance.randrange(8))
        client.half_close()
        await client.until_closed()
        client.drop()

    async def _pipelining(self, client: Client) -> None:
        messages = await self._start(client)
        for message in messages:
            client.send(message)
        for number in range(1, len(messages) + 1):
            data = (await client.receive())["data"]
            assert isinstance(data, dict)
            if data["observation"]["step_count"] != number:
                self.surprises.append(f"pipelined step {number} was answered out of order")
            self.counts["steps"] += 1
        await client.close()

    async def _silent(self, client: Client) -> None:
        await self._episode(client, self._chance.randrange(4))
        client.stop_reading()
        self._kept.append(client)

    async def _deaf(self, client: Client) -> None:
        client.stop_reading()
        for _ in range(DEAF_EPISODES):
            for message in self._chance.choice(self._episodes):
                client.send(message)
        self._kept.append(client)

    async def report(self) -> None:
        """Print the counts, for ever; to be cancelled."""
        while True:
            print(json.dumps({"counts": self.counts, "surprises": self.surprises[:20]}), flush=True)
            await asyncio.sleep(REPORT_S)


async def soak_until_told(soak: Soak) -> None:
    """Play until a line comes in, then hold what is open until the input ends."""
    clients = Clients(soak)
    loop = asyncio.get_running_loop()
    playing = [asyncio.ensure_future(clients.play()) for _ in range(soak.sessions)]
    reporting = asyncio.ensure_future(clients.report())
    told = loop.run_in_executor(None, sys.stdin.readline)
    done, _ = await asyncio.wait([told, *playing], return_when=asyncio.FIRST_COMPLETED)
    for task in done - {told}:
        task.result()
    reporting.cancel()
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    print(json.dumps({"counts": clients.counts, "surprises": clients.surprises[:20]}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main(arguments: list[str]) -> None:
    """Read the spec and play."""
    soak = Soak.model_validate_json(Path(arguments[0]).read_bytes())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(soak_until_told(soak))


if __name__ == "__main__":
    main(sys.argv[1:])
