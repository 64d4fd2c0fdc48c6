"""The reward functions read one field each, in order, and pass a failed episode on as None."""

from __future__ import annotations

from dataclasses import replace
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
    ALL_REWARDS,
    all_weights,
    most_without_answer,
    query_parts,
    reward_columns,
    reward_correctness,
    reward_fields,
    reward_format,
    reward_operational,
    reward_progress,
    reward_structure,
)


def turn(operational: float, progress: float = 0.0, parseable: bool = True) -> Turn:
    reward = RewardComponents(operational=operational, progress=progress, total=operational + progress)
    return Turn("QUERY SELECT 1", "QUERY", "SELECT 1", parseable, "1", "", reward)


def episode(outcome: Outcome, *turns: Turn, gold_sql: str = "") -> Episode:
    row = TokenRow([1], [2], [0.0], [1], [0])
    return Episode("e", "q", "db", "?", "easy", "f", outcome, turns, row, gold_sql=gold_sql)


def asked(*queries: str, gold_sql: str, error: str = "") -> float | None:
    """What `structure` pays for an episode of these queries, which all ran or all failed."""
    turns = [replace(turn(0.0), argument=sql, error=error) for sql in queries]
    (paid,) = reward_structure(**reward_fields([episode(Outcome.WRONG, *turns, gold_sql=gold_sql)], RewardSettings()))
    return paid


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
    assert reward_structure(**fields) == [None] * 4, "there is no gold SQL"
    assert len(ALL_REWARDS) == 5, "TRL leaves a row out where all of them are None"


def test_weights_that_are_left_out_are_those_of_the_rewards_that_not_every_run_has() -> None:
    assert all_weights(None) == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert all_weights([1.0, 0.2, 0.2, 0.1]) == [1.0, 0.2, 0.2, 0.1, 0.0]
    assert all_weights([1.0, 0.2, 0.2, 0.1, 0.3]) == [1.0, 0.2, 0.2, 0.1, 0.3]


GOLD = 'SELECT T1.Name, COUNT(*) AS n FROM Singer AS T1 WHERE T1.Country = "France" GROUP BY T1.Name ORDER BY n LIMIT 1'
QUERIES = [
    GOLD,
    "SELECT name FROM singer",
    "SELECT 1",
    "SELECT * FROM concert JOIN singer USING (singer_id)",
    "SELECT name FROM singer WHERE age > (SELECT avg(age) FROM singer) UNION SELECT name FROM band",
    "WITH old AS (SELECT name FROM singer WHERE age > 60) SELECT DISTINCT name FROM old",
]


def test_structure_is_what_a_query_shares_with_the_gold_whatever_its_names_are_called() -> None:
    alike = "select name, count(*) from singer where country = 'Spain' group by name order by count(*) limit 5"
    assert query_parts(alike) == query_parts(GOLD)
    assert asked(alike, gold_sql=GOLD) == 1.0
    # Of `singer`, `name`, `*`, `country`, four clauses and COUNT, the first two.
    assert asked("SELECT name FROM singer", gold_sql=GOLD) == pytest.approx(2 / 9)
    assert asked("SELECT name FROM singer", "SELECT 1", gold_sql=GOLD) == pytest.approx(2 / 9), "the best counts"
    assert asked(GOLD, gold_sql=GOLD, error="too slow: the query needs more than 1 steps") == 0.0
    assert asked(gold_sql=GOLD) == asked("no query", gold_sql=GOLD) == 0.0
    assert asked(GOLD, gold_sql="no query") is None
    assert ("table", "old") not in (query_parts(QUERIES[-1]) or ())


@given(st.lists(st.sampled_from(QUERIES) | st.text(max_size=20), max_size=4), st.sampled_from(QUERIES))
def test_structure_is_a_share_that_more_queries_do_not_lessen_and_the_gold_makes_whole(
    queries: list[str], gold_sql: str
) -> None:
    paid = [asked(*queries[:number], gold_sql=gold_sql) for number in range(len(queries) + 1)]
    shares = [share for share in paid if share is not None]
    assert len(shares) == len(paid)
    assert shares == sorted(shares)
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert asked(*queries, gold_sql, gold_sql=gold_sql) == pytest.approx(1.0)


def test_rewards_ignore_text() -> None:
    fields = reward_fields(EPISODES, RewardSettings())
    with_text = reward_correctness(prompts=["x"], completions=["ANSWER 42"], completion_ids=[[1]], **fields)
    assert with_text == reward_correctness(**fields)


MOVES = st.builds(
    lambda kind, argument, ok, rows: (kind, argument, ok, rows if kind == "QUERY" and ok else None),
    st.sampled_from(["QUERY", "QUERY", "DESCRIBE", "SAMPLE", "DROP"]),
    st.sampled_from(["t", *QUERIES]) | st.text(max_size=3),
    st.booleans(),
    st.sampled_from([(("a", 1),), (("a", 1), ("b", 2)), ()]),
)
WEIGHTS = st.tuples(*[st.floats(-2, 2)] * 5)


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
    columns = reward_columns([episode(Outcome.WRONG, *turns, gold_sql=GOLD)], settings)
    total = sum(weight * values[0] for weight, values in zip(weights, columns, strict=True))
    assert total <= most_without_answer(weights, settings, 15) + 1e-9


def test_the_bound_is_reached_and_under_the_default_weights_a_third_of_a_right_answer() -> None:
    settings = RewardSettings()
    rewards = EpisodeRewards(Gold(rows=(("a", 1),), ordered=False), settings)
    steps = [rewards.explore("QUERY", f"SELECT {i}", ok=True, rows=(("a", 1),), row_count=1) for i in range(15)]
    weights = (1.0, 0.2, 0.2, 0.1, 0.2)
    collected = 0.2 * sum(step.progress for step in steps) / settings.progress_scale
    collected += 0.2 * sum(step.operational for step in steps) + 0.1
    assert most_without_answer(weights[:4], settings, 15) == pytest.approx(collected) == pytest.approx(0.33)
    structure = asked(*(f"{GOLD} -- {i}" for i in range(15)), gold_sql=GOLD)
    assert structure is not None
    assert most_without_answer(weights, settings, 15) == pytest.approx(collected + 0.2 * structure)
    assert most_without_answer((1.0, 0.0, -1.0, 0.0), settings, 15) == pytest.approx(0.75)
    assert most_without_answer((1.0, -1.0, 0.0, -1.0), settings, 15) == 0.0
