"""The server's side of one child process (`lane_process`): started, asked, and ended without leaving a trace."""

from __future__ import annotations

import asyncio
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from env_server.errors import SQLEnvError
from env_server.service.lane_process import CANCEL, HEADER, Answer, Job, LaneSetup, frame

START_S = 60.0
"""Longest start of a child; on an idle machine it takes 0.2 s."""
END_S = 1.0
"""What a child gets to end by itself when its pipe is closed."""

_READ_BYTES = 1_048_576
# Its modules are found where the server found them. Polite from then on: a server under load waits for its start.
_PROGRAM = (
    "import os, sys; sys.path[:] = sys.argv[2:]; from env_server.service.lane_process import main; "
    "os.nice(int(sys.argv[1])); main()"
)


class ChildLostError(SQLEnvError):
    """A child process ended, or did not start."""


class LaneChild:
    """One child process. It is asked one job at a time."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests = process.stdin
        self._replies = process.stdout

    @classmethod
    async def start(cls, setup: LaneSetup, niceness: int) -> LaneChild:
        """Start a child and wait until it is ready. Raises ChildLostError."""
        command = (sys.executable, "-c", _PROGRAM, str(niceness), *sys.path)
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_READ_BYTES)
        except OSError as error:
            raise ChildLostError(f"a process for SQL cannot be started: {error.strerror}") from error
        child = cls(process)
        try:
            async with asyncio.timeout(START_S):
                child._send(setup)
                await child._receive()
        except BaseException as error:
            child.kill()
            await child.end()
            if isinstance(error, ChildLostError | TimeoutError):
                raise ChildLostError("a process for SQL did not start; its standard error says why") from error
            raise
        return child

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is worth asking; it may be lost all the same."""
        return self._process.returncode is None and not self._replies.at_eof()

    async def ask(self, job: Job) -> Answer:
        """Send a job and wait for its answer. Raises ChildLostError."""
        self._send(job)
        answer: Answer = await self._receive()
        return answer

    def cancel(self) -> None:
        """Have the job that is being run answered soon, whatever the answer."""
        self._send(CANCEL)

    def kill(self) -> None:
        """Kill it; `end` is still to be awaited."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        """Close its pipe, upon which it ends; kill it when it does not. No `ask` may be waiting."""
        end = asyncio.ensure_future(self._ended())
        await asyncio.wait({end}, timeout=END_S)
        if not end.done():
            self.kill()
        await end

    async def _ended(self) -> None:
        self._requests.close()
        # What it still has to say would keep its pipe, and on some event loops the wait, from ending.
        with suppress(OSError):
            while await self._replies.read(_READ_BYTES):
                pass
        await self._process.wait()

    def _send(self, message: object) -> None:
        # Of a process that is lost, `_receive` tells.
        if not self._requests.is_closing():
            self._requests.write(frame(message))

    async def _receive(self) -> Any:
        try:
            (size,) = HEADER.unpack(await self._replies.readexactly(HEADER.size))
            return pickle.loads(await self._replies.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ChildLostError("it has ended") from error
