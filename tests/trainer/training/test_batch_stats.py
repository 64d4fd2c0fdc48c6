"""What ranks exchange of a batch, as much as they need and little else, and the numbers that come of it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.types import ActionType, RewardComponents
from trainer.rollout.episodes import Episode, EpisodeRecord, Outcome, TokenRow, Turn, record
from trainer.training.batch_stats import (
    BatchRecords,
    BatchTimes,
    batch_metrics,
    groups_of,
    of_all_ranks,
    without_texts,
)


def exchanged(episode: Episode) -> EpisodeRecord:
    return without_texts(record(episode, with_versions=True))


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    outcome = draw(st.sampled_from(Outcome))
    shares = st.floats(-0.1, 1.0).map(lambda value: round(value, 3))
    rewards = [] if outcome is Outcome.FAILED else draw(st.lists(st.tuples(shares, shares), min_size=1, max_size=4))
    turns = tuple(
        Turn("", ActionType.QUERY, "", draw(st.booleans()), "", "", RewardComponents(progress=p, operational=o), n)
        for n, (p, o) in enumerate(rewards)
    )
    row = TokenRow([1], [2, 3], [0.0, 0.0], [draw(st.integers(0, 1)), 1], [0, 0])
    failure = "EngineError: gone" if outcome is Outcome.FAILED else ""
    return Episode("e", draw(st.sampled_from("ab")), "d", "", "easy", "f", outcome, turns, row, failure=failure)


@given(st.lists(episodes(), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_the_parts_of_all_ranks_are_the_batch_however_it_is_cut(
    batch: Sequence[Episode], generations: int, data: st.DataObject
) -> None:
    rows = [without_texts(record(episode, with_versions=True)) for episode in batch]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [
        BatchRecords(rows[first:last], rows[first:last], replaced=1)
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    whole = of_all_ranks(parts, generations)
    assert whole == BatchRecords(rows, rows, groups_of(rows, generations), replaced=len(parts))
    assert [row for group in whole.drawn_first for row in group] == rows


def test_groups_that_were_judged_are_told_by_the_ranks_that_played_them() -> None:
    wrong, right = episode_with(Outcome.WRONG, [0.0]), episode_with(Outcome.CORRECT, [1.0])
    part = BatchRecords([wrong, right], [wrong], [[wrong, right, wrong]], 1)
    whole = of_all_ranks([part, part], 2)
    assert whole.drawn_first == [[wrong, right, wrong]] * 2, "with those that are not trained on"
    assert whole.replaced == 2


def test_a_long_episode_is_exchanged_in_few_bytes() -> None:
    turn = Turn("x" * 1000, ActionType.QUERY, "x" * 1000, True, "y" * 1000, "", RewardComponents())
    row = TokenRow([1] * 500, [2] * 4000, [-0.5] * 4000, [1] * 4000, [0] * 4000)
    episode = Episode("e", "q", "d", "?" * 1000, "easy", "f", Outcome.WRONG, (turn,) * 10, row)
    assert len(pickle.dumps([exchanged(episode) for _ in range(100)])) < 100 * 1_000 < len(pickle.dumps(episode)) * 3


TIMES = BatchTimes(seconds=2.0, idle=0.0)


def episode_with(
    outcome: Outcome,
    rewards: Sequence[float] = (),
    truncated: int = 0,
    mask: Sequence[int] = (),
    versions: Sequence[int] = (3, 3, 3),
) -> EpisodeRecord:
    turns = tuple(
        Turn("", ActionType.QUERY, "", True, "", "", RewardComponents(total=r), version, tokens=2)
        for r, version in zip(rewards, versions, strict=False)
    )
    row = TokenRow([1], [2] * len(mask), [0.0] * len(mask), list(mask), [0] * len(mask))
    episode = Episode("e", "q", "d", "", "easy", "f", outcome, turns, row, truncated)
    return exchanged(episode)


def test_metrics_of_a_batch() -> None:
    episodes = [
        episode_with(Outcome.CORRECT, [0.01, 1.0], mask=[1, 0, 1], versions=[3, 2]),
        episode_with(Outcome.WRONG, [-0.02], truncated=2, mask=[0, 1]),
        episode_with(Outcome.OUT_OF_BUDGET, [0.0] * 3, mask=[1], versions=[1, 1, 1]),
        episode_with(Outcome.OUT_OF_TOKENS, [0.01] * 2, truncated=1, mask=[1], versions=[2, 3]),
        episode_with(Outcome.FAILED, mask=[0]),
    ]
    assert batch_metrics(BatchRecords(episodes, drawn_first=[episodes]), 5, TIMES, 3) == pytest.approx(
        {
            "rollout/success_rate": 1 / 4,
            "rollout/reward": (1.01 - 0.02 + 0.0 + 0.02) / 4,
            "rollout/exploration_entropy": 0.75,  # of two that explored alike, and two others
            "rollout/steps": (2 + 1 + 3 + 2) / 4,
            "rollout/out_of_budget": 1 / 5,
            "rollout/out_of_tokens": 1 / 5,
            "rollout/failed": 1,
            "rollout/truncated": 2,
            "rollout/trained_tokens": 5,
            "rollout/trained_token_share": 5 / (2 * 8),
            "rollout/staleness/mean": (0 + 1 + 0 + 2 + 2 + 2 + 1 + 0) / 8,
            "rollout/staleness/max": 2,
            "rollout/seconds": 2.0,
            "rollout/idle_seconds": 0.0,
            "rollout/episodes_per_second": 2.5,
            "rollout/replaced": 0,
            "rollout/no_signal": 0.0,
        }
    )


def test_explorations_differ_in_what_was_done_and_not_in_how_it_is_written_or_answered() -> None:
    def exploring(*actions: tuple[str, str]) -> EpisodeRecord:
        turns = tuple(Turn("", kind, argument, True, "", "", RewardComponents()) for kind, argument in actions)
        row = TokenRow([1], [2], [0.0], [1], [0])
        return exchanged(Episode("e", "q", "d", "", "easy", "f", Outcome.WRONG, turns, row))

    count = exploring(("QUERY", "SELECT count(*) FROM pets"), ("ANSWER", "3"))
    written_otherwise = exploring(("QUERY", "select  count(*)\nfrom pets"), ("ANSWER", "4"))
    look = exploring(("DESCRIBE", "pets"), ("QUERY", "SELECT count(*) FROM pets"), ("ANSWER", "3"))

    def entropy(*groups: Sequence[EpisodeRecord]) -> float | None:
        batch = BatchRecords(list(groups[0]), drawn_first=list(groups))
        return batch_metrics(batch, 2, TIMES, 3).get("rollout/exploration_entropy")

    assert entropy([count, written_otherwise]) == 0.0
    assert entropy([count, look]) == 1.0
    assert entropy([count, look], [count, count]) == 0.5
    assert entropy([count], [episode_with(Outcome.FAILED)]) is None


def test_metrics_when_every_episode_failed() -> None:
    episodes = [episode_with(Outcome.FAILED, mask=[0])]
    metrics = batch_metrics(BatchRecords(episodes, drawn_first=[episodes]), 1, TIMES, 3)
    assert metrics["rollout/failed"] == 1
    assert metrics["rollout/trained_token_share"] == 1.0, "nothing that was generated is left out"
    assert metrics["rollout/success_rate"] == metrics["rollout/reward"] == metrics["rollout/steps"] == 0.0
