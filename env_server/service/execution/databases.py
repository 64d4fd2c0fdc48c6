"""A worker's queries: answered at once on the event loop where that takes no waiting, else by the query pool, once.

`SessionJobs.at_once` tries a statement under bounds so narrow that the loop is held less than ten milliseconds of
processor time, whatever it is: few steps, a short text and program, a small database, and values so small that what the
statement's functions take between two looks at the clock is bounded before it runs (`env_server.sql.cost`). What
cannot be, such as LIKE on a text of more than two hundred bytes, is not tried. Most statements of an agent fit. What
does not, or differs only in its numbers from one that did not, is for `in_pool`. A session whose cpu_budget is used up
is not tried: everybody else waits meanwhile.

Promises:
- The answer does not depend on the route: tried or from the pool, it has the same bytes, the same row count and the
  same virtual-machine steps. What the narrow bounds stop is never an answer.
- Memory is bounded: by `CACHE_BYTES` for what statements gave, `MAX_IDLE` connections, `MAX_SHAPES` texts.

Used by one thread, the event loop's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from env_server.cache import Cache
from env_server.errors import DataError, SQLError
from env_server.jobs import Job, JudgeJob, QueryJob
from env_server.judging.verdict import Judgement
from env_server.lru import LRUCache
from env_server.outcomes import ActionOutcome, Outcome, query_outcome
from env_server.service.execution.cpu_budget import CpuBudget
from env_server.settings import EnvSettings
from env_server.sql.cost import RunLimits
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.sql.schema import Schema

CACHE_BYTES = 64_000_000
LARGEST_ENTRY = 256_000
"""Bytes of the largest result that is kept."""
MAX_IDLE = 64
"""Databases that stay open; each holds up to 1 MiB of page cache."""

MAX_SHAPES = 2_000
"""Statements that are remembered as too long for a trial, apart from the numbers in them: up to a kilobyte each."""

TRIAL_STEPS = 10_000
TRIAL_S = 0.003
TRIAL_LIMITS = RunLimits(gap_s=0.004, interval=100, opcodes=170, pattern_bytes=30, analysed=False)
"""With `TRIAL_S`, seven milliseconds at most."""
TRIAL_VALUE_BYTES = 2_000
TRIAL_SQL_CHARS = 1_000
TRIAL_DATABASE_BYTES = 64_000_000
TRIAL_COUNT_BYTES = 4_000_000
"""Size of a database of which `COUNT(*)` is tried: it reads a whole table in a single step, 0.15 ms a megabyte, and
fewer than ten fit in a program."""
TRIAL_FUNCTIONS = frozenset(
    (
        *("count", "sum", "avg", "min", "max", "total", "abs", "round", "length", "lower", "upper", "like"),
        *("coalesce", "ifnull", "nullif", "iif", "substr", "substring", "typeof", "date", "strftime", "julianday"),
    )
)

# A NATURAL JOIN of many tables takes milliseconds to plan, before a step is counted; a sort takes a single step, which
# is long where comparing is slow.
_SLOW_WORDS = re.compile(r"\|\||\b(?:recursive|natural|window|over|collate)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_ENTRY_BYTES = 600
"""What an entry takes besides its texts."""
_STOPPED = frozenset(("budget", "size", "denied"))
"""Errors that the narrow bounds may have caused."""


class OutcomeCache:
    """What statements gave, as agents read it; the least recently used are given up first when they take too much."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._entries: LRUCache[QueryJob, ActionOutcome] = LRUCache(max_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """What the entries take."""
        return self._entries.size

    def get(self, job: QueryJob) -> ActionOutcome | None:
        """Return what a statement gave, if it is remembered."""
        return self._entries.get(job)

    def put(self, job: QueryJob, outcome: ActionOutcome) -> None:
        """Remember what a statement gave, which it gives every time, unless it is too large."""
        size = _ENTRY_BYTES + 4 * (len(job.sql) + len(outcome.result) + len(outcome.error)) + _size(outcome.rows)
        if size <= LARGEST_ENTRY:
            self._entries.put(job, outcome, size)


def _size(result: QueryResult | None) -> int:
    if result is None:
        return 0
    cells = (value for row in result.rows for value in row)
    return sum(60 + 4 * len(cell) if isinstance(cell, str | bytes) else 32 for cell in cells)


class ServiceDatabases:
    """The databases of one worker, and what statements on them gave; see the module's promises."""

    def __init__(self, databases: Mapping[str, Path], settings: EnvSettings, cache: Cache | None = None) -> None:
        sandbox = settings.sandbox
        self._pool = DatabasePool(databases, sandbox, max_idle=1, cache=cache)
        self._paths = dict(databases)
        self._display = settings.display
        self._trial = replace(
            sandbox,
            vm_steps=min(TRIAL_STEPS, sandbox.vm_steps),
            deadline_s=TRIAL_S,
            value_bytes=min(TRIAL_VALUE_BYTES, sandbox.value_bytes),
        )
        self._open: LRUCache[str, Sandbox] = LRUCache(MAX_IDLE)
        self._sizes: dict[str, int] = {}
        self._too_long: LRUCache[tuple[str, str], bool] = LRUCache(MAX_SHAPES)
        self.outcomes = OutcomeCache()
        """What statements gave."""

    def learn_schemas(self) -> None:
        """See to it that `schema` takes a millisecond: a large database's rows are counted here. Raises DataError."""
        self._pool.learn_schemas()

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema, read once. Raises DataError."""
        return self._pool.schema(db_id)

    def attempt(self, job: QueryJob) -> QueryResult | SQLError | None:
        """Run a statement within the narrow bounds; None: they do not tell what it gives. Raises DataError."""
        if not self._is_tried(job):
            return None
        shape = (job.db_id, _NUMBERS.sub("0", job.sql))
        if self._too_long.get(shape):
            return None
        sandbox = self._sandbox(job.db_id)
        if sandbox.has_collations:
            return None
        try:
            result = sandbox.query(job.sql, job.max_rows)
        except SQLError as error:
            if error.deterministic and error.kind not in _STOPPED:
                return error
        else:
            if result.row_count is not None:
                return result
        self._too_long.put(shape, True)
        return None

    def outcome(self, job: QueryJob, result: QueryResult | SQLError) -> ActionOutcome:
        """Return what a statement gave, as the agent reads it, and remember it unless the machine decided it."""
        outcome = query_outcome(result, self._display)
        if not isinstance(result, SQLError) or result.deterministic:
            self.outcomes.put(job, outcome)
        return outcome

    def close(self) -> None:
        """Close the databases."""
        self._pool.close()
        for sandbox in self._open.clear():
            sandbox.close()

    def _is_tried(self, job: QueryJob) -> bool:
        if len(job.sql) > TRIAL_SQL_CHARS or _SLOW_WORDS.search(job.sql):
            return False
        return self._size(job.db_id) <= TRIAL_DATABASE_BYTES

    def _size(self, db_id: str) -> int:
        size = self._sizes.get(db_id)
        if size is None:
            path = self._paths.get(db_id)
            if path is None:
                raise DataError(f"no database {db_id!r}; there are {len(self._paths)}")
            try:
                size = self._sizes[db_id] = path.stat().st_size
            except OSError as error:
                raise DataError(f"database {db_id!r} cannot be read: {error.strerror}") from error
        return size

    def _sandbox(self, db_id: str) -> Sandbox:
        sandbox = self._open.get(db_id)
        if sandbox is None:
            functions = TRIAL_FUNCTIONS
            if self._size(db_id) > TRIAL_COUNT_BYTES:
                functions -= {"count"}
            sandbox = Sandbox(self._paths[db_id], self._trial, functions=functions, limits=TRIAL_LIMITS)
            for surplus in self._open.put(db_id, sandbox):
                surplus.close()
        return sandbox


class Done(NamedTuple):
    """A job that has been done."""

    outcome: Outcome
    route: Literal["cached", "inline", "lane"]
    """Remembered, tried on the event loop, or run in the query pool."""


RunInPool = Callable[[Job, CpuBudget], Awaitable[QueryResult | Judgement]]
"""Runs a job in the query pool, on an account; `QueryPool.run` is one."""


class SessionJobs:
    """Does the jobs of one session, on its account."""

    def __init__(self, databases: ServiceDatabases, run_in_pool: RunInPool, cpu_budget: CpuBudget) -> None:
        self._databases = databases
        self._run_in_pool = run_in_pool
        self._cpu_budget = cpu_budget

    def at_once(self, job: Job) -> Done | None:
        """Do a job that needs no waiting; None: it is one for `in_pool`. Raises DataError."""
        if not isinstance(job, QueryJob):
            return None
        known = self._databases.outcomes.get(job)
        if known is not None:
            return Done(known, "cached")
        if self._cpu_budget.left_s <= 0:
            return None
        began = time.thread_time()
        try:
            result = self._databases.attempt(job)
        finally:
            self._cpu_budget.charge(time.thread_time() - began)
        return None if result is None else Done(self._databases.outcome(job, result), "inline")

    async def in_pool(self, job: Job) -> Done:
        """Have a job done in the query pool.

        Raises DataError, PoolClosedError, and SQLError when the pool came to no verdict.
        """
        if isinstance(job, JudgeJob):
            judgement = await self._run_in_pool(job, self._cpu_budget)
            assert isinstance(judgement, Judgement)
            return Done(judgement, "lane")
        try:
            result = await self._run_in_pool(job, self._cpu_budget)
        except SQLError as error:
            return Done(self._databases.outcome(job, error), "lane")
        assert isinstance(result, QueryResult)
        return Done(self._databases.outcome(job, result), "lane")
