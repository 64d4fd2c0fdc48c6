"""A trace: JSON that nests, whole and cut anywhere, with no more tracks than episodes in flight."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.config import ConfigError
from trainer.rollout.episodes import Episode, Outcome, TokenRow
from trainer.rollout.timings import EpisodeTiming, Span, Wait
from trainer.rollout.trace import FIRST_EPISODE, Trace, Track, rank_path

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_bytes())
    return events


def slices(events: Sequence[Event], at_least: int = 0) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["tid"] >= at_least]


def require_nesting(events: Sequence[Event]) -> int:
    """Slices of a track nest or follow each other, parents first; returns the greatest depth."""
    by_track = defaultdict(list)
    for event in slices(events):
        assert event["dur"] >= 0
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    deepest = 0
    for spans in by_track.values():
        open_until: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
            deepest = max(deepest, len(open_until))
    return deepest


def played(asked: float, queued: float, *waits: tuple[Wait, float, int | None], failure: str = "") -> Episode:
    """An episode whose waits follow each other, with some work of the client's between two."""
    now = asked + queued
    spans = [Span(Wait.QUEUE, asked, now)]
    for wait, seconds, turn in waits:
        spans.append(Span(wait, now + 0.001, now + 0.001 + seconds, turn))
        now = spans[-1].end
    outcome = Outcome.FAILED if failure else Outcome.WRONG
    row = TokenRow([1], [2], [0.0], [1], [0])
    timing = EpisodeTiming(asked, now + 0.001, tuple(spans))
    return Episode("q#1", "q", "db", "?", "easy", "f", outcome, (), row, failure=failure, timing=timing)


TWO_TURNS = (
    *((Wait.SESSION, 0.01, None), (Wait.RESET, 0.02, None), (Wait.GENERATION, 1.0, 0), (Wait.STEP, 0.1, 0)),
    *((Wait.GENERATION, 2.0, 1), (Wait.ANSWER, 0.2, 1)),
)


def test_an_episode_is_a_track_its_turns_are_slices_and_their_waits_within(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        trace.write_episode(played(5.0, 3.0, *TWO_TURNS, failure="EngineError: gone"))
    events = events_of(tmp_path / "trace.json")
    assert [event["name"] for event in slices(events)] == [
        *("q", "session", "reset", "turn 1", "generation", "step", "turn 2", "generation", "answer"),
    ]
    assert require_nesting(events) == 3
    episode, *inside = slices(events)
    assert episode["args"]["queued_s"] == 3.0
    assert episode["args"]["failure"] == "EngineError: gone"
    assert episode["dur"] == pytest.approx(3.337e6, abs=2)
    assert inside[4]["dur"] == pytest.approx(0.1e6, abs=2)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {FIRST_EPISODE: "episode 1"}


EPISODES = st.lists(
    st.builds(
        lambda asked, queued, waits: played(asked, queued, *((wait, s, turn) for turn, (wait, s) in enumerate(waits))),
        st.floats(0, 20),
        st.floats(0, 5),
        st.lists(st.tuples(st.sampled_from([Wait.GENERATION, Wait.STEP]), st.floats(0, 3)), max_size=4),
    ),
    max_size=20,
)


@given(EPISODES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tracks_nest_and_are_as_many_as_episodes_were_in_flight(tmp_path: Path, episodes: list[Episode]) -> None:
    times = sorted((e.timing for e in episodes if e.timing is not None), key=lambda timing: timing.ended)
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for episode in sorted(episodes, key=lambda e: 0.0 if e.timing is None else e.timing.ended):
            trace.write_episode(episode)
    events = events_of(path)
    require_nesting(events)
    shown = [event for event in slices(events) if event["name"] == "q"]
    assert len(shown) == len(episodes)
    in_flight = [sum(one.started < other.ended and other.started <= one.started for other in times) for one in times]
    assert len({event["tid"] for event in shown}) == max(in_flight, default=0)


def test_what_the_trainer_does_has_tracks_of_its_own(tmp_path: Path) -> None:
    with Trace(tmp_path / "trace.json") as trace:
        trace.write_slice(Track.PUSHES, "push", 1.0, 2.0)
        trace.write_slice(Track.STEPS, "step 1", 1.0, 9.0, loss=0.5)
        trace.write_slice(Track.PUSHES, "push", 10.0, 11.0)
    events = events_of(tmp_path / "trace.json")
    assert [(event["tid"], event["name"]) for event in slices(events)] == [(3, "push"), (1, "step 1"), (3, "push")]
    assert slices(events)[1]["args"] == {"loss": 0.5}
    assert sum(event["name"] == "thread_name" for event in events) == 2, "a track is named once"


def test_a_file_is_as_good_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for start in range(3):
            trace.write_episode(played(start, 0.0, *TWO_TURNS))
        assert len(slices(json.loads(path.read_text() + "]"))) == 27


def test_a_run_that_goes_on_goes_on_in_its_file_wherever_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.write_episode(played(0.0, 0.0, *TWO_TURNS))
    whole = path.read_bytes()
    first = json.loads(whole)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with Trace(path, goes_on=True) as trace:
            trace.write_slice(Track.STEPS, "step 2", 100.0, 101.0)
        events = json.loads(path.read_bytes())
        assert events[-1]["name"] == "step 2"
        assert events[:-4] == first[: len(events) - 4]
    assert len(events) == len(first) + 4
    with Trace(path):
        pass
    assert len(events_of(path)) == 1, "another run replaces it"


def test_ranks_write_files_that_can_be_put_together(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    for rank in (0, 1):
        with Trace(path, rank) as trace:
            trace.write_episode(played(0.0, 0.0, *TWO_TURNS))
    assert sorted(file.name for file in path.parent.iterdir()) == ["trace.json", "trace.rank1.json"]
    together = [event for rank in (0, 1) for event in events_of(rank_path(path, rank))]
    assert {event["pid"] for event in together} == {0, 1}
    require_nesting(together)
    starts = [event["ts"] for event in slices(together) if event["name"] == "q"]
    assert starts[0] == pytest.approx(starts[1], abs=1e6), "by one clock"


def test_a_file_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--trace .*file/trace.json"):
        Trace(tmp_path / "file" / "trace.json")
