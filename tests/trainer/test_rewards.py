"""The reward functions read one field each, in order, and pass a failed episode on as None."""

from __future__ import annotations

import pytest

from env_server.settings import RewardSettings
from env_server.types import RewardComponents
from trainer.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rewards import (
    REWARD_FUNCTIONS,
    reward_correctness,
    reward_fields,
    reward_format,
    reward_operational,
    reward_progress,
)


def turn(operational: float, progress: float = 0.0, parseable: bool = True) -> Turn:
    reward = RewardComponents(operational=operational, progress=progress, total=operational + progress)
    return Turn("QUERY SELECT 1", "QUERY", "SELECT 1", parseable, "1", "", reward)


def episode(outcome: Outcome, *turns: Turn) -> Episode:
    return Episode("e", "q", "db", "?", "easy", "f", outcome, turns, TokenRow([1], [2], [0.0], [1]))


EPISODES = [
    episode(Outcome.CORRECT, turn(0.01, 0.15), turn(-0.02)),
    episode(Outcome.FAILED),
    episode(Outcome.WRONG, turn(0.01, 0.075), turn(-0.05, parseable=False)),
    episode(Outcome.OUT_OF_BUDGET, turn(-0.02)),
]


def test_one_value_per_row_in_order_with_none_for_a_failed_episode() -> None:
    fields = reward_fields(EPISODES, RewardSettings())
    assert reward_correctness(**fields) == [1.0, None, 0.0, 0.0]
    assert reward_progress(**fields) == [pytest.approx(1.0), None, pytest.approx(0.5), 0.0]
    assert reward_operational(**fields) == [pytest.approx(-0.01), None, pytest.approx(-0.04), pytest.approx(-0.02)]
    assert reward_format(**fields) == [1.0, None, 0.5, 1.0]


def test_every_function_is_none_for_a_failed_episode_so_that_trl_leaves_it_out() -> None:
    fields = reward_fields(EPISODES, RewardSettings())
    assert [function(**fields)[1] for function in REWARD_FUNCTIONS] == [None] * 4


def test_rewards_ignore_text() -> None:
    fields = reward_fields(EPISODES, RewardSettings())
    with_text = reward_correctness(prompts=["x"], completions=["ANSWER 42"], completion_ids=[[1]], **fields)
    assert with_text == reward_correctness(**fields)
