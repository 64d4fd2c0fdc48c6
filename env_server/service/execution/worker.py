"""The server's side of one query process (`process`): started, asked one job at a time, killed when it must stop."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from typing import Any, cast

from env_server.actions import Job
from env_server.errors import SQLEnvError
from env_server.service.execution.process import HEADER, Answer, ProcessSetup, frame

START_S = 60.0
"""Longest start of a process; on an idle machine it takes 0.2 s."""
END_S = 1.0
"""What a process gets to end by itself when its pipe is closed."""

_REQUESTS, _REPLIES = 0, 1
# Its modules are found where the server found them.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from env_server.service.execution.process import main; main()"


class WorkerLostError(SQLEnvError):
    """A query process ended, or did not start."""


class Worker(asyncio.SubprocessProtocol):
    """One query process."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._reply: asyncio.Future[Any] | None = None
        self.alive = True
        """Whether it is worth asking; it may be lost all the same."""
        self._exited = False
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, setup: ProcessSetup) -> Worker:
        """Start a process and wait until it is ready. Raises WorkerLostError."""
        command = (sys.executable, "-c", _PROGRAM, *sys.path)
        try:
            _, worker = await asyncio.get_running_loop().subprocess_exec(
                cls, *command, stdin=PIPE, stdout=PIPE, stderr=None
            )
        except OSError as error:
            raise WorkerLostError(f"a process for SQL cannot be started: {error.strerror}") from error
        try:
            async with asyncio.timeout(START_S):
                await worker._exchange(setup)
        except BaseException as error:
            await worker.aclose()
            if isinstance(error, WorkerLostError | TimeoutError):
                raise WorkerLostError("a process for SQL did not start; its standard error says why") from error
            raise
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._transport.get_pid()

    @property
    def overran(self) -> bool:
        """Whether it ended because a statement had used too much processor time; known after `aclose`."""
        return self._transport.get_returncode() == -signal.SIGPROF

    async def ask(self, job: Job) -> Answer:
        """Have a job answered. Raises WorkerLostError; cancelled or timed out, it kills the process."""
        answer: Answer = await self._exchange(job)
        return answer

    async def aclose(self) -> None:
        """Close its pipe, upon which it ends; kill it when it does not."""
        self.alive = False
        self._requests.close()
        await asyncio.wait({self._gone}, timeout=END_S)
        if not self._gone.done():
            self._kill()
        await asyncio.shield(self._gone)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the process's pipes; called by the event loop, as are the following."""
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._requests = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(_REQUESTS))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Take a part of an answer."""
        self._received += data
        if len(self._received) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._received)[0]
            if len(self._received) >= end and self._reply is not None and not self._reply.done():
                self._reply.set_result(pickle.loads(bytes(self._received[HEADER.size : end])))
                self._received.clear()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Nothing will come any more."""
        if fd == _REPLIES:
            self.alive = False
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(WorkerLostError("the process for SQL has ended"))
            self._close_when_all_is_over()

    def process_exited(self) -> None:
        """What it sent before may still arrive."""
        self._exited = True
        self._close_when_all_is_over()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is left of it."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def _exchange(self, message: object) -> Any:
        if not self.alive:
            raise WorkerLostError("the process for SQL has ended")
        self._reply = asyncio.get_running_loop().create_future()
        self._requests.write(frame(message))
        try:
            return await self._reply
        except asyncio.CancelledError:
            self.alive = False
            self._kill()
            raise

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._transport.kill()

    def _close_when_all_is_over(self) -> None:
        if not self.alive and self._exited:
            self._transport.close()
