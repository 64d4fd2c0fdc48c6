"""The query pool: SQL and verdicts that may take long, in child processes, so that no session waits for another one's.

A query first runs in the `medium` queue, under bounds that ordinary ones hardly ever meet. One that meets them runs
afresh in the `slow` queue under the full budget; results are deterministic, so its answer and its cost are those of
the second run, as if there had been no other. A submitted query is judged the same way on the question's database;
only where it is right there, variants of the database have their say, in the `judge` queue. They were made before: what
is not there is an error, and nothing that others wait for is lost with a process.

Promises:
- `run` answers as `DatabasePool.query` and `SQLJudge.judge` do, once. First come, first served; but sessions whose
  CPU budget is used up let others go first, as if they had come `HANDICAP_S` later, and half of the medium queue's
  processes take nothing from them.
- A job that is there already is not run twice: who asks for the same waits for the one answer, as the sessions of a
  group do, which ask the same at the same moment.
- When nobody awaits a job any more, the statement is stopped at once and its process takes the next job.
  A process that does not react, that uses a second of processor time more than the deadline, or that takes `CROWDED`
  times the deadline by the clock, is killed and replaced.
- A job whose process is lost runs again, once. Then it fails with an SQLError that is not deterministic.
- `aclose` fails what waits or runs with PoolClosedError and leaves no process behind. Should the server die instead,
  its processes end as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import overload

from env_server.jobs import Job, JudgeJob, QueryJob
from env_server.judging.verdict import Judgement
from env_server.service.execution.cpu_budget import CpuBudget
from env_server.service.execution.query_process import Failure, ProcessSetup
from env_server.service.execution.query_queue import Entry, PoolClosedError, QueryQueue, QueueStats, Result, Slot
from env_server.settings import EnvSettings
from env_server.sql.sandbox import QueryResult
from env_server.types import AnswerMode

__all__ = ["PoolClosedError", "QueryPool", "QueueStats"]

MEDIUM_VM_STEPS = 2_000_000
"""About 40 ms; no gold query of Spider needs more than 1.2 million."""
MEDIUM_VALUE_BYTES = 100_000
"""On texts of a megabyte, a single step can take longer than all others together."""
MEDIUM_DEADLINE_S = 0.2
"""For statements whose steps are slow all the same."""
CROWDED = 5
"""A statement may take this many times its deadline, which is processor time, by the clock: the processes are nice, and
get little of a machine that has other work. Less than what a client waits for an answer."""
JUDGING_S = 60.0
"""A last resort as well, for running a query on all variants; it usually takes some milliseconds."""
KEPT_NICENESS = 0
NICENESS = 5
SLOW_NICENESS = 19
"""The server and those who ask little of it come first, then what answers soon."""


class QueryPool:
    """The query processes of one server process. An async context manager; or `start`, then `aclose`.

    `sizes`: processes in the medium and in the slow queue.
    """

    def __init__(
        self,
        databases: Mapping[str, Path],
        settings: EnvSettings,
        answer_mode: AnswerMode,
        cache_dir: Path,
        sizes: tuple[int, int] = (1, 1),
    ) -> None:
        files, sandbox = dict(databases), settings.sandbox
        judging = settings.judging if answer_mode is AnswerMode.SQL else None
        bounded = replace(
            sandbox,
            vm_steps=min(MEDIUM_VM_STEPS, sandbox.vm_steps),
            deadline_s=min(MEDIUM_DEADLINE_S, sandbox.deadline_s),
            value_bytes=min(MEDIUM_VALUE_BYTES, sandbox.value_bytes),
        )
        medium = ProcessSetup(files, bounded, trial=True, judging=judging)
        kept = sizes[0] // 2
        slots = [Slot(KEPT_NICENESS, kept=True)] * kept + [Slot(NICENESS)] * (sizes[0] - kept)
        self._medium = QueryQueue("medium", medium, slots, CROWDED * bounded.deadline_s)
        slow = ProcessSetup(files, sandbox, judging=judging)
        self._slow = QueryQueue("slow", slow, [Slot(SLOW_NICENESS)] * sizes[1], CROWDED * sandbox.deadline_s)
        self._queues = [self._medium, self._slow]
        self._flights: dict[Job, _Flight] = {}
        self._judge: QueryQueue | None = None
        if judging is not None and judging.variants:
            judge = ProcessSetup(files, sandbox, judging=judging, suites_dir=cache_dir)
            self._judge = QueryQueue("judge", judge, [Slot(NICENESS)], JUDGING_S)
            self._queues.append(self._judge)

    async def start(self) -> None:
        """Start all processes and wait until they are ready. Raises ChildLostError."""
        starts = [asyncio.ensure_future(queue.open(slot)) for queue in self._queues for slot in queue.slots]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await asyncio.wait(starts)
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End all processes; jobs that wait or run fail."""
        await asyncio.gather(*(queue.aclose() for queue in self._queues))

    async def __aenter__(self) -> QueryPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def stats(self) -> dict[str, QueueStats]:
        """Each queue by name: `medium`, `slow`, and `judge` where variants are used."""
        return {queue.name: queue.stats for queue in self._queues}

    @overload
    async def run(self, job: QueryJob, cpu_budget: CpuBudget | None = None) -> QueryResult: ...
    @overload
    async def run(self, job: JudgeJob, cpu_budget: CpuBudget | None = None) -> Judgement: ...
    @overload
    async def run(self, job: Job, cpu_budget: CpuBudget | None = None) -> QueryResult | Judgement: ...
    async def run(self, job: Job, cpu_budget: CpuBudget | None = None) -> QueryResult | Judgement:
        """Answer a job, on the account of `cpu_budget`. Raises SQLError, DataError, PoolClosedError.

        A submitted query that fails is a verdict, not an error; where SQLError says that it is not deterministic,
        there is no verdict.
        """
        flight = self._flights.get(job)
        if flight is None:
            flight = _Flight(job, cpu_budget or CpuBudget())
            self._enter(flight, self._medium)
            self._flights[job] = flight
        answer: asyncio.Future[QueryResult | Judgement] = asyncio.get_running_loop().create_future()
        flight.waiting.add(answer)
        try:
            return await answer
        finally:
            flight.waiting.discard(answer)
            if not flight.waiting and self._flights.get(job) is flight:
                del self._flights[job]
                flight.queue.drop(flight.entry)

    def _enter(self, flight: _Flight, queue: QueryQueue) -> None:
        """Put a job into a queue. Raises PoolClosedError."""
        flight.queue = queue
        flight.entry = Entry(flight.job, flight.cpu_budget, partial(self._on_result, flight))
        queue.submit(flight.entry)

    def _on_result(self, flight: _Flight, outcome: Result) -> None:
        """Take what a queue made of a job: the answer, or a reason for another queue."""
        if self._flights.get(flight.job) is not flight:
            return  # nobody wants it any more
        following = self._queue_after(flight.queue, outcome)
        if following is not None:
            try:
                self._enter(flight, following)
            except PoolClosedError as error:
                outcome = error
            else:
                return
        del self._flights[flight.job]
        flight.resolve(outcome)

    def _queue_after(self, queue: QueryQueue, outcome: Result) -> QueryQueue | None:
        if outcome is None:
            return self._slow
        if isinstance(outcome, Judgement) and outcome.correct and queue is not self._judge:
            return self._judge
        return None


class _Flight:
    """A job that runs once for all who ask for it. `entry` is it in the `queue` where it is now."""

    queue: QueryQueue
    entry: Entry

    def __init__(self, job: Job, cpu_budget: CpuBudget) -> None:
        self.job = job
        self.cpu_budget = cpu_budget
        self.waiting: set[asyncio.Future[QueryResult | Judgement]] = set()

    def resolve(self, outcome: Result) -> None:
        """Tell all who wait for it."""
        for answer in self.waiting:
            if answer.done():
                continue
            # An error each: whoever raises it adds to its traceback.
            if isinstance(outcome, Failure):
                answer.set_exception(outcome.error())
            elif isinstance(outcome, PoolClosedError):
                answer.set_exception(PoolClosedError())
            else:
                assert outcome is not None, "only jobs on trial are left unanswered"
                answer.set_result(outcome)
