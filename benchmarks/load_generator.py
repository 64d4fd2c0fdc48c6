"""A WebSocket load generator that costs less than the servers it measures, in a process of its own.

    python -m benchmarks.load_generator SPEC.json

Raw protocols on uvloop: one handshake, then one text frame out, one reply in, strictly by turns in each session; the
frames are built before the clock starts. Two phases. First every session connects and resets, all at once; the
generator prints a line and waits for a line, so that the caller can look at the server while all sessions are idle.
Then every session plays its messages from where it is, over and over, for `warmup_s + seconds`, and a second line
holds the counts and the latencies of the steps.

With `interval_s` the sessions are paced: a step is due every so often, and its latency counts from when it was due, so
that a server that stalls is charged for all that it holds up. Without it, the next message follows the reply at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from pathlib import Path
from typing import Any, cast

import uvloop
from pydantic import BaseModel

TEXT, CLOSE, PING, PONG = 0x1, 0x8, 0x9, 0xA
OBSERVATION = b'"observation"'
HEAD_BYTES = 40
"""Bytes of a reply in which its type is looked for."""
CONNECT_TIMEOUT_S = 60.0
HANDSHAKE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Load(BaseModel):
    """What a generator is asked to do; `messages_file` holds a JSON list of each session's messages."""

    port: int
    messages_file: Path
    episode: int
    """Messages of an episode; the first one of each is a reset and not counted as a step."""
    warmup_s: float = 1.0
    seconds: float = 5.0
    interval_s: float = 0.0


class Ready(BaseModel):
    """After the first phase."""

    connect_s: float
    """Until every session had connected and had the reply to its reset."""


class Outcome(BaseModel):
    """After the second phase; latencies in seconds."""

    seconds: float
    steps: int
    messages: int
    p50_s: float
    p99_s: float
    failures: int
    """Replies that were no observation."""
    lost: int
    """Sessions that the server closed."""
    cpu_s: float
    """Processor time of the generator itself."""


def frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Return a client's frame, masked with zeros: the bytes stay as they are, and the server's work is the same."""
    size = len(payload)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8, "big")
    return head + bytes(4) + payload


class Fleet:
    """All sessions and what they count."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.loop = asyncio.get_running_loop()
        self.latencies = array("d")
        self.measuring = False
        self.running = False
        self.steps = self.messages = self.failures = self.lost = 0
        self.idle = 0
        self.all_idle = asyncio.Event()
        texts: list[list[str]] = json.loads(load.messages_file.read_bytes())
        self.sessions = [Session(self, [frame(text.encode()) for text in own]) for own in texts]

    async def connect(self) -> Ready:
        """Connect and reset all sessions."""
        start = time.perf_counter()
        opening = (self._open(session) for session in self.sessions)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.gather(*opening)
            await self.all_idle.wait()
        return Ready(connect_s=time.perf_counter() - start)

    async def _open(self, session: Session) -> None:
        await self.loop.create_connection(lambda: session, "127.0.0.1", self.load.port)

    async def play(self) -> Outcome:
        """Run the second phase and count."""
        load = self.load
        self.running = True
        for number, session in enumerate(self.sessions):
            session.start(load.interval_s * number / len(self.sessions))
        await asyncio.sleep(load.warmup_s)
        self.measuring = True
        start, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(load.seconds)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.measuring = self.running = False
        found = sorted(self.latencies) or [float("nan")]
        return Outcome(
            seconds=seconds,
            steps=self.steps,
            messages=self.messages,
            p50_s=found[len(found) // 2],
            p99_s=found[int(len(found) * 0.99)],
            failures=self.failures,
            lost=self.lost,
            cpu_s=cpu,
        )

    def rest(self) -> None:
        """Note that one more session has nothing to do."""
        self.idle += 1
        if self.idle >= len(self.sessions):
            self.all_idle.set()


class Session(asyncio.Protocol):
    """One WebSocket: the client's side of the protocol, as far as a server of replies needs it."""

    def __init__(self, fleet: Fleet, frames: list[bytes]) -> None:
        self._fleet = fleet
        self._frames = frames
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._connected = False
        self._next = 0
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the upgrade."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(HANDSHAKE)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it."""
        self._fleet.lost += 1
        self._fleet.rest()

    def start(self, delay_s: float) -> None:
        """Begin the second phase; a paced session begins after `delay_s`."""
        self._due = time.perf_counter() + delay_s
        if self._fleet.load.interval_s:
            self._fleet.loop.call_later(delay_s, self._send)
        else:
            self._send()

    def data_received(self, data: bytes) -> None:
        """Take frames apart."""
        if self._buffer:
            data = self._buffer + data
        if not self._connected:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return
            if b" 101 " not in head[:16]:
                raise ConnectionError(head.decode(errors="replace"))
            self._connected = True
            self._send()
        start, total = 0, len(data)
        while total - start >= 2:
            size, body = data[start + 1], start + 2
            if size == 126:
                size, body = int.from_bytes(data[start + 2 : start + 4], "big"), start + 4
            elif size == 127:
                size, body = int.from_bytes(data[start + 2 : start + 10], "big"), start + 10
            if total < body + size or body > total:
                break
            self._frame(data[start] & 0xF, data, body, body + size)
            start = body + size
        self._buffer = data[start:]

    def _frame(self, opcode: int, data: bytes, start: int, end: int) -> None:
        if opcode == TEXT:
            self._reply(data, start, end)
        elif opcode == PING:
            self._write(frame(data[start:end], PONG))
        elif opcode == CLOSE and self._transport:
            self._transport.close()

    def _reply(self, data: bytes, start: int, end: int) -> None:
        fleet, load = self._fleet, self._fleet.load
        now = time.perf_counter()
        if OBSERVATION not in data[start : min(start + HEAD_BYTES, end)]:
            fleet.failures += 1
        if not fleet.running:
            fleet.rest()
            return
        if fleet.measuring:
            fleet.messages += 1
            if (self._next - 1) % load.episode:
                fleet.steps += 1
                fleet.latencies.append(now - self._due)
        if not load.interval_s:
            self._due = now
            self._send()
            return
        self._due += load.interval_s
        if self._due <= now:
            self._send()
        else:
            fleet.loop.call_later(self._due - now, self._send)

    def _send(self) -> None:
        if self._next == len(self._frames):
            self._next = 0
        self._write(self._frames[self._next])
        self._next += 1

    def _write(self, data: bytes) -> None:
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)


def report(result: BaseModel) -> None:
    """Print one line for the caller."""
    print(result.model_dump_json(), flush=True)


def give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what went wrong in a session and end: half a fleet would measure something else."""
    loop.default_exception_handler(context)
    loop.stop()


async def generate(load: Load) -> None:
    """Run both phases."""
    fleet = Fleet(load)
    fleet.loop.set_exception_handler(give_up)
    report(await fleet.connect())
    sys.stdin.readline()
    report(await fleet.play())


def main(arguments: list[str]) -> None:
    """Read the load's file and run."""
    load = Load.model_validate_json(Path(arguments[0]).read_bytes())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(generate(load))


if __name__ == "__main__":
    main(sys.argv[1:])
