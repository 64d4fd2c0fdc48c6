"""A policy is asked: what is shown of its turns, its answer, and what that rests on."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset, Row
from env_server.errors import DataError
from env_server.judging.answers import format_answer
from env_server.types import AnswerMode
from tests.trainer.cli.conftest import Reciting
from trainer.cli.session import PolicySession, Ran, Reply, Support, basis_of, support_of
from trainer.policy import PlaySettings
from trainer.rollout.episodes import Outcome, Turn

QUERY = "SELECT name FROM pets WHERE species = 'cat'"


def ask(policy: PolicySession, question: str = "Which cats are there?") -> tuple[Reply, list[Turn]]:
    async def play() -> tuple[Reply, list[Turn]]:
        turns: list[Turn] = []
        try:
            return await policy.ask(question, None, turns.append), turns
        finally:
            await policy.aclose()

    return asyncio.run(play())


def test_an_answer_and_the_query_it_rests_on(reciting: Reciting) -> None:
    said = ("DESCRIBE pets", f"QUERY {QUERY}", "QUERY SELECT wings FROM pets", "ANSWER Kit, Tom")
    reply, turns = ask(reciting(*said))
    assert [f"{turn.action_type} {turn.argument}" for turn in turns] == list(said)
    assert turns == list(reply.episode.turns), "each was shown as it was taken"
    assert (reply.answer, reply.query, reply.basis) == ("Kit, Tom", QUERY, "which this query returned:")
    assert reply.episode.outcome is Outcome.UNJUDGED
    assert reply.episode.question == "Which cats are there?"
    assert sum(turn.reward.progress + turn.reward.terminal for turn in turns) == 0.0


def test_an_answer_that_no_query_returned_is_told(reciting: Reciting) -> None:
    reply, _ = ask(reciting(f"QUERY {QUERY}", "ANSWER Rex"))
    assert (reply.answer, reply.query, reply.basis) == (
        *("Rex", QUERY),
        "which none of its queries returned; the last one was:",
    )
    reply, _ = ask(reciting("QUERY SELECT wings FROM pets", "ANSWER Rex"))
    assert (reply.answer, reply.query, reply.basis) == ("Rex", "", "which rests on no query that succeeded")


def test_an_answer_that_is_a_query_shows_what_it_returns(reciting: Reciting) -> None:
    play = PlaySettings(answer_mode=AnswerMode.SQL)
    reply, _ = ask(reciting(f"ANSWER {QUERY};", play=play))
    assert (reply.query, reply.rows, reply.basis) == (QUERY, "name\nTom\nKit", "")
    reply, _ = ask(reciting("ANSWER SELECT wings FROM pets", play=play))
    assert reply.rows == "not found: no such column: wings"


def test_of_several_samples_the_answer_that_most_give_is_the_reply(reciting: Reciting) -> None:
    answers = iter(["ANSWER Rex", "ANSWER Tom, Kit", "or so", "ANSWER Rex, Max", "ANSWER kit,  tom"])
    play = PlaySettings(step_budget=2)
    reply, turns = ask(reciting(f"QUERY {QUERY}", answers, play=play, samples=5))
    assert (reply.answer, reply.agreed, reply.samples) == ("Tom, Kit", 2, 5)
    assert reply.basis == "which this query returned:"
    assert turns == list(reply.episode.turns), "those of one sample are shown"


def test_queries_agree_that_return_the_same_rows(reciting: Reciting) -> None:
    same = ("SELECT name FROM pets WHERE species LIKE 'CAT' ORDER BY name DESC", "SELECT owner_id FROM pets", QUERY)
    play = PlaySettings(answer_mode=AnswerMode.SQL)
    reply, _ = ask(reciting((f"ANSWER {sql}" for sql in same), play=play, samples=3))
    assert (reply.query, reply.agreed, reply.samples) == (same[0], 2, 3)


def test_samples_that_all_fail_to_answer_are_no_answer(reciting: Reciting) -> None:
    reply, _ = ask(reciting("DESCRIBE pets", play=PlaySettings(step_budget=1), samples=3))
    assert (reply.answer, reply.agreed, reply.episode.outcome) == ("", 0, Outcome.OUT_OF_BUDGET)


def test_the_limits_of_the_policy_decide(reciting: Reciting) -> None:
    reply, turns = ask(reciting(*["SAMPLE pets"] * 3, play=PlaySettings(step_budget=3)))
    assert (reply.answer, reply.query, len(turns)) == ("", "", 3)
    assert reply.episode.outcome is Outcome.OUT_OF_BUDGET


def test_questions_of_the_data_set_are_judged(reciting: Reciting) -> None:
    policy = reciting("ANSWER 2")

    async def play() -> list[Outcome]:
        known = [(await policy.ask_known(question_id, lambda _: None)) for question_id in ("cats", "oldest")]
        own = await policy.ask("How many cats?", "pets", lambda _: None)
        await policy.aclose()
        return [reply.episode.outcome for reply in (*known, own)]

    assert asyncio.run(play()) == [Outcome.CORRECT, Outcome.WRONG, Outcome.UNJUDGED]


def test_which_database_is_meant_must_be_clear(reciting: Reciting, pets: Dataset) -> None:
    two = Dataset("two", (), {"pets": pets.databases["pets"], "more": pets.databases["pets"]})
    with pytest.raises(DataError, match="there are 2 databases; say which one"):
        ask(reciting("ANSWER 2", dataset=two))


NAMES = (("Max", 7), ("Tom", 5))


@pytest.mark.parametrize(
    ("answer", "rows", "support"),
    [
        ("5", ((5,),), Support.ROWS),
        ("Max, Tom", NAMES, Support.ROWS),
        ("tom, max", NAMES, Support.ROWS),
        ("Max | 7\nTom | 5", NAMES, Support.ROWS),
        ("7 | Max\n5 | Tom", NAMES, Support.ROWS),
        ("Max", NAMES, Support.CELLS),
        ("7, Tom", NAMES, Support.CELLS),
        ("180", ((180.0,), (40.0,)), Support.CELLS),
        ("Rex", NAMES, Support.NONE),
        ("Max, Rex", NAMES, Support.NONE),
        ("6", ((5,),), Support.NONE),
        ("[]", (), Support.ROWS),
        ("0", (), Support.NONE),
        ("NULL", ((None,),), Support.ROWS),
    ],
)
def test_how_a_query_supports_an_answer(answer: str, rows: tuple[Row, ...], support: Support) -> None:
    assert support_of(answer, Ran("SELECT", rows)) is support


def test_rows_of_which_there_are_more_are_not_the_answer() -> None:
    assert support_of("Max, Tom", Ran("SELECT", NAMES, complete=False)) is Support.CELLS


def test_the_best_query_is_named_and_of_several_the_latest() -> None:
    other, first, last = Ran("other", ((9,),)), Ran("first", ((5,),)), Ran("last", ((5,),))
    assert basis_of("5", [first, last, other]) == (Support.ROWS, "last")
    assert basis_of("5", [first, other]) == (Support.ROWS, "first")
    assert basis_of("7", [first, other]) == (Support.NONE, "other")
    assert basis_of("5", []) == (Support.NO_QUERY, "")


CELLS = st.one_of(st.none(), st.integers(-100, 100), st.floats(-1e6, 1e6), st.text("ab, |'\"", max_size=6))


@given(st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), max_size=5)))
def test_the_rows_as_they_are_written_rest_on_their_query(rows: list[Row]) -> None:
    assert support_of(format_answer(rows), Ran("SELECT", tuple(rows))) is Support.ROWS
