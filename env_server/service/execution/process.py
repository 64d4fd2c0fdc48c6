"""The program of a query process: it runs one job at a time for the server that started it.

Guarantees:
- Each job is answered once. Under reduced limits, a job that they stop is answered by None: it needs the full ones.
- A statement on a question's database that uses OVERRUN_S more processor time than its deadline ends the process, by
  SIGPROF: of what runs in one step of SQLite, nothing else can.
- The process ends when the server closes the pipe or dies, at the latest after its statement.

Server and process exchange length-prefixed pickles over standard input and output, a pipe that nobody else can reach;
what comes from the network is never more than a text inside a job.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from env_server.actions import Job, JudgeJob, Outcome, query_outcome
from env_server.errors import DataError, SQLEnvError, SQLError
from env_server.settings import DisplaySettings, JudgingSettings, SandboxSettings
from env_server.sql.pool import DatabasePool, QueryJob, run_query
from env_server.sql.sandbox import QueryResult, limit_memory

if TYPE_CHECKING:
    from env_server.test_suites.judge import SQLJudge

MAX_IDLE = 8
"""Databases that a process keeps open; opening one costs a third of a millisecond, keeping one up to 1 MiB."""
HEADER = struct.Struct("!I")
"""Precedes each message: its length in bytes."""
OVERRUN_S = 1.0
"""Processor time beyond its deadline after which a statement is killed, with its process."""
_BOUNDED = ("budget", "size")
"""Errors that reduced limits may have caused."""


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What a process works with; its first message.

    `sandbox` bounds a statement on a question's database, `full_sandbox` one on a test database. `judging` is None
    where no JudgeJob will come, `suites_dir` where queries are judged on the question's database alone.
    """

    databases: dict[str, Path]
    sandbox: SandboxSettings
    full_sandbox: SandboxSettings
    display: DisplaySettings
    judging: JudgingSettings | None = None
    suites_dir: Path | None = None

    @property
    def reduced(self) -> bool:
        """Whether a job that the limits stop will be run elsewhere."""
        return self.sandbox != self.full_sandbox


class Answer(NamedTuple):
    """The answer to a job: its outcome, an error to be raised, or None where the full limits are needed."""

    outcome: Outcome | SQLEnvError | None
    deterministic: bool = True
    """Whether it is so every time; else a clock or the machine decided."""


class _LimitedPool(DatabasePool):
    """Databases whose statements end the process when they use too much processor time."""

    def __init__(self, setup: ProcessSetup, limit_cpu: Callable[[float], None]) -> None:
        super().__init__(setup.databases, setup.sandbox, MAX_IDLE)
        self._limit_cpu = limit_cpu
        self._limit_s = setup.sandbox.deadline_s + OVERRUN_S

    def query(self, db_id: str, sql: str, max_rows: int) -> QueryResult:
        """Run one statement. Raises SQLError, DataError."""
        with self.lease(db_id) as sandbox:
            self._limit_cpu(self._limit_s)
            try:
                return sandbox.query(sql, max_rows)
            finally:
                self._limit_cpu(0)


class JobRunner:
    """Runs jobs. `limit_cpu` gets the processor seconds that a statement may take, and 0 after it."""

    def __init__(self, setup: ProcessSetup, limit_cpu: Callable[[float], None] = lambda _: None) -> None:
        self._setup = setup
        self._databases = _LimitedPool(setup, limit_cpu)
        self._judge = None if setup.judging is None else self._make_judge(setup.judging)

    def run(self, job: Job) -> Answer:
        """Run a job."""
        try:
            return self._query(job) if isinstance(job, QueryJob) else self._verdict(job)
        except DataError as error:
            return Answer(DataError(str(error)), deterministic=False)

    def _query(self, job: QueryJob) -> Answer:
        result = run_query(self._databases, job)
        if self._is_stopped(result):
            return Answer(None)
        return Answer(
            query_outcome(result, self._setup.display), not isinstance(result, SQLError) or result.deterministic
        )

    def _verdict(self, job: JudgeJob) -> Answer:
        if self._judge is None:
            raise DataError("this process does not judge")
        result = run_query(self._databases, self._judge.query(job.question, job.answer))
        if self._is_stopped(result):
            return Answer(None)
        if isinstance(result, SQLError) and not result.deterministic:
            return Answer(
                SQLEnvError(str(result)), deterministic=False
            )  # the machine's, so it tells nothing of the query
        judgement = self._judge.on_database(job.question, result)
        return Answer(self._judge.on_test_databases(job.question, job.answer) if judgement.correct else judgement)

    def _is_stopped(self, result: QueryResult | SQLError) -> bool:
        """Tell whether reduced limits, or the machine, may have decided the result."""
        if not self._setup.reduced:
            return False
        if isinstance(result, SQLError):
            return not result.deterministic or result.kind in _BOUNDED
        return result.row_count is None

    def _make_judge(self, judging: JudgingSettings) -> SQLJudge:
        # A third of a process's memory and start-up time, which value mode need not pay.
        from env_server.test_suites.judge import SQLJudge
        from env_server.test_suites.store import Suites

        setup, suites = self._setup, None
        if setup.suites_dir is not None:
            suites = Suites(setup.databases, setup.full_sandbox, setup.suites_dir, read_only=True)
        return SQLJudge(self._databases, suites, judging, setup.full_sandbox)


def frame(message: object) -> bytes:
    """Return a message as it goes over the pipe."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def main() -> None:
    """Serve the server at the other end of standard input and output, until it closes the pipe."""
    # A signal to the whole process group is the server's to handle; it closes the pipe when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests = os.fdopen(0, "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # Nothing that prints may get between the messages.
    os.dup2(2, 1)
    setup: ProcessSetup = _receive(requests)
    limit_memory(setup.full_sandbox)
    runner = JobRunner(setup, lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds) and None)
    _send(replies, None)
    while True:
        _send(replies, runner.run(_receive(requests)))


def _receive(requests: BinaryIO) -> Any:
    """Return the next message; end the process where there is none."""
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        os._exit(0)
    return pickle.loads(requests.read(*HEADER.unpack(header)))


def _send(replies: BinaryIO, message: object) -> None:
    try:
        replies.write(frame(message))
        replies.flush()
    except BrokenPipeError:
        os._exit(0)
