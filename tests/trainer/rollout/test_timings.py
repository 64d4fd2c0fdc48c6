"""The times of an episode are in order, and a batch's time is divided without a rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clock import Clock
from trainer.rollout.timings import EpisodeTiming, Part, Span, Stopwatch, Wait, split


def timed(asked: float, *waits: tuple[Wait, float]) -> EpisodeTiming:
    """An episode of waits that follow each other at once."""
    now, spans = asked, []
    for wait, seconds in waits:
        spans.append(Span(wait, now, now + seconds))
        now += seconds
    return EpisodeTiming(asked, now, tuple(spans))


def test_a_stopwatch_takes_the_times_of_what_it_is_told_of() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    watch.started()
    with watch.waiting(Wait.RESET):
        clock.now += 2
    clock.now += 3
    with suppress(OSError), watch.waiting(Wait.STEP, 0):
        clock.now += 4
        raise OSError("gone")
    timing = watch.timing()
    assert timing == EpisodeTiming(
        1_000,
        1_010,
        (Span(Wait.QUEUE, 1_000, 1_001), Span(Wait.RESET, 1_001, 1_003), Span(Wait.STEP, 1_006, 1_010, 0)),
    )
    assert timing.started == 1_001


def test_an_episode_alone_is_divided_as_it_was() -> None:
    one = timed(5, (Wait.QUEUE, 1), (Wait.RESET, 2), (Wait.GENERATION, 4), (Wait.STEP, 8), (Wait.ANSWER, 16))
    assert split([EpisodeTiming(one.asked, one.ended + 32, one.spans)]) == {
        Part.QUEUE: 1,
        Part.GENERATION: 4,
        Part.ENVIRONMENT: 10,
        Part.JUDGING: 16,
        Part.CLIENT: 32,
    }


def test_each_moment_is_shared_by_those_that_have_not_ended() -> None:
    batch = [timed(0, (Wait.GENERATION, 3)), timed(0, (Wait.GENERATION, 3)), timed(0, (Wait.STEP, 9))]
    parts = split(batch)
    assert parts[Part.GENERATION] == pytest.approx(2)
    assert parts[Part.ENVIRONMENT] == pytest.approx(1 + 6), "the last one alone counts in full"


def test_nothing_played_took_no_time() -> None:
    assert split([]) == dict.fromkeys(Part, 0.0)


EPISODES = st.builds(
    lambda asked, waits: timed(asked, *waits),
    st.floats(0, 10),
    st.lists(st.tuples(st.sampled_from(Wait), st.floats(0, 5)), max_size=6),
)


@given(st.lists(EPISODES, min_size=1, max_size=8))
def test_the_parts_add_up_to_the_time_in_which_any_episode_was_under_way(batch: Sequence[EpisodeTiming]) -> None:
    covered, until = 0.0, -math.inf
    for timing in sorted(batch, key=lambda one: one.asked):
        covered += max(0.0, timing.ended - max(timing.asked, until))
        until = max(until, timing.ended)
    parts = split(batch)
    assert sum(parts.values()) == pytest.approx(covered)
    assert min(parts.values()) >= 0.0
