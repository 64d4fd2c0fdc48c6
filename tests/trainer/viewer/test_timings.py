"""The times of a turn are those that the trace was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.rollout.episodes import Episode, Outcome, TokenRow
from trainer.rollout.timings import EpisodeTiming, Span, Wait
from trainer.rollout.trace import Trace, Track
from trainer.viewer.timings import turn_times


def episode(name: str, *turns: tuple[float, float]) -> Episode:
    """Each turn generates, then waits for the environment, for so many seconds."""
    now, spans = 101.0, [Span(Wait.QUEUE, 100.0, 100.5), Span(Wait.RESET, 100.5, 101.0)]
    for place, (generation, step) in enumerate(turns):
        spans.append(Span(Wait.GENERATION, now, now + generation, place))
        spans.append(Span(Wait.STEP, now + generation, now + generation + step, place))
        now += generation + step + 0.1
    row = TokenRow([1], [2], [0.0], [1], [0])
    timing = EpisodeTiming(100.0, now, tuple(spans))
    return Episode(name, "q", "db", "?", "easy", "f", Outcome.WRONG, (), row, timing=timing)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.write_episode(episode("q#1", (1.0, 0.25), (2.0, 0.5)))
        trace.write_slice(Track.STEPS, "step 1", 1.0, 2.0)
        trace.write_episode(episode('q#2\u00e9"', (3.0, 0.75)))
        trace.write_episode(episode("q#1", (4.0, 0.25), (5.0, 0.5)))
        trace.write_episode(episode("q#11"))
    return path


def test_each_turn_has_its_time_and_what_it_waited_for(path: Path) -> None:
    (only,) = turn_times(path, 'q#2\u00e9"')
    assert only.seconds == pytest.approx(3.75)
    assert only.parts == pytest.approx({"generation": 3.0, "environment": 0.75})


def test_an_episode_that_was_played_again_has_its_last_times(path: Path) -> None:
    assert [turn.seconds for turn in turn_times(path, "q#1")] == pytest.approx([4.25, 5.5])


@pytest.mark.parametrize("name", ["q#11", "q#3", "q", "step 1"])
def test_what_has_no_turns_or_is_not_there_has_none(path: Path, name: str) -> None:
    assert turn_times(path, name) == []


def test_a_trace_that_still_grows_is_read(path: Path) -> None:
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        assert len(turn_times(path, "q#1")) <= 2
