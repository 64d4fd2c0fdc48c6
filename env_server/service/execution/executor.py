"""Runs the jobs of all sessions: from the cache, on the event loop, or in two pools of query processes.

A statement is first tried on the event loop under limits so narrow that it is held less than ten milliseconds, whatever
the statement (`InlineDatabases`). Else it goes to the `fast` pool, under limits that ordinary queries hardly ever meet;
one that meets them runs afresh in the `slow` pool under the full ones. Results are deterministic, so the answer and its
cost are those of the last run, as if there had been no other. A submitted query is judged the same way.

Guarantees:
- The answer does not depend on where the job ran: what narrower limits stop is never an answer.
- A job that is under way already is not run twice: all that ask for it wait for the one answer. First come, first
  served. When none waits any more, its process is killed and replaced.
- A process that uses a second of processor time more than the deadline, or takes `WALL_FACTOR` times the deadline by
  the clock, is killed and replaced. A job whose process is lost runs again, once; then it fails, and is not cached.
- Memory is bounded: by `CACHE_BYTES` for results, `MAX_OPEN` connections, `MAX_TEMPLATES` texts.

Used on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self

from env_server.actions import ActionOutcome, Job, Outcome, query_outcome
from env_server.cache import LRUCache
from env_server.errors import DataError, SQLEnvError, SQLError
from env_server.service.execution.process import OVERRUN_S, Answer, ProcessSetup
from env_server.service.execution.worker import Worker, WorkerLostError
from env_server.settings import EnvSettings, SandboxSettings
from env_server.sql.cost import RunLimits
from env_server.sql.pool import QueryJob
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.types import AnswerMode

logger = logging.getLogger(__name__)

CACHE_BYTES = 64_000_000
LARGEST_ENTRY = 256_000
"""Bytes of the largest result that is cached."""
_ENTRY_BYTES = 600
"""What an entry takes besides its texts."""

FAST_VM_STEPS = 2_000_000
"""About 40 ms; no gold query of Spider needs more than 1.2 million."""
FAST_VALUE_BYTES = 100_000
"""On texts of a megabyte, a single step can take longer than all others together."""
FAST_DEADLINE_S = 0.2
"""For statements whose steps are slow all the same."""
WALL_FACTOR = 5
"""A statement may take this many times its deadline, of processor time, by the clock: a machine has other work."""
JUDGING_S = 60.0
"""What a verdict may take besides, by the clock: a last resort; test databases usually take some milliseconds."""
TRIES = 2

MAX_OPEN = 64
"""Databases that the event loop keeps open; each holds up to 1 MiB of page cache."""
MAX_TEMPLATES = 2_000
"""Query templates (statements apart from their numbers) that are known to be too long for the event loop."""
INLINE_STEPS = 10_000
INLINE_S = 0.003
INLINE_LIMITS = RunLimits(gap_s=0.004, interval=100, opcodes=170, pattern_bytes=30, analysed=False)
"""With `INLINE_S`, seven milliseconds at most."""
INLINE_VALUE_BYTES = 2_000
INLINE_SQL_CHARS = 1_000
INLINE_DATABASE_BYTES = 64_000_000
INLINE_COUNT_BYTES = 4_000_000
"""Size of a database of which `COUNT(*)` is tried: it reads a whole table in a single step, 0.15 ms a megabyte, and
fewer than ten fit in a program."""
INLINE_FUNCTIONS = frozenset(
    (
        *("count", "sum", "avg", "min", "max", "total", "abs", "round", "length", "lower", "upper", "like"),
        *("coalesce", "ifnull", "nullif", "iif", "substr", "substring", "typeof", "date", "strftime", "julianday"),
    )
)
# A NATURAL JOIN of many tables takes milliseconds to plan, before a step is counted; a sort takes a single step, which
# is long where comparing is slow.
_SLOW_WORDS = re.compile(r"\|\||\b(?:recursive|natural|window|over|collate)\b", re.IGNORECASE)
_NUMBERS = re.compile(r"\d+")
_STOPPED = ("budget", "size", "denied")
"""Errors that the narrow limits may have caused."""


class PoolClosedError(SQLEnvError):
    """The server is shutting down, so the job is not answered. Another server can."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; use another one")


class ExecutionResult(NamedTuple):
    """The outcome of a job, and where it came from."""

    outcome: Outcome
    source: Literal["cached", "inline", "pool"]


class InlineDatabases:
    """The databases as the event loop queries them: under narrow limits."""

    def __init__(self, databases: Mapping[str, Path], sandbox: SandboxSettings) -> None:
        self._paths = databases
        self._settings = replace(
            sandbox,
            vm_steps=min(INLINE_STEPS, sandbox.vm_steps),
            deadline_s=INLINE_S,
            value_bytes=min(INLINE_VALUE_BYTES, sandbox.value_bytes),
        )
        self._open: LRUCache[str, Sandbox] = LRUCache(MAX_OPEN)
        self._sizes: dict[str, int] = {}
        self._too_long: LRUCache[tuple[str, str], bool] = LRUCache(MAX_TEMPLATES)

    def try_query(self, job: QueryJob) -> QueryResult | SQLError | None:
        """Run a statement; None: the narrow limits do not tell what it gives. Raises DataError."""
        if len(job.sql) > INLINE_SQL_CHARS or _SLOW_WORDS.search(job.sql):
            return None
        template = (job.db_id, _NUMBERS.sub("0", job.sql))
        if self._size(job.db_id) > INLINE_DATABASE_BYTES or self._too_long.get(template):
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
        self._too_long.put(template, True)
        return None

    def close(self) -> None:
        """Close the databases."""
        for sandbox in self._open.clear():
            sandbox.close()

    def _size(self, db_id: str) -> int:
        if db_id not in self._sizes:
            if db_id not in self._paths:
                raise DataError(f"no database {db_id!r}; there are {len(self._paths)}")
            try:
                self._sizes[db_id] = self._paths[db_id].stat().st_size
            except OSError as error:
                raise DataError(f"database {db_id!r} cannot be read: {error.strerror}") from error
        return self._sizes[db_id]

    def _sandbox(self, db_id: str) -> Sandbox:
        sandbox = self._open.get(db_id)
        if sandbox is None:
            functions = INLINE_FUNCTIONS - ({"count"} if self._size(db_id) > INLINE_COUNT_BYTES else set())
            sandbox = Sandbox(self._paths[db_id], self._settings, functions=functions, limits=INLINE_LIMITS)
            for surplus in self._open.put(db_id, sandbox):
                surplus.close()
        return sandbox


class WorkerPool:
    """Query processes with the same limits, and the jobs that wait for one."""

    def __init__(self, setup: ProcessSetup, size: int) -> None:
        self._setup = setup
        self._size = size
        self._timeout_s = WALL_FACTOR * setup.sandbox.deadline_s + OVERRUN_S
        self._workers: list[Worker] = []
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        self._replacing: set[asyncio.Task[None]] = set()
        self.waiting = 0
        self.running = 0
        self.restarts = 0

    @property
    def pids(self) -> list[int]:
        """The ids of its processes."""
        return [worker.pid for worker in self._workers if worker.alive]

    async def start(self) -> None:
        """Start the processes. Raises WorkerLostError."""
        started = await asyncio.gather(*(Worker.start(self._setup) for _ in range(self._size)), return_exceptions=True)
        self._workers = [each for each in started if isinstance(each, Worker)]
        for each in started:
            if isinstance(each, BaseException):
                raise each
            self._free.put_nowait(each)

    async def aclose(self) -> None:
        """End the processes."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await asyncio.gather(*(worker.aclose() for worker in self._workers))
        self._workers.clear()

    async def run(self, job: Job) -> Answer:
        """Have a job answered when its turn comes; cancelled, its process is killed."""
        for _ in range(TRIES):
            self.waiting += 1
            try:
                worker = await self._free.get()
            finally:
                self.waiting -= 1
            self.running += 1
            level = logging.WARNING
            try:
                async with asyncio.timeout(self._timeout_s + (JUDGING_S if not isinstance(job, QueryJob) else 0)):
                    return await worker.ask(job)
            except asyncio.CancelledError:
                level = logging.INFO  # no session waits any more, which is nobody's fault
                raise
            except TimeoutError:
                return self._overrun(job, self._timeout_s - OVERRUN_S)
            except WorkerLostError:
                await worker.aclose()
                if worker.overran:
                    return self._overrun(job, self._setup.sandbox.deadline_s)
            finally:
                self.running -= 1
                if worker.alive:
                    self._free.put_nowait(worker)
                else:
                    self._replace(worker, level)
        return self._failed(job, SQLError("runtime", "the process that ran the query was lost", deterministic=False))

    def _overrun(self, job: Job, allowed_s: float) -> Answer:
        if self._setup.reduced:
            return Answer(None)
        return self._failed(
            job, SQLError("budget", f"the query takes longer than {allowed_s:g} s", deterministic=False)
        )

    def _failed(self, job: Job, error: SQLError) -> Answer:
        outcome = query_outcome(error, self._setup.display) if isinstance(job, QueryJob) else SQLEnvError(str(error))
        return Answer(outcome, deterministic=False)

    def _replace(self, worker: Worker, level: int) -> None:
        task = asyncio.ensure_future(self._replaced(worker, level))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replaced(self, worker: Worker, level: int) -> None:
        await worker.aclose()
        self._workers.remove(worker)
        self.restarts += 1
        logger.log(level, "process %d for SQL is replaced", worker.pid)
        try:
            new = await Worker.start(self._setup)
        except WorkerLostError as error:
            logger.error("a process for SQL is missing: %s", error)
            new = worker  # its next job fails, and another start is tried
        self._workers.append(new)
        self._free.put_nowait(new)


class _Flight:
    """A job that runs once for all that ask for it."""

    def __init__(self, work: Awaitable[ExecutionResult]) -> None:
        self.task = asyncio.ensure_future(work)
        self.waiters = 0


class Executor:
    """Runs jobs; see the module. An async context manager. `pool_sizes`: processes of the fast and the slow pool."""

    def __init__(
        self,
        databases: Mapping[str, Path],
        settings: EnvSettings,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        cache_dir: Path | None = None,
        pool_sizes: tuple[int, int] = (1, 1),
    ) -> None:
        files, full = dict(databases), settings.sandbox
        judging = settings.judging if answer_mode is AnswerMode.SQL else None
        suites_dir = cache_dir if judging is not None and judging.variants else None
        reduced = replace(
            full,
            vm_steps=min(FAST_VM_STEPS, full.vm_steps),
            deadline_s=min(FAST_DEADLINE_S, full.deadline_s),
            value_bytes=min(FAST_VALUE_BYTES, full.value_bytes),
        )
        self._display = settings.display
        self.inline = InlineDatabases(files, full)
        self.cache: LRUCache[QueryJob, ActionOutcome] = LRUCache(CACHE_BYTES)
        """What statements gave; its `size` is in bytes."""
        self.pools = {
            name: WorkerPool(ProcessSetup(files, sandbox, full, settings.display, judging, suites_dir), size)
            for name, sandbox, size in zip(("fast", "slow"), (reduced, full), pool_sizes, strict=True)
        }
        self._flights: dict[Job, _Flight] = {}
        self._closed = True

    async def __aenter__(self) -> Self:
        """Start all processes and wait until they are ready. Raises WorkerLostError."""
        try:
            for pool in self.pools.values():
                await pool.start()
        except BaseException:
            await self.aclose()
            raise
        self._closed = False
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all processes; jobs that wait or run fail with PoolClosedError."""
        self._closed = True
        flights = [flight.task for flight in self._flights.values()]
        for task in flights:
            task.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await asyncio.gather(*(pool.aclose() for pool in self.pools.values()))
        self.inline.close()

    def run(self, job: Job) -> ExecutionResult | Awaitable[ExecutionResult]:
        """Return the result of a job, or one to wait for. Raises DataError, and PoolClosedError when awaited.

        A submitted query that fails is a verdict; SQLEnvError is raised where the machine allowed none.
        """
        if isinstance(job, QueryJob):
            if (known := self.cache.get(job)) is not None:
                return ExecutionResult(known, "cached")
            if (result := self.inline.try_query(job)) is not None:
                outcome = query_outcome(result, self._display)
                self._remember(job, outcome)
                return ExecutionResult(outcome, "inline")
        return self.run_in_pool(job)

    async def run_in_pool(self, job: Job) -> ExecutionResult:
        """Run a job in the pools, once for all that ask for it."""
        if self._closed:
            raise PoolClosedError
        flight = self._flights.get(job)
        if flight is None:
            flight = self._flights[job] = _Flight(self._in_pools(job))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            if flight.task.cancelled():
                raise PoolClosedError from None
            raise
        finally:
            flight.waiters -= 1
            if flight.task.done() or not flight.waiters:
                flight.task.cancel()
                if self._flights.get(job) is flight:
                    del self._flights[job]

    async def _in_pools(self, job: Job) -> ExecutionResult:
        answer = await self.pools["fast"].run(job)
        if answer.outcome is None:
            answer = await self.pools["slow"].run(job)
        outcome = answer.outcome
        assert outcome is not None, "only reduced limits leave a job unanswered"
        if isinstance(outcome, SQLEnvError):
            raise outcome
        if answer.deterministic and isinstance(job, QueryJob) and isinstance(outcome, ActionOutcome):
            self._remember(job, outcome)
        return ExecutionResult(outcome, "pool")

    def _remember(self, job: QueryJob, outcome: ActionOutcome) -> None:
        """Cache what a statement gave, which it gives every time, unless it is too large."""
        rows = outcome.rows.rows if outcome.rows is not None else ()
        cells = sum([60 + 4 * len(v) if isinstance(v, str | bytes) else 32 for row in rows for v in row])
        size = _ENTRY_BYTES + 4 * (len(job.sql) + len(outcome.result) + len(outcome.error)) + cells
        if size <= LARGEST_ENTRY:
            self.cache.put(job, outcome, size)
