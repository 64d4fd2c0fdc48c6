"""The queue of one simulated server. Pure: it is told the time, and says what has ended and when to look again.

Promises:
- First come, first served: through the front end, then into the batch as soon as it has room.
- All sequences of the batch advance together, one token a step; a step's length follows from how many there are
  (`ServerProfile`). Reading a prompt stops the batch for as long as it takes.
- The same calls at the same times give the same ends.

Between two events the batch advances evenly, so nothing is counted step by step: a shared counter of steps goes on,
and a request ends when it reaches the request's mark. A request that joins waits for the running step, which is half
a step on the average.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from inference.simulated.profile import ServerProfile

_HALF_A_STEP = 0.5


@dataclass(slots=True, eq=False)
class Job:
    """One request: tokens to read, tokens to generate."""

    prompt_tokens: int
    new_tokens: int


@dataclass(slots=True)
class Usage:
    """What a replica has done, in seconds."""

    busy_s: float = 0.0
    """With at least one sequence running."""
    sequence_s: float = 0.0
    """Summed over the sequences that ran."""
    full_s: float = 0.0
    """With no room in the batch, and requests waiting."""
    down_s: float = 0.0
    jobs: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0


class Replica:
    """A server with continuous batching."""

    def __init__(self, profile: ServerProfile, now: float = 0.0) -> None:
        self.profile = profile
        self.usage = Usage()
        self.is_up = True
        self._now = now
        self._front_free = now
        self._coming: deque[tuple[float, Job]] = deque()
        self._waiting: deque[Job] = deque()
        self._running: list[_Running] = []
        self._joined = 0
        self._steps = 0.0
        self._reading_s = 0.0

    def begin(self, now: float) -> None:
        """Begin on another clock: up, idle, with the usage so far."""
        self.stop(now)
        self._now = self._front_free = now
        self.is_up = True

    @property
    def in_flight(self) -> int:
        """Requests that it holds."""
        return len(self._coming) + len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    def submit(self, now: float, job: Job) -> None:
        """Take a request; `advance` to now first."""
        self._front_free = max(self._front_free, now + self.profile.network_s) + self.profile.request_s
        self._coming.append((self._front_free, job))

    def withdraw(self, job: Job) -> None:
        """Drop a request whose caller has left."""
        self._waiting = deque(each for each in self._waiting if each is not job)
        self._coming = deque(each for each in self._coming if each[1] is not job)
        self._running = [each for each in self._running if each.job is not job]
        heapq.heapify(self._running)
        self._admit()

    def stop(self, now: float) -> list[Job]:
        """Die; returns the requests that are lost, in the order of their coming."""
        running = [each.job for each in sorted(self._running, key=lambda each: each.place)]
        lost = [*running, *self._waiting, *(job for _, job in self._coming)]
        self._coming.clear()
        self._waiting.clear()
        self._running.clear()
        self._reading_s = 0.0
        self.is_up = False
        self._now = max(self._now, now)
        return lost

    def start(self, now: float) -> None:
        """Come back, empty."""
        self.advance(now)
        self.is_up = True
        self._front_free = now

    def advance(self, now: float) -> list[Job]:
        """Go on to a time, and return what has ended by then, in order."""
        done: list[Job] = []
        while (at := self.next_event()) <= now:
            self._pass(at - self._now)
            self._now = max(self._now, at)
            while self._coming and self._coming[0][0] <= self._now:
                self._waiting.append(self._coming.popleft()[1])
            while self._running and self._end_of_first() <= max(self._now, at):
                job = heapq.heappop(self._running).job
                self._count(job)
                done.append(job)
            self._admit()
        if now > self._now:
            self._pass(now - self._now)
            self._now = now
        return done

    def next_event(self) -> float:
        """When something changes by itself; infinity when nothing does."""
        coming = self._coming[0][0] if self._coming else math.inf
        return min(coming, self._end_of_first())

    def _end_of_first(self) -> float:
        if not self._running:
            return math.inf
        left = max(0.0, self._running[0].end - self._steps)
        return self._now + self._reading_s + left * self.profile.decode_step_s(len(self._running))

    def _pass(self, seconds: float) -> None:
        if seconds <= 0.0:
            return
        running = len(self._running)
        if not self.is_up:
            self.usage.down_s += seconds
        if not running:
            return
        self.usage.busy_s += seconds
        self.usage.sequence_s += seconds * running
        self.usage.full_s += seconds if self._waiting else 0.0
        reading = min(self._reading_s, seconds)
        self._reading_s -= reading
        steps = (seconds - reading) / self.profile.decode_step_s(running)
        # Never beyond the next end: rounding must not carry the counter past a request.
        self._steps = min(self._steps + steps, max(self._steps, self._running[0].end))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.profile.max_sequences:
            job = self._waiting.popleft()
            self._reading_s += job.prompt_tokens / self.profile.prefill_tokens_per_s
            self._joined += 1
            heapq.heappush(self._running, _Running(self._steps + _HALF_A_STEP + job.new_tokens, self._joined, job))

    def _count(self, job: Job) -> None:
        self.usage.jobs += 1
        self.usage.prompt_tokens += job.prompt_tokens
        self.usage.new_tokens += job.new_tokens


@dataclass(slots=True, order=True)
class _Running:
    """A sequence in the batch: it ends when the counter of steps reaches `end`."""

    end: float
    place: int
    job: Job = field(compare=False)
