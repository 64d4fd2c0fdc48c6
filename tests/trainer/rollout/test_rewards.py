"""The reward functions read one field each, in order, and pass a failed episode on as None."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.dataset import Gold
from env_server.reward import EpisodeRewards
from env_server.settings import RewardSettings
from env_server.types import RewardComponents
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import (
    REWARD_FUNCTIONS,
    most_without_answer,
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
    return Episode("e", "q", "db", "?", "easy", "f", outcome, turns, TokenRow([1], [2], [0.0], [1], [0]))


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
    assert len(REWARD_FUNCTIONS) == 4, "TRL leaves a row out where all of them are None"


def test_rewards_ignore_text() -> None:
    fields = reward_fields(EPISODES, RewardSettings())
    with_text = reward_correctness(prompts=["x"], completions=["ANSWER 42"], completion_ids=[[1]], **fields)
    assert with_text == reward_correctness(**fields)


MOVES = st.builds(
    lambda kind, argument, ok, rows: (kind, argument, ok, rows if kind == "QUERY" and ok else None),
    st.sampled_from(["QUERY", "QUERY", "DESCRIBE", "SAMPLE", "DROP"]),
    st.sampled_from(["t", "u"]) | st.text(max_size=3),
    st.booleans(),
    st.sampled_from([(("a", 1),), (("a", 1), ("b", 2)), ()]),
)
WEIGHTS = st.tuples(*[st.floats(-2, 2)] * 4)


@settings(max_examples=50)
@given(st.lists(MOVES, min_size=1, max_size=15), st.booleans(), st.floats(0, 1), WEIGHTS)
def test_no_episode_without_a_right_answer_collects_more_than_the_bound(
    moves: list[tuple[str, str, bool, Any]], answers: bool, parseable: float, weights: tuple[float, ...]
) -> None:
    settings = RewardSettings()
    rewards = EpisodeRewards(Gold(rows=(("a", 1), ("b", 2)), ordered=False), settings)
    steps = [
        rewards.explore(kind, argument, ok=ok, rows=rows, row_count=None if rows is None else len(rows))
        for kind, argument, ok, rows in moves[: 14 if answers else 15]
    ]
    if answers:
        steps.append(rewards.answer("wrong", correct=False))
    progress = sum(step.progress for step in steps) / settings.progress_scale
    collected = (0.0, progress, sum(step.operational for step in steps), parseable)
    total = sum(weight * value for weight, value in zip(weights, collected, strict=True))
    assert total <= most_without_answer(weights, settings, 15) + 1e-9


def test_the_bound_is_reached_and_under_the_default_weights_a_third_of_a_right_answer() -> None:
    settings = RewardSettings()
    rewards = EpisodeRewards(Gold(rows=(("a", 1),), ordered=False), settings)
    steps = [rewards.explore("QUERY", f"SELECT {i}", ok=True, rows=(("a", 1),), row_count=1) for i in range(15)]
    weights = (1.0, 0.2, 0.2, 0.1)
    collected = 0.2 * sum(step.progress for step in steps) / settings.progress_scale
    collected += 0.2 * sum(step.operational for step in steps) + 0.1
    assert most_without_answer(weights, settings, 15) == pytest.approx(collected) == pytest.approx(0.33)
    assert most_without_answer((1.0, 0.0, -1.0, 0.0), settings, 15) == pytest.approx(0.75)
    assert most_without_answer((1.0, -1.0, 0.0, -1.0), settings, 15) == 0.0
