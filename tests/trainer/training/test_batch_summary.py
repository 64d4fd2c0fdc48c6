"""What ranks tell each other: as much as they need of each other's episodes, and little else."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from env_server.types import ActionType, RewardComponents
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.training.batch_summary import (
    BatchSummary,
    EpisodeSummary,
    groups_of,
    of_all_ranks,
    result_of,
    summaries,
)


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


@given(st.lists(episodes(), min_size=1, max_size=6))
def test_a_groups_rewards_and_result_are_those_of_its_episodes(group: Sequence[Episode]) -> None:
    told = summaries(group, REWARD_FUNCTIONS)
    played = [episode for episode in group if episode.outcome is not Outcome.FAILED]
    rewards = [tuple(reward.of(episode) for reward in REWARD_FUNCTIONS) for episode in played]
    assert [each.rewards for each in told if each.rewards] == rewards
    result = result_of(told)
    assert (result.question_id, result.played) == (group[0].question_id, len(played))
    assert result.solved == sum(episode.correct for episode in played)
    assert BatchSummary(told).failures == [e.failure for e in group if e.outcome is Outcome.FAILED]


@given(st.lists(episodes(), min_size=1, max_size=12), st.integers(1, 4), st.data())
def test_the_parts_of_all_ranks_are_the_batch_however_it_is_cut(
    batch: Sequence[Episode], generations: int, data: st.DataObject
) -> None:
    rows = summaries(batch, REWARD_FUNCTIONS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [
        BatchSummary(rows[first:last], rows[first:last], replaced=1)
        for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True)
    ]
    whole = of_all_ranks(parts, generations)
    assert whole == BatchSummary(rows, rows, groups_of(rows, generations), replaced=len(parts))
    assert [row for group in whole.drawn_first for row in group] == rows


def test_groups_that_were_judged_are_told_by_the_ranks_that_played_them() -> None:
    wrong = EpisodeSummary("q", Outcome.WRONG, "", 0.0, (0.0,) * 4, (0,), 0, 1, 1)
    right = EpisodeSummary("q", Outcome.CORRECT, "", 1.0, (1.0,) * 4, (0,), 0, 1, 1)
    part = BatchSummary([wrong, right], [wrong], [[wrong, right, wrong]], 1)
    whole = of_all_ranks([part, part], 2)
    assert whole.drawn_first == [[wrong, right, wrong]] * 2, "with those that are not trained on"
    assert whole.replaced == 2


def test_a_long_episode_is_told_in_few_bytes() -> None:
    turn = Turn("x" * 1000, ActionType.QUERY, "x" * 1000, True, "y" * 1000, "", RewardComponents())
    row = TokenRow([1] * 500, [2] * 4000, [-0.5] * 4000, [1] * 4000, [0] * 4000)
    episode = Episode("e", "q", "d", "", "easy", "f", Outcome.WRONG, (turn,) * 10, row)
    assert len(pickle.dumps(summaries([episode] * 100, REWARD_FUNCTIONS))) < 100 * 250 < len(pickle.dumps(episode))
