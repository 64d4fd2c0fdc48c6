"""The times of an episode are in order, and a batch's time is divided without a rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clock import Clock
from trainer.rollout.timing import EpisodeTimer, EpisodeTiming, Phase, Span, attribute


def timed(asked: float, *waits: tuple[Phase, float]) -> EpisodeTiming:
    """An episode of waits that follow each other at once."""
    now, spans = asked, []
    for phase, seconds in waits:
        spans.append(Span(phase, now, now + seconds))
        now += seconds
    return EpisodeTiming(asked, now, tuple(spans))


def test_a_stopwatch_takes_the_times_of_what_it_is_told_of() -> None:
    clock = Clock()
    watch = EpisodeTimer(clock)
    clock.now += 1
    watch.started()
    with watch.waiting(Phase.ENVIRONMENT):
        clock.now += 2
    clock.now += 3
    with suppress(OSError), watch.waiting(Phase.ENVIRONMENT):
        clock.now += 4
        raise OSError("gone")
    timing = watch.timing()
    assert timing == EpisodeTiming(
        1_000,
        1_010,
        (Span(Phase.QUEUE, 1_000, 1_001), Span(Phase.ENVIRONMENT, 1_001, 1_003), Span(Phase.ENVIRONMENT, 1_006, 1_010)),
    )
    assert timing.started == 1_001


def test_an_episode_alone_is_divided_as_it_was() -> None:
    one = timed(
        5, (Phase.QUEUE, 1), (Phase.ENVIRONMENT, 2), (Phase.GENERATION, 4), (Phase.ENVIRONMENT, 8), (Phase.JUDGING, 16)
    )
    assert attribute([EpisodeTiming(one.asked, one.ended + 32, one.spans)]) == {
        Phase.QUEUE: 1,
        Phase.GENERATION: 4,
        Phase.ENVIRONMENT: 10,
        Phase.JUDGING: 16,
        Phase.CLIENT: 32,
    }


def test_each_moment_is_shared_by_those_that_have_not_ended() -> None:
    batch = [timed(0, (Phase.GENERATION, 3)), timed(0, (Phase.GENERATION, 3)), timed(0, (Phase.ENVIRONMENT, 9))]
    parts = attribute(batch)
    assert parts[Phase.GENERATION] == pytest.approx(2)
    assert parts[Phase.ENVIRONMENT] == pytest.approx(1 + 6), "the last one alone counts in full"


def test_nothing_played_took_no_time() -> None:
    assert attribute([]) == dict.fromkeys(Phase, 0.0)


EPISODES = st.builds(
    lambda asked, waits: timed(asked, *waits),
    st.floats(0, 10),
    st.lists(st.tuples(st.sampled_from(Phase), st.floats(0, 5)), max_size=6),
)


@given(st.lists(EPISODES, min_size=1, max_size=8))
def test_the_parts_add_up_to_the_time_in_which_any_episode_was_under_way(batch: Sequence[EpisodeTiming]) -> None:
    covered, until = 0.0, -math.inf
    for timing in sorted(batch, key=lambda one: one.asked):
        covered += max(0.0, timing.ended - max(timing.asked, until))
        until = max(until, timing.ended)
    parts = attribute(batch)
    assert sum(parts.values()) == pytest.approx(covered)
    assert min(parts.values()) >= 0.0
