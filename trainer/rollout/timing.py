"""When an episode waited, and for what: plain data, in seconds on the monotonic clock of its process.

Invariants:

1. Nothing is decided by it: two episodes that differ in their timing alone are equal, and no log of episodes holds it.
2. The spans of an episode are in order and do not overlap; a wait that ended in an error is a span like any other.
3. `attribute` divides the whole wall time of a batch: its phases add up to it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What an episode waits for."""

    QUEUE = "queue"
    """For its place among those in flight."""
    GENERATION = "generation"
    ENVIRONMENT = "environment"
    """For a session, a reset, or a step but ANSWER."""
    JUDGING = "judging"
    """For the step that is judged."""
    CLIENT = "client"
    """Between two waits, for the client's own work: tokens, prompts, parsing."""


@dataclass(frozen=True, slots=True)
class Span:
    """One wait."""

    phase: Phase
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class EpisodeTiming:
    """From the moment that an episode was asked for until it ended."""

    asked: float
    ended: float
    spans: tuple[Span, ...]

    @property
    def started(self) -> float:
        """When the episode got its place among those in flight."""
        return next((span.end for span in self.spans if span.phase is Phase.QUEUE), self.asked)


class EpisodeTimer:
    """Takes the times of one episode as it is played; made when the episode is asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked = clock()
        self._spans: list[Span] = []

    def started(self) -> None:
        """The episode has its place among those in flight."""
        self._spans.append(Span(Phase.QUEUE, self._asked, self._clock()))

    @contextmanager
    def waiting(self, phase: Phase) -> Iterator[None]:
        """Take the time of the block."""
        start = self._clock()
        try:
            yield
        finally:
            self._spans.append(Span(phase, start, self._clock()))

    def timing(self) -> EpisodeTiming:
        """What was taken; the episode ends now."""
        return EpisodeTiming(self._asked, self._clock(), tuple(self._spans))


def attribute(timings: Iterable[EpisodeTiming]) -> dict[Phase, float]:
    """Divide the wall time of a batch, in seconds: at each moment equally among the episodes that have not ended.

    So what all wait for counts in full, and what one waits for while others generate counts for little; the last
    episode alone counts in full again.
    """
    batch = list(timings)
    share = _Share(batch)
    seconds = dict.fromkeys(Phase, 0.0)
    for timing in batch:
        left = share.between(timing.asked, timing.ended)
        for span in timing.spans:
            part = share.between(span.start, span.end)
            seconds[span.phase] += part
            left -= part
        seconds[Phase.CLIENT] += max(0.0, left)
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
