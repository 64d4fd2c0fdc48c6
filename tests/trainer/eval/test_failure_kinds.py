"""Why episodes failed: every kind from a really played episode, and one kind for whatever a record may hold."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings, JudgingSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode, RewardComponents
from policies.tiny.stumbling import StumblingPlayer
from tests.trainer.recited import recite
from tests.trainer.records import make_record
from trainer.eval.failure_kinds import FailureKind, count_failures, failure_kind, queries_of, saw_right_rows
from trainer.rollout.episodes import Outcome, record
from trainer.rollout.players import OraclePlayer, RandomPlayer, play

PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
GOLD = "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'"


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        ([GOLD, "ANSWER 2"], None),
        (["ANSWER 2"], None),
        (["I think that it is 7.", "Let me see.", "ANSWER 7"], "unparseable"),
        (["SELECT COUNT(*) FROM pets", "ANSWER 7"], "wrong_query"),
        (["QUERY SELECT a FROM pets", "QUERY SELECT kind FROM pets", "ANSWER 7"], "no_such_column"),
        (["QUERY SELECT kind FROM pets", "QUERY SELECT * FROM cats", "ANSWER []"], "no_such_table"),
        (["QUERY SELECT FROM pets", "ANSWER 7"], "syntax_error"),
        (["QUERY DROP TABLE pets", "ANSWER 7"], "other_error"),
        ([GOLD, "ANSWER cats"], "right_rows"),
        (["QUERY SELECT COUNT(*) FROM pets", GOLD, "QUERY SELECT 1", "ANSWER 1"], "right_rows"),
        (["ANSWER 7"], "gave_up"),
        (["DESCRIBE pets", "ANSWER 7"], "gave_up"),
        (["SAMPLE cats", "ANSWER 7"], "gave_up"),
        (["SAMPLE pets", "ANSWER unknown"], "gave_up"),
        (["QUERY SELECT COUNT(*) FROM pets", "ANSWER None"], "gave_up"),
        (["SAMPLE pets", "ANSWER 7"], "never_queried"),
        (["QUERY SELECT kind FROM pets", "QUERY SELECT 1", "ANSWER 1"], "wrong_query"),
        (["QUERY SELECT name FROM pets WHERE species = 'Cat'", "ANSWER []"], "wrong_query"),
        (["QUERY SELECT MAX(age) FROM pets WHERE species = 'Cat'", "ANSWER NULL"], "wrong_query"),
        (["DESCRIBE pets", "DESCRIBE pets", "DESCRIBE pets", GOLD], "out_of_steps"),
        (["DESCRIBE cats", "DESCRIBE cats", "DESCRIBE cats", "DESCRIBE cats"], "never_queried"),
        (["QUERY SELECT kind FROM pets", *["DESCRIBE pets"] * 3], "no_such_column"),
        (["DESCRIBE pets", "Well ...", "So ...", "Hm ..."], "unparseable"),
        (["DESCRIBE pets"], "out_of_tokens"),
    ],
)
def test_each_kind(pets: Dataset, pets_pool: DatabasePool, texts: list[str], kind: str | None) -> None:
    environment = SQLEnvironment(pets, pets_pool, EnvSettings(step_budget=4))
    assert failure_kind(recite(environment, pets.question("cats"), texts)) == kind


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["DESCRIBE pets", "ANSWER SELECT COUNT(*) FROM pets"], "never_queried"),
        (["ANSWER ```sql\nSELECT 1\n```"], "never_queried"),
        (["ANSWER 7"], "gave_up"),
        ([GOLD, "ANSWER SELECT COUNT(*) FROM pets"], "right_rows"),
        (["QUERY SELECT 1", "ANSWER SELECT 1"], "wrong_query"),
    ],
)
def test_answers_that_are_queries(pets: Dataset, pets_pool: DatabasePool, texts: list[str], kind: str) -> None:
    settings = EnvSettings(judging=JudgingSettings(variants=False))
    environment = SQLEnvironment(pets, pets_pool, settings, AnswerMode.SQL)
    assert failure_kind(recite(environment, pets.question("cats"), texts)) == kind


def test_right_rows_are_the_golds_in_any_order_and_of_no_other_number(
    environment: SQLEnvironment, pets: Dataset
) -> None:
    question = pets.question("oslo")
    for sql, right in (
        (question.gold_sql, True),
        (question.gold_sql + " ORDER BY T1.name", True),
        ("SELECT name FROM pets", False),
        (question.gold_sql + " LIMIT 2", False),
    ):
        played = recite(environment, question, [f"QUERY {sql}", "ANSWER Tom"])
        assert saw_right_rows(played) is right
        assert failure_kind(played) == ("right_rows" if right else "wrong_query")


def test_what_players_play_has_a_kind_where_it_is_not_right(environment: SQLEnvironment, pets: Dataset) -> None:
    played = [
        record(play(environment, question, player)[0])
        for question in pets.questions
        for seed in range(15)
        for player in (
            RandomPlayer(seed),
            StumblingPlayer(question, random.Random(seed)),
            OraclePlayer(question),
        )
    ]
    kinds = [failure_kind(one) for one in played]
    assert [kind is None for kind in kinds] == [one.outcome == "correct" for one in played]
    counts = count_failures(played)
    assert sum(counts.values()) == sum(kind is not None for kind in kinds)
    assert list(counts) == sorted(counts, key=list(FailureKind).index)
    # Who peeks never queries, who misreads has seen the rows, and damaged queries are wrong ones.
    assert {FailureKind.NEVER_QUERIED, FailureKind.RIGHT_ROWS, FailureKind.WRONG_QUERY} <= counts.keys()


def test_a_failure_of_the_infrastructure_is_none_of_the_policy() -> None:
    assert failure_kind(make_record("q", "failed")) is None
    assert count_failures([make_record("q", "failed"), make_record("q", "correct")]) == {}


def test_a_prompt_that_left_no_room_is_out_of_tokens() -> None:
    assert failure_kind(make_record("q", "out_of_tokens", steps=0, parse_rate=0.0)) is FailureKind.OUT_OF_TOKENS


TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["SELECT 1", "[]", "no such column: x", "not found: no such table: t", "no rows", "a\nNULL"]),
)
TURNS = st.fixed_dictionaries(
    {
        "text": TEXTS,
        "action_type": st.sampled_from(["DESCRIBE", "SAMPLE", "QUERY", "ANSWER", "query ", "LOOK", ""]),
        "argument": TEXTS,
        "parseable": st.booleans(),
        "result": TEXTS,
        "error": st.one_of(st.just(""), TEXTS),
        "reward": st.floats(0, 0.15).map(lambda p: RewardComponents(progress=p).model_dump()),
    }
)
OUTCOMES = st.one_of(st.sampled_from([o.value for o in Outcome]), st.text(max_size=5))


@given(st.lists(TURNS, max_size=6), OUTCOMES)
def test_every_record_has_one_kind_or_succeeded_or_was_lost(turns: list[dict[str, object]], outcome: str) -> None:
    parsed = sum(bool(turn["parseable"]) for turn in turns)
    one = make_record(
        "q", outcome, turns=turns, steps=len(turns), parse_rate=parsed / len(turns) if turns else 0.0, failure=""
    )
    kind = failure_kind(one)
    assert (kind is None) is (outcome in ("correct", "unjudged", "failed"))
    assert kind == failure_kind(replace(one)), "the same record, the same kind"
    assert kind is None or kind.meaning
    assert all(turn in turns for turn in queries_of(one))


def test_every_kind_has_its_words_and_the_page_has_them_in_order() -> None:
    assert len({kind.meaning for kind in FailureKind}) == len(FailureKind)
    page = PAGE.read_text(encoding="utf-8").partition("## Why episodes failed")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(FailureKind)
