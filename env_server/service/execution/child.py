"""The server's side of one child process (`query_process`): started, asked, and ended without leaving a trace.

An answer is handed on from the callback of the process's pipe, and the next job can be sent from there: on a busy event
loop every task in between would wait its turn, and the process with it.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from env_server.errors import SQLEnvError
from env_server.jobs import Job
from env_server.service.execution.query_process import CANCEL, HEADER, Answer, ProcessSetup, frame

START_S = 60.0
"""Longest start of a child; on an idle machine it takes 0.2 s."""
END_S = 1.0
"""What a child gets to end by itself when its pipe is closed."""

_REQUESTS, _REPLIES = 0, 1
# Its modules are found where the server found them. Polite from then on: a server under load waits for its start.
_PROGRAM = (
    "import os, sys; sys.path[:] = sys.argv[2:]; from env_server.service.execution.query_process import main; "
    "os.nice(int(sys.argv[1])); main()"
)


class ChildLostError(SQLEnvError):
    """A child process ended, or did not start."""


class ChildProcess(asyncio.SubprocessProtocol):
    """One child process. It is asked one job at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._tell: Callable[[Any], None] | None = None
        self._at_end = False
        self._exited = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, setup: ProcessSetup, niceness: int) -> ChildProcess:
        """Start a child and wait until it is ready. Raises ChildLostError."""
        command = (sys.executable, "-c", _PROGRAM, str(niceness), *sys.path)
        loop = asyncio.get_running_loop()
        try:
            _, child = await loop.subprocess_exec(cls, *command, stdin=PIPE, stdout=PIPE, stderr=None)
        except OSError as error:
            raise ChildLostError(f"a process for SQL cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(START_S):
                await child._is_ready(setup)
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
        return self._transport.get_pid()

    @property
    def alive(self) -> bool:
        """Whether it is worth asking; it may be lost all the same."""
        return not self._at_end and not self._exited

    @property
    def overran(self) -> bool:
        """Whether it ended because a statement had used too much processor time; known after `end`."""
        return self._transport.get_returncode() == -signal.SIGPROF

    def ask(self, job: Job, tell: Callable[[Answer | ChildLostError], None]) -> None:
        """Send a job to a child that is alive. `tell` is called once, with the answer or when the child is lost."""
        self._tell = tell
        self._send(job)

    def cancel(self) -> None:
        """Have the job that is being run answered soon, whatever the answer."""
        self._send(CANCEL)

    def kill(self) -> None:
        """Kill it; `end` is still to be awaited."""
        with suppress(ProcessLookupError):
            self._transport.kill()

    async def end(self) -> None:
        """Close its pipe, upon which it ends; kill it when it does not. Whoever asked it something is not told."""
        self._tell = None
        self._requests.close()
        await asyncio.wait({self._gone}, timeout=END_S)
        if not self._gone.done():
            self.kill()
        await asyncio.shield(self._gone)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the process's pipes; called by the event loop, as are the following."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._requests = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_REQUESTS))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Hand on what is complete."""
        self._received += data
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            end = HEADER.size + size
            if len(self._received) < end:
                return
            message = pickle.loads(bytes(self._received[HEADER.size : end]))
            del self._received[:end]
            self._hand_on(message)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Nothing will come any more."""
        if fd == _REPLIES:
            self._at_end = True
            self._hand_on(ChildLostError("it has ended"))
            self._close_when_all_is_over()

    def process_exited(self) -> None:
        """What it sent before may still arrive."""
        self._exited = True
        self._close_when_all_is_over()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def _is_ready(self, setup: ProcessSetup) -> None:
        ready: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._tell = lambda message: None if ready.done() else ready.set_result(message)
        if self._at_end:
            raise ChildLostError("it has ended")
        self._send(setup)
        message = await ready
        if isinstance(message, ChildLostError):
            raise message

    def _hand_on(self, message: object) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(message)

    def _close_when_all_is_over(self) -> None:
        if self._at_end and self._exited:
            self._transport.close()

    def _send(self, message: object) -> None:
        # Of a process that is lost, its pipe's end tells.
        if not self._requests.is_closing():
            self._requests.write(frame(message))
