"""A worker's databases: answers that need no waiting are given at once, on the event loop; the others are jobs.

`SessionDatabases.query` tries the statement under bounds so narrow that it ends within about
three milliseconds whatever it is: few steps, small values, a small database, functions whose time is linear, a short
text with few wildcards. Most statements of an agent fit. What does not, or differs only in its numbers from one that
did not, raises `Pending`, with the job for the lanes; once `supply` has been given the lane's answer, the same query
gives it. A session whose allowance is used up is not tried: everybody else waits meanwhile.

Promises:
- The answer does not depend on the way: tried or from a lane, it has the same bytes, the same row count and the same
  virtual-machine steps. What the narrow bounds stop is never an answer.
- Memory is bounded: by `CACHE_BYTES` for what statements gave, `MAX_IDLE` connections, `MAX_SHAPES` texts.

Used by one thread, the event loop's.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from env_server.dataset import Question
from env_server.errors import DataError, SQLError
from env_server.explorer import ActionOutcome
from env_server.judging.verdict import Judgement
from env_server.service.execution.cpu_budget import Allowance
from env_server.service.execution.query_process import JudgeJob, QueryJob
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.sql.schema import Schema

Job = QueryJob | JudgeJob

CACHE_BYTES = 64_000_000
LARGEST_ENTRY = 256_000
"""Bytes of the largest result that is kept."""
MAX_IDLE = 64
"""Databases that stay open; each holds up to 1 MiB of page cache."""

MAX_SHAPES = 2_000
"""Statements that are remembered as too long for a trial, apart from the numbers in them: up to a kilobyte each."""

TRIAL_STEPS = 10_000
TRIAL_S = 0.003
TRIAL_VALUE_BYTES = 20_000
TRIAL_SQL_CHARS = 1_000
TRIAL_WILDCARDS = 6
"""`%` in a statement: the time of LIKE grows with each of them."""
TRIAL_DATABASE_BYTES = 64_000_000
"""Size of a database of which even `COUNT(*)`, a single step, is read in about a millisecond per million rows."""
TRIAL_FUNCTIONS = frozenset(
    (
        *("count", "sum", "avg", "min", "max", "total", "abs", "round", "length", "lower", "upper", "like"),
        *("coalesce", "ifnull", "nullif", "iif", "substr", "substring", "typeof", "date", "strftime", "julianday"),
    )
)

# A NATURAL JOIN of many tables takes milliseconds to plan, before a step is counted.
_SLOW_WORDS = re.compile(r"\|\||\b(?:recursive|natural|window|over)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_ENTRY_BYTES = 600
"""What an entry takes besides its texts."""
_STOPPED = frozenset(("budget", "size", "denied"))
"""Errors that the narrow bounds may have caused."""


class Pending(Exception):  # noqa: N818
    """No error: the answer needs a lane. Run `job`, `supply` its outcome, and ask again."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


Outcome = QueryResult | SQLError


class OutcomeCache:
    """What statements gave, as agents read it; the least recently used are given up first when they take too much."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str, int], tuple[ActionOutcome, int]] = OrderedDict()
        self.bytes = 0
        self.hits = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, db_id: str, sql: str, max_rows: int) -> ActionOutcome | None:
        """Return what a statement gave, if it is remembered."""
        key = (db_id, sql, max_rows)
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self.hits += 1
        return entry[0]

    def put(self, db_id: str, sql: str, max_rows: int, outcome: ActionOutcome) -> None:
        """Remember what a statement gave, unless it is too large."""
        key = (db_id, sql, max_rows)
        size = _ENTRY_BYTES + 4 * (len(sql) + len(outcome.result) + len(outcome.error)) + _size(outcome.rows)
        if size > LARGEST_ENTRY or key in self._entries:
            return
        self._entries[key] = (outcome, size)
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed


def _size(result: QueryResult | None) -> int:
    if result is None:
        return 0
    cells = (value for row in result.rows for value in row)
    return sum(60 + 4 * len(cell) if isinstance(cell, str | bytes) else 32 for cell in cells)


RunJob = Callable[[Job], Awaitable["QueryResult | Judgement"]]
"""Runs a job in a lane; raises SQLError."""

T = TypeVar("T")


async def finish(databases: SessionDatabases, run_job: RunJob, job: Job, call: Callable[[], T]) -> T:
    """Call again what raised `Pending`, once the lanes have answered; raises what `call` raises.

    `call` may need more than one answer, one after the other.
    """
    done: list[Job] = []
    try:
        while True:
            outcome: Outcome | Judgement
            try:
                outcome = await run_job(job)
            except SQLError as error:
                outcome = error
            databases.supply(job, outcome)
            done.append(job)
            try:
                return call()
            except Pending as pending:
                job = pending.job
    finally:
        for each in done:
            databases.withdraw(each)


class ServiceDatabases:
    """The databases of one worker, and what statements on them gave; see the module's promises."""

    def __init__(self, databases: Mapping[str, Path], settings: SandboxSettings) -> None:
        self._pool = DatabasePool(databases, settings, max_idle=1)
        self._paths = dict(databases)
        self._trial = settings.model_copy(
            update={
                "vm_steps": min(TRIAL_STEPS, settings.vm_steps),
                "deadline_s": TRIAL_S,
                "value_bytes": min(TRIAL_VALUE_BYTES, settings.value_bytes),
            }
        )
        self._open: OrderedDict[str, Sandbox] = OrderedDict()
        self._small: dict[str, bool] = {}
        self._too_long: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.outcomes = OutcomeCache()
        """What statements gave; for the environments that play on these databases."""

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema, read once. Raises DataError."""
        return self._pool.schema(db_id)

    def attempt(self, job: QueryJob) -> QueryResult:
        """Answer a statement within the narrow bounds. Raises SQLError, DataError, and Pending."""
        if not self._is_tried(job):
            raise Pending(job)
        shape = (job.db_id, _NUMBERS.sub("0", job.sql))
        if shape in self._too_long:
            raise Pending(job)
        try:
            result = self._sandbox(job.db_id).query(job.sql, job.max_rows)
        except SQLError as error:
            if error.kind in _STOPPED or not error.deterministic:
                self._remember(shape)
                raise Pending(job) from None
            raise
        if result.row_count is None:  # counting was stopped
            self._remember(shape)
            raise Pending(job)
        return result

    def close(self) -> None:
        """Close the databases."""
        self._pool.close()
        for sandbox in self._open.values():
            sandbox.close()
        self._open.clear()

    def _remember(self, shape: tuple[str, str]) -> None:
        self._too_long[shape] = None
        if len(self._too_long) > MAX_SHAPES:
            self._too_long.popitem(last=False)

    def _is_tried(self, job: QueryJob) -> bool:
        if len(job.sql) > TRIAL_SQL_CHARS or job.sql.count("%") > TRIAL_WILDCARDS or _SLOW_WORDS.search(job.sql):
            return False
        small = self._small.get(job.db_id)
        if small is None:
            path = self._paths.get(job.db_id)
            if path is None:
                raise DataError(f"no database {job.db_id!r}; there are {len(self._paths)}")
            small = self._small[job.db_id] = path.stat().st_size <= TRIAL_DATABASE_BYTES
        return small

    def _sandbox(self, db_id: str) -> Sandbox:
        sandbox = self._open.get(db_id)
        if sandbox is None:
            sandbox = Sandbox(self._paths[db_id], self._trial, functions=TRIAL_FUNCTIONS)
            self._open[db_id] = sandbox
            if len(self._open) > MAX_IDLE:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(db_id)
        return sandbox


class SessionDatabases:
    """The databases as one session sees them. An environment's `Databases`, and its judge of submitted queries."""

    def __init__(self, shared: ServiceDatabases, allowance: Allowance) -> None:
        self._shared = shared
        self._allowance = allowance
        self._supplied: dict[Job, Outcome | Judgement] = {}
        self.way = "none"
        """How the last statement was answered: `inline` or `lane`. Whoever reads it resets it to `none`."""

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema. Raises DataError."""
        return self._shared.schema(db_id)

    def query(self, db_id: str, sql: str, max_rows: int) -> QueryResult:
        """Answer a statement. Raises SQLError, DataError, and Pending."""
        job = QueryJob(db_id, sql, max_rows)
        if self._supplied and (supplied := self._supplied.get(job)) is not None:
            self.way = "lane"
            if isinstance(supplied, SQLError):
                raise supplied
            assert isinstance(supplied, QueryResult)
            return supplied
        if self._allowance.left_s <= 0:
            raise Pending(job)
        self.way = "inline"
        began = time.thread_time()
        try:
            return self._shared.attempt(job)
        finally:
            self._allowance.charge(time.thread_time() - began)

    def judge(self, question: Question, answer: str) -> Judgement:
        """Judge a submitted query. Raises Pending the first time, SQLError when the lanes came to no verdict."""
        job = JudgeJob(question, answer)
        self.way = "lane"
        judgement = self._supplied.get(job)
        if isinstance(judgement, SQLError):
            raise judgement
        if isinstance(judgement, Judgement):
            return judgement
        raise Pending(job)

    def supply(self, job: Job, outcome: Outcome | Judgement) -> None:
        """Take the answer of a lane. It is given until `withdraw`."""
        self._supplied[job] = outcome

    def withdraw(self, job: Job) -> None:
        """Forget the answer of a lane."""
        self._supplied.pop(job, None)
