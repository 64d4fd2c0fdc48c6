"""The server's side of one query process (`process`): started, asked one job at a time, killed when it must stop."""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from env_server.actions import Job
from env_server.errors import SQLEnvError
from env_server.service.execution.process import HEADER, Answer, ProcessSetup, frame

START_S = 60.0
"""Longest start of a process; on an idle machine it takes 0.2 s."""
END_S = 1.0
"""What a process gets to end by itself when its pipe is closed."""
BUFFER_BYTES = 1_000_000
"""More of an answer is read only as it is taken; an answer is rarely longer."""

# Its modules are found where the server found them.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from env_server.service.execution.process import main; main()"


class WorkerLostError(SQLEnvError):
    """A query process ended, or did not start."""


class Worker:
    """One query process; make one with `start`."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests, self._replies = process.stdin, process.stdout
        self._ended = False

    @classmethod
    async def start(cls, setup: ProcessSetup) -> Worker:
        """Start a process and wait until it is ready. Raises WorkerLostError."""
        command = (sys.executable, "-c", _PROGRAM, *sys.path)
        try:
            process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=BUFFER_BYTES)
        except OSError as error:
            raise WorkerLostError(f"a process for SQL cannot be started: {error.strerror}") from error
        worker = cls(process)
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
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is worth asking; it may be lost all the same."""
        return not self._ended and not self._replies.at_eof()

    @property
    def overran(self) -> bool:
        """Whether it ended because a statement had used too much processor time; known after `aclose`."""
        return self._process.returncode == -signal.SIGPROF

    async def ask(self, job: Job) -> Answer:
        """Have a job answered. Raises WorkerLostError; cancelled or timed out, it kills the process."""
        answer: Answer = await self._exchange(job)
        return answer

    async def aclose(self) -> None:
        """Close its pipe, upon which it ends; kill it when it does not."""
        self._ended = True
        self._requests.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        if self._process.returncode is None:
            self._kill()
        await asyncio.shield(self._process.wait())

    async def _exchange(self, message: object) -> Any:
        if not self.alive:
            raise WorkerLostError("the process for SQL has ended")
        self._requests.write(frame(message))
        try:
            (size,) = HEADER.unpack(await self._replies.readexactly(HEADER.size))
            return pickle.loads(await self._replies.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            self._ended = True
            raise WorkerLostError("the process for SQL has ended") from error
        except asyncio.CancelledError:
            self._ended = True
            self._kill()
            raise

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
