"""A queue of jobs, and the child processes that work it off.

Everything happens in callbacks: a job is sent when it arrives or when a process becomes free, and its outcome is told
when the answer arrives. Only starting and ending a process take a task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from env_server.errors import SQLEnvError
from env_server.jobs import Job
from env_server.service.execution.child import ChildLostError, ChildProcess
from env_server.service.execution.cpu_budget import CpuBudget
from env_server.service.execution.query_process import OVERRUN_S, Answer, Failure, ProcessSetup, Reply

HANDICAP_S = 0.25
TRIES = 2

logger = logging.getLogger(__name__)


class PoolClosedError(SQLEnvError):
    """The server is shutting down, so the job is not answered. Another server can."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; use another one")


Result = Reply | PoolClosedError


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue at this moment: jobs that wait and run, processes replaced so far, process ids."""

    waiting: int
    running: int
    restarts: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a process of a queue runs. `kept`: for sessions that have some of their CPU budget left."""

    niceness: int
    kept: bool = False


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True, eq=False)
class Entry:
    """A job in a queue, and who is told its outcome: once, unless the entry is dropped."""

    job: Job
    cpu_budget: CpuBudget
    on_result: Callable[[Result], None]
    arrived: float = field(default_factory=_now)
    tries: int = TRIES

    def turn(self) -> float:
        """Return what decides who is next: the least."""
        return self.arrived if self.cpu_budget.left_s > 0 else self.arrived + HANDICAP_S


class QueryQueue:
    """A queue, and a runner for each slot. `patience_s`: what a job may take, by the clock."""

    def __init__(self, name: str, setup: ProcessSetup, slots: Sequence[Slot], patience_s: float) -> None:
        self.name = name
        self.setup = setup
        self.slots = slots
        self.patience_s = patience_s
        self.closed = True
        self.restarts = 0
        self._waiting: deque[Entry] = deque()
        self._runners: list[_Runner] = []

    @property
    def stats(self) -> QueueStats:
        """The queue at this moment."""
        running = sum(runner.entry is not None for runner in self._runners)
        pids = tuple(runner.child.pid for runner in self._runners if runner.child is not None)
        return QueueStats(len(self._waiting), running, self.restarts, pids)

    async def open(self, slot: Slot) -> None:
        """Start one of the queue's processes. Raises ChildLostError."""
        runner = _Runner(self, slot)
        self._runners.append(runner)
        await runner.start()
        self.closed = False

    def submit(self, entry: Entry) -> None:
        """Have a job answered when its turn comes. Raises PoolClosedError."""
        if self.closed:
            raise PoolClosedError
        self._waiting.append(entry)
        for runner in self._runners:
            if self._waiting and runner.is_free:
                self.serve(runner)

    def drop(self, entry: Entry) -> None:
        """Forget a job that nobody wants any more; one that runs is stopped."""
        with suppress(ValueError):
            self._waiting.remove(entry)
        for runner in self._runners:
            if runner.entry is entry:
                runner.stop()

    def serve(self, runner: _Runner) -> None:
        """Give a runner that is free the next job that it may take."""
        modest_only = runner.slot.kept
        candidates = (each for each in self._waiting if not modest_only or each.cpu_budget.left_s > 0)
        entry = min(candidates, key=Entry.turn, default=None)
        if entry is not None:
            self._waiting.remove(entry)
            runner.take(entry)

    async def aclose(self) -> None:
        """Fail all jobs and end the processes."""
        self.closed = True
        while self._waiting:
            self._waiting.popleft().on_result(PoolClosedError())
        await asyncio.gather(*(runner.aclose() for runner in self._runners))


class _Runner:
    """A slot's process: at work, free, or being replaced."""

    def __init__(self, queue: QueryQueue, slot: Slot) -> None:
        self.slot = slot
        self.child: ChildProcess | None = None
        self.entry: Entry | None = None
        """The job that it has."""
        self._queue = queue
        self._began = 0.0
        self._dropped = False
        self._timer: asyncio.TimerHandle | None = None
        self._repair: asyncio.Task[None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether it can take a job."""
        return self.entry is None and self._repair is None

    async def start(self) -> None:
        """Start the process. Raises ChildLostError."""
        self.child = await ChildProcess.start(self._queue.setup, self.slot.niceness)

    def take(self, entry: Entry) -> None:
        """Have a job answered."""
        self.entry, self._dropped = entry, False
        if self.child is None or not self.child.alive:
            self._replace("it was lost while it was idle")
            return
        self._began = _now()
        # A process also gets the overrun beyond the queue's patience, and to stop a job that is not wanted any more.
        self._limit(self._queue.patience_s + OVERRUN_S)
        self.child.ask(entry.job, self._on_answer)

    def stop(self) -> None:
        """Have the job's statement stopped; nobody is told its outcome."""
        self._dropped = True
        if self.child is not None and self._repair is None:
            self.child.cancel()
            self._limit(OVERRUN_S)

    async def aclose(self) -> None:
        """Fail the job, and end the process."""
        if self._repair is not None:
            self._repair.cancel()
            await asyncio.wait({self._repair})
        if self.entry is not None:
            self._finish(PoolClosedError())
            if self.child is not None:
                self.child.kill()
        await self._end()

    def _limit(self, seconds: float) -> None:
        self._unlimit()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._overran)

    def _unlimit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_answer(self, answer: Answer | ChildLostError) -> None:
        """Hand an answer on, and take the next job at once."""
        assert self.entry is not None
        if isinstance(answer, ChildLostError):
            self.entry.tries -= 1
            self._replace(str(answer))
            return
        self.entry.cpu_budget.charge(answer.cpu_s)
        self._finish(answer.reply)
        self._go_on()

    def _overran(self) -> None:
        assert self.entry is not None
        assert self.child is not None
        self.entry.cpu_budget.charge(_now() - self._began)
        self._finish(self._overrun(self._queue.patience_s))
        self.child.kill()
        failed = "it did not stop what nobody wants any more" if self._dropped else "it did not answer"
        self._replace(f"{failed}, {_now() - self._began:.1f} s after it got the job")

    def _overrun(self, allowed_s: float) -> Failure | None:
        if self._queue.setup.trial:
            return None
        message = f"the query takes longer than {allowed_s:g} s"
        return Failure("budget", message, deterministic=False)

    def _finish(self, outcome: Result) -> None:
        """Be done with the job."""
        self._unlimit()
        entry, self.entry = self.entry, None
        if entry is not None and not self._dropped:
            entry.on_result(outcome)

    def _go_on(self) -> None:
        if self.is_free and not self._queue.closed:
            self._queue.serve(self)

    def _replace(self, reason: str) -> None:
        """Clear away a process that has ended, or will, and start another one; then go on with the job, if any."""
        self._unlimit()
        self._repair = asyncio.create_task(self._replaced(reason))

    async def _replaced(self, reason: str) -> None:
        try:
            if self.child is not None:
                child, pid = self.child, self.child.pid
                await self._end()
                self._queue.restarts += 1
                if child.overran:
                    self._charge_overrun()
                    reason = "a query used too much processor time"
                logger.warning("process %d of the %s queue is replaced: %s", pid, self._queue.name, reason)
            self._give_up_in_time()
            while self.child is None:
                try:
                    await self.start()
                except ChildLostError as error:
                    logger.error("the %s queue has no process: %s", self._queue.name, error)
                    if self.entry is not None:
                        self.entry.tries -= 1
                    self._give_up_in_time()
                    if self.entry is None:
                        break
        finally:
            self._repair = None
        self._give_up_in_time()
        if self.entry is None:
            self._go_on()
        else:
            self.take(self.entry)

    def _charge_overrun(self) -> None:
        """Be done with a job whose statement was killed: it would be so again."""
        if self.entry is not None:
            deadline_s = self._queue.setup.sandbox.deadline_s
            self.entry.cpu_budget.charge(deadline_s + OVERRUN_S)
            self._finish(self._overrun(deadline_s))

    def _give_up_in_time(self) -> None:
        """Be done with a job that nobody wants any more, or that has lost too many processes."""
        if self.entry is not None and (self._dropped or self.entry.tries <= 0):
            self._finish(Failure("runtime", "the process that ran the query was lost", deterministic=False))

    async def _end(self) -> None:
        if self.child is not None:
            await self.child.end()
            self.child = None
