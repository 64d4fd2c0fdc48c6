"""Advantages of turns: on a tree small enough to work out by hand, and what holds of any tree."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.types import ActionType, RewardComponents
from trainer.rollout.credit import turn_advantages, turn_rewards
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import REWARD_FUNCTIONS, total_reward

CORRECT_ONLY = (1.0, 0.0, 0.0, 0.0)


def turn(text: str, operational: float = 0.0, progress: float = 0.0, parseable: bool = True) -> Turn:
    reward = RewardComponents(operational=operational, progress=progress, total=operational + progress)
    return Turn(text, ActionType.QUERY, text, parseable, "", "", reward)


def episode(outcome: Outcome, *turns: Turn) -> Episode:
    row = TokenRow([], [], [], [], [])
    return Episode("e", "q", "db", "?", "easy", "f", outcome, turns, row)


def test_the_advantages_of_a_tree_worked_out_by_hand() -> None:
    """Three begin alike, two of them go on alike, one goes its own way from the start; correctness alone is paid."""
    group = [
        episode(Outcome.CORRECT, turn("a"), turn("b"), turn("right")),
        episode(Outcome.WRONG, turn("a"), turn("b"), turn("wrong")),
        episode(Outcome.WRONG, turn("a"), turn("c")),
        episode(Outcome.CORRECT, turn("d"), turn("right")),
        episode(Outcome.FAILED),
    ]
    # Returns at a discount of 0.5: 0.25 0.5 1 | 0 0 0 | 0 0 | 0.5 1. States: all four; after a; after a, b; after d.
    start, after_a, after_ab = (0.25 + 0 + 0 + 0.5) / 4, (0.5 + 0 + 0) / 3, (1 + 0) / 2
    assert turn_advantages(group, REWARD_FUNCTIONS, CORRECT_ONLY, 0.5) == [
        pytest.approx([0.25 - start, 0.5 - after_a, 1 - after_ab]),
        pytest.approx([-start, -after_a, -after_ab]),
        pytest.approx([-start, -after_a]),
        pytest.approx([0.5 - start, 0.0]),
        [],
    ]


TEXTS = ["a", "SELECT a FROM t", "SELECT b FROM t WHERE b = 1"]
TURNS = st.builds(
    turn,
    st.sampled_from(TEXTS),
    st.sampled_from([-0.05, -0.02, 0.01]),
    st.sampled_from([0.0, 0.03]),
    st.booleans(),
)
EPISODES = st.builds(
    lambda outcome, turns: episode(outcome, *([] if outcome is Outcome.FAILED else turns)),
    st.sampled_from([Outcome.CORRECT, Outcome.WRONG, Outcome.OUT_OF_BUDGET, Outcome.FAILED]),
    st.lists(TURNS, min_size=1, max_size=5),
)
WEIGHTS = st.tuples(*[st.floats(-2, 2)] * 4)


@given(EPISODES.filter(lambda each: each.outcome is not Outcome.FAILED), WEIGHTS)
def test_the_rewards_of_turns_add_up_to_what_grpo_is_given(played: Episode, weights: tuple[float, ...]) -> None:
    whole = total_reward(played, REWARD_FUNCTIONS, weights)
    assert sum(turn_rewards(played, REWARD_FUNCTIONS, weights)) == pytest.approx(whole, abs=1e-9)


@given(st.lists(EPISODES, min_size=1, max_size=6), WEIGHTS, st.floats(0, 1))
def test_the_advantages_of_a_state_cancel_out(
    group: list[Episode], weights: tuple[float, ...], discount: float
) -> None:
    by_state = defaultdict(list)
    advantages = turn_advantages(group, REWARD_FUNCTIONS, weights, discount)
    for each, values in zip(group, advantages, strict=True):
        assert len(values) == len(each.turns)
        for number, value in enumerate(values):
            by_state[tuple(turn.text for turn in each.turns[:number])].append(value)
    assert all(sum(values) == pytest.approx(0, abs=1e-9) for values in by_state.values())


@given(st.lists(EPISODES, min_size=1, max_size=6), WEIGHTS)
def test_without_a_discount_the_first_turn_has_the_episodes_own_advantage(
    group: list[Episode], weights: tuple[float, ...]
) -> None:
    played = [each for each in group if each.turns]
    totals = [sum(turn_rewards(each, REWARD_FUNCTIONS, weights)) for each in played]
    advantages = [values[0] for values in turn_advantages(group, REWARD_FUNCTIONS, weights, 1.0) if values]
    mean = sum(totals) / len(totals) if totals else 0.0
    assert advantages == pytest.approx([total - mean for total in totals], abs=1e-9)
