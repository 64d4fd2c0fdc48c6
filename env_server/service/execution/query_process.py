"""A query process: runs one job at a time for the server that started it.

Promises:
- Each job is answered once, in the order sent, as `DatabasePool` and `SQLJudge` answer it. On trial, a job that the
  bounds stop is answered by None instead: it has to be run with more.
- CANCEL stops the running statement at once, and no other one.
- A statement on a question's database that uses OVERRUN_S more processor time than its deadline ends the process, by
  SIGPROF: of what runs in one step of SQLite, nothing else can.
- The process ends when the server closes the pipe or dies, in the middle of a statement too.

Server and child speak in length-prefixed pickles over the child's standard input and output, a pipe that nobody else
can reach; what comes from the network is never more than a text inside a job.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from env_server.errors import DataError, SQLError
from env_server.jobs import Job, JudgeJob, QueryJob
from env_server.judging.verdict import Judgement
from env_server.settings import JudgingSettings, SandboxSettings
from env_server.sql.pool import DatabasePool, run_query
from env_server.sql.sandbox import QueryResult, Sandbox, limit_memory
from env_server.sql.schema import Schema

if TYPE_CHECKING:
    from env_server.test_suites.judge import SQLJudge

MAX_IDLE = 8
"""Databases that a child keeps open; opening one costs a third of a millisecond, keeping one up to 1 MiB."""
HEADER = struct.Struct("!I")
"""Precedes each message: its length in bytes."""
READY = "ready"
"""The child's first message, in answer to its setup."""
CANCEL = "cancel"
"""From the server: the job that was sent last is not wanted any more."""

OVERRUN_S = 1.0
"""Processor time beyond its deadline after which a statement is killed, with its process."""
_INTERRUPT_INTERVAL_S = 0.005
_BOUNDED = frozenset(("budget", "size"))
"""Errors that the bounds of a trial may have caused."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An SQLError on its way to the server; a DataError where `kind` is empty."""

    kind: str
    message: str
    deterministic: bool = True

    def error(self) -> SQLError | DataError:
        """Return the error, to be raised."""
        if not self.kind:
            return DataError(self.message)
        return SQLError(self.kind, self.message, deterministic=self.deterministic)


Reply = QueryResult | Judgement | Failure | None
"""None: on trial, the job needs more than the bounds allow."""


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """What a child works with; its first message.

    `trial`: a job that the bounds stop will be run elsewhere. `judging` is None where no JudgeJob will come, and
    `suites_dir` where queries are judged on the question's database alone.
    """

    databases: dict[str, Path]
    sandbox: SandboxSettings
    trial: bool = False
    judging: JudgingSettings | None = None
    suites_dir: Path | None = None


class Answer(NamedTuple):
    """A child's answer to a job, and what it cost."""

    reply: Reply
    cpu_s: float


class _Databases:
    """The databases, with the statement that runs in reach of `interrupt`."""

    def __init__(self, setup: ProcessSetup, limit_cpu: Callable[[float], None]) -> None:
        self._pool = DatabasePool(setup.databases, setup.sandbox, MAX_IDLE)
        self._limit_cpu = limit_cpu
        self._most_s = setup.sandbox.deadline_s + OVERRUN_S
        self._running: Sandbox | None = None

    def query(self, db_id: str, sql: str, max_rows: int) -> QueryResult:
        """Run one statement. Raises SQLError, DataError."""
        with self._pool.lease(db_id) as sandbox:
            self._running = sandbox
            self._limit_cpu(self._most_s)
            try:
                return sandbox.query(sql, max_rows)
            finally:
                self._limit_cpu(0)
                self._running = None

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema. Raises DataError."""
        return self._pool.schema(db_id)

    def interrupt(self) -> None:
        """Stop the running statement, from another thread. Without one, do nothing."""
        running = self._running
        if running is not None:
            running.interrupt()


class JobRunner:
    """Runs jobs, on one thread.

    `limit_cpu` is called before each statement with the processor seconds that it may take, and afterwards with 0.
    """

    def __init__(self, setup: ProcessSetup, limit_cpu: Callable[[float], None] | None = None) -> None:
        self._setup = setup
        self._databases = _Databases(setup, limit_cpu or (lambda _: None))
        self._judge = None if setup.judging is None else self._make_judge(setup.judging)

    def run(self, job: Job) -> Reply:
        """Run a job and return its answer; None when, on trial, it needs more than the bounds allow."""
        try:
            return self._query(job) if isinstance(job, QueryJob) else self._verdict(job)
        except DataError as error:
            return Failure("", str(error))

    def _query(self, job: QueryJob) -> Reply:
        result = run_query(self._databases, job)
        if self._setup.trial and _is_stopped(result):
            return None
        return _failure(result) if isinstance(result, SQLError) else result

    def _verdict(self, job: JudgeJob) -> Reply:
        if self._judge is None:
            raise DataError("this process does not judge")
        result = run_query(self._databases, self._judge.query(job.question, job.answer))
        if self._setup.trial and _is_stopped(result):
            return None
        if isinstance(result, SQLError) and not result.deterministic:
            return _failure(result)  # it is not the query's own, so it tells nothing of the query
        judgement = self._judge.on_database(job.question, result)
        return self._judge.on_test_databases(job.question, job.answer) if judgement.correct else judgement

    def interrupt(self) -> None:
        """Stop the running statement on a question's database, from another thread. Without one, do nothing."""
        self._databases.interrupt()

    def _make_judge(self, judging: JudgingSettings) -> SQLJudge:
        # A third of a child's memory and start-up time, which value mode need not pay.
        from env_server.test_suites.judge import SQLJudge
        from env_server.test_suites.store import Suites

        setup = self._setup
        suites = None
        if setup.suites_dir is not None:
            suites = Suites(setup.databases, setup.sandbox, setup.suites_dir, read_only=True)
        return SQLJudge(self._databases, suites, judging, setup.sandbox)


def _is_stopped(result: QueryResult | SQLError) -> bool:
    """Tell whether the bounds of a trial, or the machine, may have decided the result."""
    if isinstance(result, SQLError):
        return not result.deterministic or result.kind in _BOUNDED
    return result.row_count is None


def _failure(error: SQLError) -> Failure:
    return Failure(error.kind, error.message, error.deterministic)


def frame(message: object) -> bytes:
    """Return a message as it goes over the pipe."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def limit_cpu(seconds: float) -> None:
    """Let the process end, by SIGPROF, once it has used so much more processor time; 0: let it go on."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serve the server at the other end of standard input and output. Never returns."""
    # A signal to the whole process group is the server's to handle; it closes the pipe when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests = os.fdopen(0, "rb")
    replies = os.fdopen(os.dup(1), "wb")
    # Nothing that prints may get between the messages.
    os.dup2(2, 1)
    setup = _receive(requests)
    limit_memory(setup.sandbox)
    runner = JobRunner(setup, limit_cpu)
    jobs: SimpleQueue[Job] = SimpleQueue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_listen, args=(requests, jobs, idle, runner), daemon=True).start()
    _send(replies, READY)
    while True:
        job = jobs.get()
        began = time.thread_time()
        answer = Answer(runner.run(job), time.thread_time() - began)
        # Before the answer, after which the next job may come and clear it.
        idle.set()
        _send(replies, answer)


def _listen(requests: BinaryIO, jobs: SimpleQueue[Job], idle: threading.Event, runner: JobRunner) -> None:
    """Take what the server sends, while the main thread runs a job."""
    while True:
        message = _receive(requests)
        if message != CANCEL:
            idle.clear()
            jobs.put(message)
            continue
        # Again and again, since the statement may be about to start, and a verdict runs several.
        while not idle.is_set():
            runner.interrupt()
            idle.wait(_INTERRUPT_INTERVAL_S)


def _receive(requests: BinaryIO) -> Any:
    """Return the next message; end the process where there is none."""
    header = requests.read(HEADER.size)
    if len(header) == HEADER.size:
        (size,) = HEADER.unpack(header)
        body = requests.read(size)
        if len(body) == size:
            return pickle.loads(body)
    # Not sys.exit: the main thread may be in the middle of a statement.
    os._exit(0)


def _send(replies: BinaryIO, message: object) -> None:
    try:
        replies.write(frame(message))
        replies.flush()
    except BrokenPipeError:
        os._exit(0)
