"""The players that are not models: what the oracle and the random player do, and how an episode is recorded."""

from __future__ import annotations

import pytest

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode
from trainer.rollout.players import OraclePlayer, RandomPlayer, mentioned_tables, play


@pytest.mark.parametrize("mode", list(AnswerMode))
def test_the_oracle_is_right_on_every_question(pets: Dataset, mode: AnswerMode) -> None:
    pool = DatabasePool(pets.databases, EnvSettings().sandbox)
    environment = SQLEnvironment(pets, pool, answer_mode=mode)
    for question in pets.questions:
        episode, conversation = play(environment, question, OraclePlayer(question, mode))
        assert episode.correct, question
        assert len(conversation.turns) == len(episode.turns)
        assert conversation.opening.startswith("Question: ")
        assert [reply == "" for _, reply in conversation.turns] == [False] * (len(episode.turns) - 1) + [True]
    pool.close()


def test_the_oracle_describes_what_its_query_needs(environment: SQLEnvironment, pets: Dataset) -> None:
    episode, _ = play(environment, pets.question("oslo"), OraclePlayer(pets.question("oslo")))
    assert [turn.text.split()[:2] for turn in episode.turns[:2]] == [["DESCRIBE", "pets"], ["DESCRIBE", "owners"]]


def test_the_random_player_ends_every_episode_and_is_reproducible(environment: SQLEnvironment, pets: Dataset) -> None:
    question = pets.question("species")
    games = [play(environment, question, RandomPlayer(seed))[0] for seed in range(30)]
    assert {game.outcome.value for game in games} <= {"correct", "wrong", "out_of_budget"}
    assert all(not turn.error for game in games for turn in game.turns), "it takes valid actions only"
    assert [g.turns for g in games] == [play(environment, question, RandomPlayer(seed))[0].turns for seed in range(30)]
    assert len({game.turns for game in games}) > 20


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT * FROM pets", ["pets"]),
        ("SELECT * FROM Owners JOIN PETS", ["owners", "pets"]),
        ("SELECT 'owners' FROM pets", ["pets"]),
        ('SELECT * FROM "order list"', ["order list"]),
        ("SELECT 1", ["owners", "pets", "order list"]),
        ("SELECT 'it''s owners', pets.x FROM pets", ["pets"]),
    ],
)
def test_mentioned_tables(sql: str, tables: list[str]) -> None:
    assert mentioned_tables(sql, ["owners", "pets", "order list"]) == tables
