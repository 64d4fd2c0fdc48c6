"""Scripted policies: what the oracle and the random player do, and the worked examples of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import AnswerMode
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.config import ActionFormat
from trainer.rollout.players import Examples, FewShotError, OraclePlayer, RandomPlayer, mentioned_tables, play


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


def test_worked_examples_are_right_and_about_different_databases(
    generated_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLENV_CACHE_DIR", str(generated_cache))
    dataset = load_dataset("synthetic")
    examples = Examples.play(dataset, 3, AnswerMode.VALUE, 15)
    assert len({conversation.opening.splitlines()[1] for conversation in examples.conversations}) == 3
    for conversation in examples.conversations:
        *_, (query, _), (answer, reply) = conversation.turns
        assert (query.action_type, answer.action_type, reply) == ("QUERY", "ANSWER", "")
    questions = dataset.select(Split.TRAIN)
    left = examples.without(questions)
    assert len(left) == len(questions) - 3
    again = Examples.play(dataset, 3, AnswerMode.VALUE, 15)
    assert again.conversations == examples.conversations


def test_no_examples_are_none(pets: Dataset) -> None:
    examples = Examples.play(pets, 0, AnswerMode.VALUE, 15)
    assert examples.without(pets.questions) == list(pets.questions)
    assert examples.conversations == []


def test_more_examples_than_there_are_is_an_error(pets: Dataset) -> None:
    with pytest.raises(FewShotError, match=r"--few_shot 9: the training questions of pets give 3 episodes"):
        Examples.play(pets, 9, AnswerMode.VALUE, 15)


@pytest.mark.parametrize("action_format", list(ActionFormat))
def test_worked_examples_are_turns_of_the_same_conversation(action_format: ActionFormat, pets: Dataset) -> None:
    tokenizer = family_tokenizer("qwen2_5")
    settings = ChatSettings(action_format=action_format, custom_system_prompt="Explore.")
    (example, *_) = conversations = Examples.play(pets, 2, AnswerMode.VALUE, 15).conversations
    chat = ChatFormat(tokenizer, settings, conversations)
    prompt = tokenizer.decode(chat.prompt_ids("Question: How many?"))
    start = tokenizer.decode(ChatFormat(tokenizer, settings).prompt_ids(example.opening))
    assert prompt.startswith(start)
    assert prompt.count("Explore.") == 1
    assert prompt.endswith("<|im_end|>\n<|im_start|>user\nQuestion: How many?<|im_end|>\n<|im_start|>assistant\n")
    said = [tokenizer.decode(chat.turn_ids(action)) for action, _ in example.turns]
    assert all(turn in prompt for turn in said)
    assert prompt.count("<|im_start|>assistant") == 1 + sum(len(each.turns) for each in conversations)
