"""Adaptive reward weights and guided starts: bounded, and the same for every rank and a run that resumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.settings import RewardSettings
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType, AnswerMode, RewardComponents, SQLAction
from tests.trainer.records import make_record
from trainer.config import ConfigError
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import REWARD_FUNCTIONS, bound_without_answer
from trainer.training.adaptive import (
    LEAST,
    RATE,
    AdaptiveWeights,
    GuidedEpisode,
    GuidedStarts,
    given_steps,
    steps_left,
)

BASE = (1.0, 0.2, 0.2, 0.1)
BUDGET = 15
REWARDS = RewardSettings()
OPERATIONAL = (BUDGET * (REWARDS.step_cost + REWARDS.repeat), BUDGET * (REWARDS.step_cost + REWARDS.success + 0.01))
"""The least and the most that an episode's operational signals sum to."""

VALUES = st.tuples(st.sampled_from([0.0, 1.0]), st.floats(0, 1), st.floats(*OPERATIONAL), st.floats(0, 1))
"""The rewards of one episode."""
GROUPS = st.lists(st.lists(VALUES, min_size=0, max_size=5), min_size=0, max_size=4)
HISTORIES = st.lists(GROUPS, max_size=12)

Episodes = Sequence[Sequence[float]]


def told(weights: AdaptiveWeights, history: Sequence[Sequence[Episodes]]) -> list[tuple[float, ...]]:
    """The weights of each batch, and of the one after the last."""
    used = []
    for batch, groups in enumerate(history):
        used.append(weights.of(batch))
        weights.observe(batch, groups)
    return [*used, weights.of(len(history))]


def total(weights: Sequence[float], rewards: Sequence[float]) -> float:
    return sum(weight * reward for weight, reward in zip(weights, rewards, strict=True))


@settings(max_examples=300)
@given(HISTORIES)
def test_weights_stay_within_their_bounds_and_move_little(history: list[list[Episodes]]) -> None:
    used = told(AdaptiveWeights(BASE), history)
    assert used[0] == BASE, "before anything was measured"
    for weights in used:
        assert weights[0] == BASE[0], "correctness"
        assert all(LEAST * base - 1e-12 <= weight <= base + 1e-12 for weight, base in zip(weights, BASE, strict=True))
    for one, following in pairwise(used):
        assert all(abs(b - a) <= RATE * base + 1e-12 for a, b, base in zip(one, following, BASE, strict=True))


@settings(max_examples=300)
@given(HISTORIES, VALUES, VALUES)
def test_no_wrong_episode_is_paid_like_a_right_one(
    history: list[list[Episodes]], right: tuple[float, ...], wrong: tuple[float, ...]
) -> None:
    right, wrong = (1.0, *right[1:]), (0.0, *wrong[1:])
    for weights in told(AdaptiveWeights(BASE), history):
        assert (
            total(weights, right)
            > bound_without_answer(REWARD_FUNCTIONS, weights, REWARDS, BUDGET)
            >= total(weights, wrong) - 1e-9
        )
        assert (
            bound_without_answer(REWARD_FUNCTIONS, weights, REWARDS, BUDGET)
            <= bound_without_answer(REWARD_FUNCTIONS, BASE, REWARDS, BUDGET) + 1e-12
        )


@settings(max_examples=200)
@given(HISTORIES, st.integers(0, 3), st.integers(0, 11))
def test_weights_know_the_same_results_drawn_ahead_or_resumed(
    history: list[list[Episodes]], lag: int, stop: int
) -> None:
    def told_to(weights: AdaptiveWeights, batch: int) -> None:
        weights.observe(batch, history[batch])

    whole = AdaptiveWeights(BASE, lag)
    used: dict[int, tuple[float, ...]] = {}
    saved: dict[str, Any] = {}
    for batch in range(len(history)):
        for ahead in range(batch, batch + lag + 1):
            assert used.setdefault(ahead, whole.of(ahead)) == whole.of(ahead), "asked earlier or later, it is the same"
        told_to(whole, batch)
        if batch == stop:
            saved = json.loads(json.dumps(whole.state_dict()))
    unhurried = told(AdaptiveWeights(BASE), history)
    assert all(weights == unhurried[max(0, batch - lag)] for batch, weights in used.items()), "so many batches later"
    if stop >= len(history):
        return
    resumed = AdaptiveWeights(BASE, lag)
    resumed.load_state_dict(saved)
    for batch in range(stop + 1, len(history)):
        for ahead in range(batch, batch + lag + 1):
            assert resumed.of(ahead) == used[ahead]
        told_to(resumed, batch)
    assert resumed.state_dict() == whole.state_dict()


def test_a_reward_that_is_mastered_loses_its_weight_and_gets_it_back() -> None:
    solved = [(1.0, 1.0, 0.1, 1.0)] * 2
    failed = [(0.0, 0.5, -0.1, 1.0), (0.0, 0.0, 0.0, 1.0)]
    weights = AdaptiveWeights(BASE)
    history = [[[*solved, *failed]]] * 100
    used = told(weights, history)
    assert [weight[3] for weight in used] == sorted((weight[3] for weight in used), reverse=True)
    assert used[-1][3] == pytest.approx(LEAST * BASE[3], rel=1e-3), "every episode has the best format"
    assert LEAST * BASE[1] < used[-1][1] < BASE[1], "progress is high, and differs"
    back = told(weights_after(used[-1]), [[[(0.0, 0.0, 0.0, 0.5), (0.0, 0.0, 0.0, 1.0)]]] * 100)
    assert back[-1] == pytest.approx(BASE, rel=1e-3), "correctness tells none apart: the others are all there is"


def weights_after(weights: Sequence[float]) -> AdaptiveWeights:
    """Weights that have come to these."""
    adaptive = AdaptiveWeights(BASE)
    factors = [weight / base for weight, base in zip(weights, BASE, strict=True)]
    adaptive.load_state_dict({"state": {"factors": factors, "least": [0.0, 0.0, -0.1, 0.0]}, "pending": []})
    return adaptive


def test_a_checkpoint_of_other_rewards_is_refused() -> None:
    with pytest.raises(ConfigError, match="--reward_functions"):
        AdaptiveWeights((*BASE, 0.1)).load_state_dict(AdaptiveWeights(BASE).state_dict())


def test_the_first_step_is_the_formula() -> None:
    """c is 1 for correctness; for progress 0.25 over the 0.75 - 0.5 above the least, for format 0.1 over 0.9 - 0.8."""
    weights = AdaptiveWeights(BASE)
    weights.observe(0, [[(1.0, 1.0, 0.0, 1.0), (0.0, 0.5, 0.0, 0.8)]])
    assert weights.of(1) == pytest.approx((1.0, 0.2, 0.2 * (1 - RATE * (1 - LEAST)), 0.1))
    weights.observe(1, [[(1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)]])
    weights.observe(2, [[(1.0, 1.0, 0.0, 1.0), (0.0, 0.5, 0.0, 0.8)]])
    assert weights.of(3)[1] == pytest.approx(0.2 * ((1 - RATE * (1 - LEAST)) * (1 - RATE) + RATE / 3), rel=1e-12), (
        "0.25 over the 0.75 above the least seen so far"
    )


def guided(level: str, given: int, solved: int, played: int) -> list[GuidedEpisode]:
    return [{"hardness": level, "given_steps": given, "correct": n < solved} for n in range(played)]


@pytest.mark.parametrize(
    ("steps", "left", "expected"), [(0, 2, 0), (1, 2, 0), (2, 2, 1), (3, 1, 2), (3, 2, 1), (3, 9, 1), (6, 2, 4)]
)
def test_some_steps_are_given_and_never_the_last(steps: int, left: int, expected: int) -> None:
    assert given_steps(steps, left) == expected


@pytest.mark.parametrize(
    ("left", "results", "expected"),
    [
        (2, [(2, 2, 8)], 3),
        (2, [(2, 1, 8)], 2),
        (2, [(2, 0, 8)], 1),
        (1, [(2, 0, 8)], 1),
        (2, [(2, 0, 8), (1, 8, 8)], 3),
        (2, [(2, 0, 8), (1, 3, 8)], 2),
        (2, [(1, 8, 8), (1, 8, 8)], 2),
    ],
)
def test_the_steps_that_are_left_follow_success(left: int, results: list[tuple[int, int, int]], expected: int) -> None:
    assert steps_left(left, [each for result in results for each in guided("easy", *result)]) == expected


def actions(*texts: str) -> tuple[SQLAction, ...]:
    return tuple(
        SQLAction(action_type=kind, argument=argument) for kind, _, argument in (t.partition(" ") for t in texts)
    )


def test_the_oracles_steps_are_given_where_there_is_sql(pets: Dataset, pets_pool: DatabasePool) -> None:
    starts = GuidedStarts(pets, pets_pool, AnswerMode.VALUE)
    assert starts.of(0)("oslo") == actions("DESCRIBE pets", "DESCRIBE owners")
    starts.observe(0, [make_record("q", "wrong", given_steps=2)] * 8, [])
    query, *_ = (action.argument for action in starts.of(1)("oslo") if action.action_type == ActionType.QUERY)
    assert query == pets.question("oslo").gold_sql
    assert len(starts.of(1)("oslo")) == 3


def played(question_id: str, *texts: str, outcome: Outcome = Outcome.CORRECT) -> Episode:
    turns = tuple(
        Turn(text, action.action_type, action.argument, True, "", "", RewardComponents())
        for text, action in zip(texts, actions(*texts), strict=True)
    )
    row = TokenRow([], [], [], [], [])
    return Episode(question_id, question_id, "pets", "", "easy", "f", outcome, turns, row)


def test_without_sql_the_policys_own_way_is_given_and_the_shortest_that_has_a_query_kept(
    pets: Dataset, pets_pool: DatabasePool
) -> None:
    hidden = replace(pets, questions=tuple(replace(each, gold_sql="") for each in pets.questions))
    starts = GuidedStarts(hidden, pets_pool, AnswerMode.VALUE)
    long = ("DESCRIBE owners", "DESCRIBE pets", "QUERY SELECT 2", "ANSWER 2")
    short = ("DESCRIBE pets", "QUERY SELECT 2", "ANSWER 2")
    assert starts.of(0)("cats") == ()
    episodes = [
        played("cats", "ANSWER 2"),
        played("cats", *long),
        played("oldest", "QUERY SELECT 1", "ANSWER 1", outcome=Outcome.WRONG),
    ]
    starts.observe(0, [], [starts.ways(episodes), starts.ways([played("cats", *short)])])
    starts.observe(1, [], [starts.ways([played("cats", *long)])])
    assert starts.of(2)("cats") == actions(*short[:1])
    assert starts.of(2)("oldest") == ()
    assert GuidedStarts(pets, pets_pool, AnswerMode.VALUE).ways(episodes) == {}, "the oracle knows the way there"
