"""Lanes: SQL and verdicts that may take long, in child processes, so that no session waits for another one's.

A query first runs in the `medium` lane, under bounds that ordinary ones hardly ever meet. One that meets them runs
afresh in the `slow` lane under the full budget; results are deterministic, so its answer and its cost are those of
the second run, as if there had been no other. A submitted query is judged the same way on the question's database;
only where it is right there, variants of the database have their say, in the `judge` lane: making a question's
variants takes up to seconds of Python, the first time.

Promises:
- `run` answers as `DatabasePool.query` and `SQLJudge.judge` do, once. First come, first served; but sessions whose
  allowance is used up let others go first, as if they had come `HANDICAP_S` later, and half of the
  medium lane's processes take nothing from them.
- A job that is there already is not run twice: who asks for the same waits for the one answer, as the sessions of a
  group do, which ask the same at the same moment.
- When nobody awaits a job any more, the statement is stopped at once and its process takes the next job.
  A process that does not react, or that overruns the deadline, is killed and replaced.
- A job whose process is lost runs again, once. Then it fails with an SQLError that is not deterministic.
- `aclose` fails what waits or runs with LanesClosedError and leaves no process behind. Should the server die instead,
  its processes end as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import overload

from env_server.errors import SQLEnvError
from env_server.judging import Judgement
from env_server.sandbox import QueryResult
from env_server.service.allowance import Allowance
from env_server.service.lane_child import ChildLostError, LaneChild
from env_server.service.lane_process import Answer, Failure, Job, JudgeJob, LaneSetup, QueryJob, Reply
from env_server.settings import EnvSettings
from env_server.types import AnswerMode

__all__ = ["JudgeJob", "LaneStats", "Lanes", "LanesClosedError", "QueryJob"]

MEDIUM_VM_STEPS = 2_000_000
"""About 40 ms; no gold query of Spider needs more than 1.2 million."""
MEDIUM_VALUE_BYTES = 100_000
"""On texts of a megabyte, a single step can take longer than all others together."""
MEDIUM_DEADLINE_S = 0.2
"""For statements whose steps are slow all the same."""
OVERRUN_S = 1.0
"""A process gets this long beyond the deadline, and to stop a job that is not wanted any more."""
JUDGING_S = 60.0
"""A last resort as well, for making variants and running a query on them; it usually takes a second at most."""
HANDICAP_S = 0.25
TRIES = 2
KEPT_NICENESS = 0
NICENESS = 5
SLOW_NICENESS = 19
"""The server and those who ask little of it come first, then what answers soon."""

logger = logging.getLogger(__name__)


class LanesClosedError(SQLEnvError):
    """The server is shutting down, so the job is not answered. Another server can."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; use another one")


@dataclass(frozen=True, slots=True)
class LaneStats:
    """A lane at this moment: jobs that wait and run, processes replaced so far, process ids."""

    waiting: int
    running: int
    restarts: int
    pids: tuple[int, ...]


class Lanes:
    """The lanes of one server process. An async context manager; or `start`, then `aclose`.

    `sizes`: processes in the medium and in the slow lane.
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
        bounds = {
            "vm_steps": min(MEDIUM_VM_STEPS, sandbox.vm_steps),
            "deadline_s": min(MEDIUM_DEADLINE_S, sandbox.deadline_s),
            "value_bytes": min(MEDIUM_VALUE_BYTES, sandbox.value_bytes),
        }
        medium = LaneSetup(files, sandbox.model_copy(update=bounds), trial=True, judging=judging)
        kept = sizes[0] // 2
        places = [_Place(KEPT_NICENESS, kept=True)] * kept + [_Place(NICENESS)] * (sizes[0] - kept)
        self._medium = _Lane("medium", medium, places, bounds["deadline_s"] + OVERRUN_S)
        slow = LaneSetup(files, sandbox, judging=judging)
        self._slow = _Lane("slow", slow, [_Place(SLOW_NICENESS)] * sizes[1], sandbox.deadline_s + OVERRUN_S)
        self._lanes = [self._medium, self._slow]
        self._joint: dict[Job, _Joint] = {}
        self._judge: _Lane | None = None
        if judging is not None and judging.variants:
            judge = LaneSetup(files, sandbox, judging=judging, suites_dir=cache_dir)
            self._judge = _Lane("judge", judge, [_Place(NICENESS)], JUDGING_S + OVERRUN_S)
            self._lanes.append(self._judge)

    async def start(self) -> None:
        """Start all processes and wait until they are ready. Raises ChildLostError."""
        starts = [asyncio.ensure_future(lane.open(place)) for lane in self._lanes for place in lane.places]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await asyncio.wait(starts)
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """End all processes; jobs that wait or run fail."""
        await asyncio.gather(*(lane.aclose() for lane in self._lanes))

    async def __aenter__(self) -> Lanes:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def stats(self) -> dict[str, LaneStats]:
        """Each lane by name: `medium`, `slow`, and `judge` where variants are used."""
        return {lane.name: lane.stats for lane in self._lanes}

    @overload
    async def run(self, job: QueryJob, allowance: Allowance | None = None) -> QueryResult: ...
    @overload
    async def run(self, job: JudgeJob, allowance: Allowance | None = None) -> Judgement: ...
    async def run(self, job: Job, allowance: Allowance | None = None) -> QueryResult | Judgement:
        """Answer a job, on the account of `allowance`. Raises SQLError, DataError, LanesClosedError.

        A submitted query that fails is a verdict, not an error; where SQLError says that it is not deterministic,
        there is no verdict.
        """
        joint = self._joint.get(job)
        if joint is None:
            task = asyncio.ensure_future(self._answer(job, allowance or Allowance()))
            joint = self._joint[job] = _Joint(task)
            task.add_done_callback(lambda _: self._forget(job, joint))
        joint.waiting += 1
        try:
            return await asyncio.shield(joint.task)
        finally:
            joint.waiting -= 1
            if not joint.waiting and not joint.task.done():
                self._forget(job, joint)
                joint.task.cancel()

    def _forget(self, job: Job, joint: _Joint) -> None:
        if self._joint.get(job) is joint:
            del self._joint[job]
        if joint.task.done() and not joint.task.cancelled():
            joint.task.exception()  # nobody may be left to ask for it

    async def _answer(self, job: Job, allowance: Allowance) -> QueryResult | Judgement:
        reply = await self._medium.run(job, allowance)
        if reply is None:
            reply = await self._slow.run(job, allowance)
        if self._judge is not None and isinstance(reply, Judgement) and reply.correct:
            reply = await self._judge.run(job, allowance)
        if isinstance(reply, Failure):
            raise reply.error()
        assert reply is not None, "only jobs on trial are left unanswered"
        return reply


@dataclass(slots=True)
class _Joint:
    """A job that runs once for all who ask for it."""

    task: asyncio.Future[QueryResult | Judgement]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a process of a lane stands. `kept`: for sessions that have some of their allowance left."""

    niceness: int
    kept: bool = False


@dataclass(slots=True, eq=False)
class _Entry:
    """A job in a lane. `outcome` is done when it is answered or not wanted any more; an exception is never set."""

    job: Job
    allowance: Allowance
    arrived: float
    outcome: asyncio.Future[Reply | LanesClosedError]

    def turn(self) -> float:
        """Return what decides who is next: the least."""
        return self.arrived if self.allowance.left_s > 0 else self.arrived + HANDICAP_S


class _Lane:
    """A queue of jobs, and processes that work it off."""

    def __init__(self, name: str, setup: LaneSetup, places: Sequence[_Place], limit_s: float) -> None:
        self.name = name
        self._setup = setup
        self.places = places
        self._limit_s = limit_s
        self._waiting: deque[_Entry] = deque()
        self._running: set[_Entry] = set()
        self._arrived = asyncio.Event()
        self._closed = True
        self._keepers: list[asyncio.Task[None]] = []
        self._children: set[LaneChild] = set()
        self._restarts = 0

    @property
    def stats(self) -> LaneStats:
        """The lane at this moment."""
        pids = tuple(child.pid for child in self._children)
        return LaneStats(len(self._waiting), len(self._running), self._restarts, pids)

    async def open(self, place: _Place) -> None:
        """Start one of the lane's processes. Raises ChildLostError."""
        child = await self._started(place)
        self._keepers.append(asyncio.create_task(self._keep(place, child)))
        self._closed = False

    async def run(self, job: Job, allowance: Allowance) -> Reply:
        """Answer a job when its turn comes. Raises LanesClosedError."""
        if self._closed:
            raise LanesClosedError
        loop = asyncio.get_running_loop()
        entry = _Entry(job, allowance, loop.time(), loop.create_future())
        self._waiting.append(entry)
        self._arrived.set()
        try:
            outcome = await entry.outcome
        except asyncio.CancelledError:
            with suppress(ValueError):
                self._waiting.remove(entry)
            raise
        if isinstance(outcome, LanesClosedError):
            raise outcome
        return outcome

    async def aclose(self) -> None:
        """Fail all jobs and end the processes."""
        self._closed = True
        for entry in (*self._waiting, *self._running):
            _resolve(entry, LanesClosedError())
        self._waiting.clear()
        self._arrived.set()
        if self._keepers:
            await asyncio.wait(self._keepers)

    async def _keep(self, place: _Place, child: LaneChild | None) -> None:
        """Keep one process at work, and replace it when it is lost."""
        try:
            while entry := await self._next(place):
                self._running.add(entry)
                try:
                    child = await self._work(entry, place, child)
                finally:
                    self._running.discard(entry)
                if child is None and not self._closed:
                    child = await self._replacement(place)
        finally:
            if child is not None:
                await self._ended(child)

    async def _next(self, place: _Place) -> _Entry | None:
        """Return the next job for a process; None when the lane is closed."""
        while not self._closed:
            entry = min(self._waiting, key=_Entry.turn, default=None)
            if entry is not None and not (place.kept and entry.allowance.left_s <= 0):
                self._waiting.remove(entry)
                return entry
            self._arrived.clear()
            await self._arrived.wait()
        return None

    async def _work(self, entry: _Entry, place: _Place, child: LaneChild | None) -> LaneChild | None:
        """Have the job answered, and return the process if it can take another one."""
        for _ in range(TRIES):
            if child is not None and not child.alive:
                await self._lost(child, "it was lost while it was idle")
                child = None
            child = child or await self._replacement(place)
            if entry.outcome.done():
                return child
            if child is None:
                continue
            asked = asyncio.ensure_future(child.ask(entry.job))
            loop = asyncio.get_running_loop()
            began = loop.time()
            await self._answered(asked, entry, child)
            if not asked.done():
                entry.allowance.charge(loop.time() - began)
                _resolve(entry, self._overrun())
                child.kill()
                await asyncio.gather(asked, return_exceptions=True)
                await self._lost(child, f"it did not answer within {self._limit_s:g} s, or did not stop")
                return None
            if (error := asked.exception()) is None:
                answer = asked.result()
                entry.allowance.charge(answer.cpu_s)
                _resolve(entry, answer.reply)
                return child
            await self._lost(child, str(error))
            child = None
        _resolve(entry, Failure("runtime", "the process that ran the query was lost", deterministic=False))
        return child

    async def _answered(self, asked: asyncio.Future[Answer], entry: _Entry, child: LaneChild) -> None:
        """Wait until the job is answered, or has overrun its time, or does not stop when it is not wanted."""
        either: Sequence[asyncio.Future[object]] = (asked, entry.outcome)  # type: ignore[assignment]
        await asyncio.wait(either, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        if entry.outcome.done() and not asked.done() and not self._closed:
            child.cancel()
            await asyncio.wait({asked}, timeout=OVERRUN_S)

    def _overrun(self) -> Failure | None:
        if self._setup.trial:
            return None
        message = f"the query takes longer than {self._limit_s - OVERRUN_S:g} s"
        return Failure("budget", message, deterministic=False)

    async def _started(self, place: _Place) -> LaneChild:
        child = await LaneChild.start(self._setup, place.niceness)
        self._children.add(child)
        return child

    async def _replacement(self, place: _Place) -> LaneChild | None:
        try:
            return await self._started(place)
        except ChildLostError as error:
            logger.error("the %s lane has no process: %s", self.name, error)
            return None

    async def _lost(self, child: LaneChild, reason: str) -> None:
        """Clear away a process that has ended, or will."""
        await self._ended(child)
        if not self._closed:
            self._restarts += 1
            logger.warning("process %d of the %s lane is replaced: %s", child.pid, self.name, reason)

    async def _ended(self, child: LaneChild) -> None:
        await child.end()
        self._children.discard(child)


def _resolve(entry: _Entry, outcome: Reply | LanesClosedError) -> None:
    if not entry.outcome.done():
        entry.outcome.set_result(outcome)
