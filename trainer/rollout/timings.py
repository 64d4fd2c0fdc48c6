"""When an episode waited, and for what: plain data, in seconds on the monotonic clock of its process.

Promises:

1. Nothing is decided by it: two episodes that differ in their timing alone are equal, and no log of episodes holds it.
2. The spans of an episode are in order and do not overlap; a wait that ended in an error is a span like any other.
3. `split` divides the whole time of a batch: its parts add up to it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Wait(StrEnum):
    """What an episode waits for; between two waits, it is the client's own work that it waits for."""

    QUEUE = "queue"
    """For its place among those in flight."""
    SESSION = "session"
    """For a session of the environment and of the engine."""
    RESET = "reset"
    GENERATION = "generation"
    STEP = "step"
    """Of the environment, ANSWER apart."""
    ANSWER = "answer"
    """The step that is judged."""


class Part(StrEnum):
    """The parts of a rollout that a user can do something about."""

    QUEUE = "queue"
    GENERATION = "generation"
    ENVIRONMENT = "environment"
    JUDGING = "judging"
    CLIENT = "client"
    """The client's own work: tokens, prompts, parsing."""


PARTS = {
    Wait.QUEUE: Part.QUEUE,
    Wait.SESSION: Part.ENVIRONMENT,
    Wait.RESET: Part.ENVIRONMENT,
    Wait.GENERATION: Part.GENERATION,
    Wait.STEP: Part.ENVIRONMENT,
    Wait.ANSWER: Part.JUDGING,
}


@dataclass(frozen=True, slots=True)
class Span:
    """One wait. `turn` counts from 0; None before the first one."""

    wait: Wait
    start: float
    end: float
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class EpisodeTiming:
    """From the moment that an episode was asked for until it ended."""

    asked: float
    ended: float
    spans: tuple[Span, ...]

    @property
    def started(self) -> float:
        """When the episode got its place among those in flight."""
        return next((span.end for span in self.spans if span.wait is Wait.QUEUE), self.asked)


class Stopwatch:
    """Takes the times of one episode as it is played; made when the episode is asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = clock()
        self._spans: list[Span] = []

    def started(self) -> None:
        """The episode has its place among those in flight."""
        self._spans.append(Span(Wait.QUEUE, self._asked, self._clock()))

    @contextmanager
    def waiting(self, wait: Wait, turn: int | None = None) -> Iterator[None]:
        """Take the time of the block."""
        start = self._clock()
        try:
            yield
        finally:
            self._spans.append(Span(wait, start, self._clock(), turn))

    def timing(self) -> EpisodeTiming:
        """What was taken; the episode ends now."""
        return EpisodeTiming(self._asked, self._clock(), tuple(self._spans))


def split(timings: Iterable[EpisodeTiming]) -> dict[Part, float]:
    """Divide the time of a batch, in seconds: at each moment equally among the episodes that have not ended.

    So what all wait for counts in full, and what one waits for while others generate counts for little; the last
    episode alone counts in full again.
    """
    batch = list(timings)
    share = _Share(batch)
    seconds = dict.fromkeys(Part, 0.0)
    for timing in batch:
        left = share.between(timing.asked, timing.ended)
        for span in timing.spans:
            part = share.between(span.start, span.end)
            seconds[PARTS[span.wait]] += part
            left -= part
        seconds[Part.CLIENT] += max(0.0, left)
    return seconds


class _Share:
    """How much of the time one episode of a batch is given: a second in which N have not ended is 1/N of a second."""

    def __init__(self, batch: Sequence[EpisodeTiming]) -> None:
        changes = sorted([(one.asked, 1) for one in batch] + [(one.ended, -1) for one in batch])
        self._moments: list[float] = []
        self._given: list[float] = []
        """Up to each moment."""
        self._rates: list[float] = []
        """From each moment on."""
        given, everyone, before = 0.0, 0, 0.0
        for now, change in changes:
            given += (now - before) / everyone if everyone else 0.0
            everyone += change
            before = now
            self._moments.append(now)
            self._given.append(given)
            self._rates.append(1 / everyone if everyone else 0.0)

    def between(self, start: float, end: float) -> float:
        return self._until(end) - self._until(start)

    def _until(self, moment: float) -> float:
        last = bisect_right(self._moments, moment) - 1
        return self._given[last] + (moment - self._moments[last]) * self._rates[last]
