"""A policy is asked: what is shown of its turns, its answer, and what that rests on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from env_server.dataset import Dataset
from env_server.errors import DataError
from env_server.types import AnswerMode
from tests.trainer.cli.conftest import Reciting
from trainer.cli.session import Asked, PolicyPlayer, Reply
from trainer.policy import PlaySettings
from trainer.rollout.episodes import Outcome, Turn

QUERY = "SELECT name FROM pets WHERE species = 'cat'"


@asynccontextmanager
async def asked(player: PolicyPlayer, dataset: Dataset) -> AsyncIterator[Asked]:
    found = Asked(player, dataset)
    try:
        yield found
    finally:
        await found.aclose()


def ask(player: PolicyPlayer, dataset: Dataset, question: str = "Which cats are there?") -> tuple[Reply, list[Turn]]:
    async def play() -> tuple[Reply, list[Turn]]:
        turns: list[Turn] = []
        async with asked(player, dataset) as asking:
            return await asking.ask(question, None, turns.append), turns

    return asyncio.run(play())


def test_an_answer_and_the_query_it_rests_on(reciting: Reciting, pets: Dataset) -> None:
    said = ("DESCRIBE pets", f"QUERY {QUERY}", "QUERY SELECT wings FROM pets", "ANSWER Kit, Tom")
    reply, turns = ask(reciting(*said), pets)
    assert [f"{turn.action_type} {turn.argument}" for turn in turns] == list(said)
    assert turns == list(reply.episode.turns), "each was shown as it was taken"
    assert (reply.answer, reply.query, reply.basis) == ("Kit, Tom", QUERY, "which this query returned:")
    assert reply.episode.outcome is Outcome.UNJUDGED
    assert reply.episode.question == "Which cats are there?"
    assert sum(turn.reward.progress + turn.reward.terminal for turn in turns) == 0.0


def test_an_answer_that_no_query_returned_is_told(reciting: Reciting, pets: Dataset) -> None:
    reply, _ = ask(reciting(f"QUERY {QUERY}", "ANSWER Rex"), pets)
    assert (reply.answer, reply.query, reply.basis) == (
        *("Rex", QUERY),
        "which none of its queries returned; the last one was:",
    )
    reply, _ = ask(reciting("QUERY SELECT wings FROM pets", "ANSWER Rex"), pets)
    assert (reply.answer, reply.query, reply.basis) == ("Rex", "", "which rests on no query that succeeded")


def test_an_answer_that_is_a_query_shows_what_it_returns(reciting: Reciting, pets: Dataset) -> None:
    play = PlaySettings(answer_mode=AnswerMode.SQL)
    reply, _ = ask(reciting(f"ANSWER {QUERY};", play=play), pets)
    assert (reply.query, reply.rows, reply.basis) == (QUERY, "name\nTom\nKit", "")
    reply, _ = ask(reciting("ANSWER SELECT wings FROM pets", play=play), pets)
    assert reply.rows == "not found: no such column: wings"


def test_of_several_samples_the_answer_that_most_give_is_the_reply(reciting: Reciting, pets: Dataset) -> None:
    answers = iter(["ANSWER Rex", "ANSWER Tom, Kit", "or so", "ANSWER Rex, Max", "ANSWER kit,  tom"])
    play = PlaySettings(step_budget=2)
    reply, turns = ask(reciting(f"QUERY {QUERY}", answers, play=play, samples=5), pets)
    assert (reply.answer, reply.agreed, reply.samples) == ("Tom, Kit", 2, 5)
    assert reply.basis == "which this query returned:"
    assert turns == list(reply.episode.turns), "those of one sample are shown"


def test_queries_agree_that_return_the_same_rows(reciting: Reciting, pets: Dataset) -> None:
    same = ("SELECT name FROM pets WHERE species LIKE 'CAT' ORDER BY name DESC", "SELECT owner_id FROM pets", QUERY)
    play = PlaySettings(answer_mode=AnswerMode.SQL)
    reply, _ = ask(reciting((f"ANSWER {sql}" for sql in same), play=play, samples=3), pets)
    assert (reply.query, reply.agreed, reply.samples) == (same[0], 2, 3)


def test_samples_that_all_fail_to_answer_are_no_answer(reciting: Reciting, pets: Dataset) -> None:
    reply, _ = ask(reciting("DESCRIBE pets", play=PlaySettings(step_budget=1), samples=3), pets)
    assert (reply.answer, reply.agreed, reply.episode.outcome) == ("", 0, Outcome.OUT_OF_BUDGET)


def test_the_limits_of_the_policy_decide(reciting: Reciting, pets: Dataset) -> None:
    reply, turns = ask(reciting(*["SAMPLE pets"] * 3, play=PlaySettings(step_budget=3)), pets)
    assert (reply.answer, reply.query, len(turns)) == ("", "", 3)
    assert reply.episode.outcome is Outcome.OUT_OF_BUDGET


def test_questions_of_the_data_set_are_judged(reciting: Reciting, pets: Dataset) -> None:
    async def play() -> list[Outcome]:
        async with asked(reciting("ANSWER 2"), pets) as asking:
            known = [(await asking.ask_known(question_id, lambda _: None)) for question_id in ("cats", "oldest")]
            own = await asking.ask("How many cats?", "pets", lambda _: None)
            return [reply.episode.outcome for reply in (*known, own)]

    assert asyncio.run(play()) == [Outcome.CORRECT, Outcome.WRONG, Outcome.UNJUDGED]


def test_which_database_is_meant_must_be_clear(reciting: Reciting, pets: Dataset) -> None:
    two = Dataset("two", (), {"pets": pets.databases["pets"], "more": pets.databases["pets"]})
    with pytest.raises(DataError, match="there are 2 databases; say which one"):
        ask(reciting("ANSWER 2"), two)
