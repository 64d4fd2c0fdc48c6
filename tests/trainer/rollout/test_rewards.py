"""Reward functions: what they pay, what an episode without a right answer can collect, and a user's own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.dataset import Dataset, Gold
from env_server.reward import EpisodeRewards
from env_server.settings import RewardSettings
from env_server.types import AnswerMode, RewardComponents
from trainer.config import ConfigError
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import (
    REWARD_FUNCTIONS,
    REWARDS,
    Reward,
    RewardError,
    bound_without_answer,
    reward_hacking_advice,
    rewards_of,
    total_reward,
    try_rewards,
    weights_of,
)

ALL = tuple(REWARDS.values())


def turn(operational: float, progress: float = 0.0, parseable: bool = True) -> Turn:
    reward = RewardComponents(operational=operational, progress=progress, total=operational + progress)
    return Turn("QUERY SELECT 1", "QUERY", "SELECT 1", parseable, "1", "", reward)


def episode(outcome: Outcome, *turns: Turn, gold_sql: str = "") -> Episode:
    row = TokenRow([1], [2], [0.0], [1], [0])
    return Episode("e", "q", "db", "?", "easy", "f", outcome, turns, row, gold_sql=gold_sql)


EPISODES = [
    episode(Outcome.CORRECT, turn(0.01, 0.15), turn(-0.02)),
    episode(Outcome.FAILED),
    episode(Outcome.WRONG, turn(0.01, 0.075), turn(-0.05, parseable=False)),
    episode(Outcome.OUT_OF_BUDGET, turn(-0.02)),
]


def test_one_value_per_row_in_order_with_none_for_a_failed_episode() -> None:
    paid = {reward.name: reward(episode=EPISODES, prompts=["x"] * 4, completions=["ANSWER 42"] * 4) for reward in ALL}
    assert paid["correctness"] == [1.0, None, 0.0, 0.0]
    assert paid["progress"] == [pytest.approx(1.0), None, pytest.approx(0.5), 0.0]
    assert paid["operational"] == [pytest.approx(-0.01), None, pytest.approx(-0.04), pytest.approx(-0.02)]
    assert paid["format"] == [1.0, None, 0.5, 1.0]


def test_progress_is_measured_in_the_settings_that_the_episode_was_rewarded_by() -> None:
    played = episode(Outcome.WRONG, turn(0.0, 0.3))
    assert REWARDS["progress"].of(played) == 2.0
    assert REWARDS["progress"].of(replace(played, reward_settings=RewardSettings(progress_scale=0.3))) == 1.0


def test_weights_that_are_not_given_are_the_defaults_of_the_table() -> None:
    rewards = (*REWARD_FUNCTIONS, Reward("brevity", lambda played: 1.0 / len(played.turns)))
    assert weights_of(REWARD_FUNCTIONS, None) == [1.0, 0.2, 0.2, 0.1]
    assert weights_of(rewards, [1.0, 0.0, 0.0, 0.0]) == [1.0, 0.0, 0.0, 0.0, 0.1]
    assert weights_of(rewards, [1.0, 0.2, 0.2, 0.1, 0.3]) == [1.0, 0.2, 0.2, 0.1, 0.3]
    for count in (3, 6):
        with pytest.raises(ConfigError, match=r"takes 4 to 5 numbers \(correctness, .*, brevity\)"):
            weights_of(rewards, [1.0] * count)


MOVES = st.builds(
    lambda kind, argument, ok, rows: (kind, argument, ok, rows if kind == "QUERY" and ok else None),
    st.sampled_from(["QUERY", "QUERY", "DESCRIBE", "SAMPLE", "DROP"]),
    st.just("t") | st.text(max_size=3),
    st.booleans(),
    st.sampled_from([(("a", 1),), (("a", 1), ("b", 2)), ()]),
)
WEIGHTS = st.tuples(*[st.floats(-2, 2)] * 4)


@settings(max_examples=50)
@given(st.lists(MOVES, min_size=1, max_size=15), st.booleans(), st.booleans(), WEIGHTS)
def test_no_episode_without_a_right_answer_collects_more_than_the_bound(
    moves: list[tuple[str, str, bool, Any]], answers: bool, parseable: bool, weights: tuple[float, ...]
) -> None:
    settings = RewardSettings()
    rewards = EpisodeRewards(Gold(rows=(("a", 1), ("b", 2)), ordered=False), settings)
    turns = []
    for kind, argument, ok, rows in moves[: 14 if answers else 15]:
        step = rewards.explore(kind, argument, ok=ok, rows=rows, row_count=None if rows is None else len(rows))
        turns.append(Turn("", kind, argument, parseable, "", "" if ok else "error", step))
    if answers:
        turns.append(Turn("", "ANSWER", "wrong", parseable, "", "", rewards.answer("wrong", correct=False)))
    total = total_reward(episode(Outcome.WRONG, *turns), ALL, weights)
    assert total <= bound_without_answer(ALL, weights, settings, 15) + 1e-9


def test_the_bound_is_reached_and_under_the_default_weights_a_third_of_a_right_answer() -> None:
    settings = RewardSettings()
    rewards = EpisodeRewards(Gold(rows=(("a", 1),), ordered=False), settings)
    steps = [rewards.explore("QUERY", f"SELECT {i}", ok=True, rows=(("a", 1),), row_count=1) for i in range(15)]
    weights = (1.0, 0.2, 0.2, 0.1)
    collected = 0.2 * sum(step.progress for step in steps) / settings.progress_scale
    collected += 0.2 * sum(step.operational for step in steps) + 0.1
    assert (
        bound_without_answer(REWARD_FUNCTIONS, weights, settings, 15) == pytest.approx(collected) == pytest.approx(0.33)
    )
    assert bound_without_answer(REWARD_FUNCTIONS, (1.0, 0.0, -1.0, 0.0), settings, 15) == pytest.approx(0.75)
    assert bound_without_answer(REWARD_FUNCTIONS, (1.0, -1.0, 0.0, -1.0), settings, 15) == 0.0


def written(folder: Path, code: str) -> str:
    (folder / "my.py").write_text(code, encoding="utf-8")
    return str(folder / "my.py")


def test_a_function_of_ones_own_is_called_once_for_each_episode(tmp_path: Path) -> None:
    mine = written(
        tmp_path, "calls = []\ndef brevity(episode):\n    calls.append(episode)\n    return len(episode.turns)"
    )
    (*shipped, own) = rewards_of([f"{mine}:brevity"])
    assert tuple(shipped) == REWARD_FUNCTIONS
    assert (own.name, own.__name__, weights_of((own,), None)) == ("brevity", "reward_brevity", [0.1])
    played = episode(Outcome.WRONG, turn(0.0), turn(0.0))
    assert (own(episode=[played]), own.of(played), own.of_turns(played)) == ([2.0], 2.0, [0.0, 2.0])
    assert sys.modules[own.function.__module__].calls == [played]


@pytest.mark.parametrize(
    ("code", "spec", "fix"),
    [
        ("", "brevity", "as FILE.py:FUNCTION; every run has correctness, "),
        ("", "yours.py:brevity", r"there is no file /.*yours.py; did you mean my.py\?"),
        ("def brevty(episode): ...", "my.py:brevity", "my.py has no function brevity; did you mean brevty"),
        ("brevity = 3", "my.py:brevity", "my.py has no function brevity"),
        ("def brevity(): ...", "my.py:brevity", r"write it as `def brevity\(episode\):`"),
        ("def brevity(a, b): ...", "my.py:brevity", r"write it as `def brevity\(episode\):`"),
        ("\ndef brevity(episode) 1", "my.py:brevity", r"my.py: it cannot be imported: SyntaxError: .*line 2\)"),
        ("import nowhere_to_be_found", "my.py:brevity", r"cannot be imported: ModuleNotFoundError: .*line 1\)"),
        ("def format(episode): ...", "my.py:format", "has a reward format already; rename one"),
    ],
)
def test_what_cannot_be_called_is_refused_with_the_fix(
    code: str, spec: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, code)
    with pytest.raises(ConfigError, match=fix):
        rewards_of([spec])


@pytest.mark.parametrize(
    ("returned", "fix"),
    [
        ("'long'", "returned 'long' .* return a number, a list with one number per turn, or None"),
        ("[1.0]", r"returned \[1.0\] .* of 2 turns; return a number, a list with one number per turn"),
        ("[None] * len(episode.turns)", "one number per turn"),
        ("float('nan')", "returned nan .* return finite numbers"),
        ("[float('inf')] * len(episode.turns)", "return finite numbers"),
        ("episode.turns[9]", r"IndexError: .* \(my.py, line 2\), on episode e; make the function take every episode"),
    ],
)
def test_what_is_no_reward_ends_the_run_with_the_fix(returned: str, fix: str, tmp_path: Path) -> None:
    mine = written(tmp_path, f"def brevity(episode):\n    return {returned}")
    *_, own = rewards_of([f"{mine}:brevity"])
    with pytest.raises(RewardError, match=rf"--reward_functions {mine}:brevity.*{fix}"):
        own(episode=[episode(Outcome.WRONG, turn(0.0), turn(0.0))])
    assert own(episode=[episode(Outcome.FAILED)]) == [None], "it never sees a failed episode"


def test_a_coroutine_is_no_reward() -> None:
    async def judged(_: Episode) -> float:
        return 1.0

    own = Reward("judged", judged)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="a coroutine"):
        own.of(episode(Outcome.WRONG, turn(0.0)))


def test_ones_own_are_tried_on_episodes_that_look_like_a_policys(pets: Dataset) -> None:
    seen: list[Episode] = []

    def tokens(episode: Episode) -> float:
        seen.append(episode)
        return 1 / sum(turn.tokens or 0 for turn in episode.turns) + 1 / len(episode.row.logprobs)

    def only_right(episode: Episode) -> float:
        return 1.0 if episode.correct else float("nan")

    try_rewards((*REWARD_FUNCTIONS, Reward("tokens", tokens, source="my.py:tokens")), pets, AnswerMode.VALUE)
    assert {each.correct for each in seen} == {True, False}
    with pytest.raises(RewardError, match=r"my\.py:only_right returned nan"):
        try_rewards((Reward("only_right", only_right, source="my.py:only_right"),), pets, AnswerMode.VALUE)


def test_weights_are_judged_by_what_a_wrong_episode_can_collect() -> None:
    def advised(*weights: float, steps: int = 15) -> bool:
        return bool(reward_hacking_advice(REWARD_FUNCTIONS, weights, "sum_then_normalize", steps))

    assert not advised(1.0, 0.2, 0.2, 0.1)
    assert not advised(1.0, 0.5, 0.2, 0.4)
    assert advised(1.0, 0.5, 0.0, 0.5)
    assert advised(0.0, 0.0, 0.0, 0.0)
    assert advised(1.0, 0.0, 10.0, 0.0)
    assert not advised(1.0, 0.0, 10.0, 0.0, steps=5)
    assert not reward_hacking_advice(REWARD_FUNCTIONS, None, "sum_then_normalize", 15)
