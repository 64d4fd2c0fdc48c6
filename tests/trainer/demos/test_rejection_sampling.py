"""Rejection sampling: what was right is played again; nothing else, and no evaluation question, is learned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import trainer.demos.rejection_sampling
from env_server.cache import CACHE_VARIABLE
from env_server.dataset import Dataset, Hardness
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.types import AnswerMode, SQLAction
from trainer.chat.format import Conversation
from trainer.config import ConfigError
from trainer.demos.rejection_sampling import ReplayPlayer, choose, missteps, sample_by_rejection
from trainer.eval.run_files import RunFolderError
from trainer.rollout.episodes import EpisodeRecord, record
from trainer.rollout.players import play
from trainer.training.questions import QuestionFilter

CATS = "SELECT COUNT(*) FROM pets WHERE species = 'cat'"
LUCKY = "SELECT COUNT(*) FROM pets WHERE species = 'dog'"
Moves = Sequence[tuple[str, str]]


def actions(moves: Moves) -> tuple[SQLAction, ...]:
    return tuple(SQLAction(action_type=kind, argument=argument) for kind, argument in moves)


def played(environment: SQLEnvironment, pets: Dataset, question_id: str, *moves: tuple[str, str]) -> EpisodeRecord:
    episode, _ = play(environment, pets.question(question_id), ReplayPlayer(actions(moves)))
    return record(episode)


@pytest.fixture
def setting(pets: Dataset, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trainer.demos.rejection_sampling, "load_dataset", lambda _, **__: pets)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def written(folder: Path, records: Sequence[EpisodeRecord], **extra: int) -> list[str]:
    file = folder / "episodes.jsonl"
    file.write_text("".join(json.dumps(extra | asdict(each)) + "\n" for each in records))
    return [str(file)]


@pytest.mark.usefixtures("setting")
def test_what_was_right_is_learned_and_nothing_else(environment: SQLEnvironment, pets: Dataset, tmp_path: Path) -> None:
    asked = [("DESCRIBE", "pets"), ("QUERY", CATS), ("ANSWER", "2")]
    records = [
        played(environment, pets, "cats", ("QUERY", "SELECT nothing"), ("QUERY", CATS), ("ANSWER", "2")),
        played(environment, pets, "cats", *asked),
        played(environment, pets, "cats", ("describe", " PETS"), ("QUERY", f"{CATS};"), ("ANSWER", "2")),
        played(environment, pets, "cats", ("ANSWER", "2")),
        played(environment, pets, "cats", ("QUERY", LUCKY), ("ANSWER", "2")),
        played(environment, pets, "cats", ("QUERY", CATS), ("ANSWER", "3")),
        played(environment, pets, "species", ("QUERY", pets.question("species").gold_sql), ("ANSWER", "cat | 2")),
        replace(played(environment, pets, "cats", ("SAMPLE", "pets"), *asked), given_steps=2),
    ]
    replayed = sample_by_rejection(written(tmp_path, records, step=3), ["pets"], AnswerMode.VALUE, EnvSettings(), 4)
    assert [[action.argument for action, _ in c.turns] for c in replayed.conversations] == [
        ["pets", CATS, "2"],
        ["SELECT nothing", CATS, "2"],
    ]
    assert [sorted(c.masked_turns) for c in replayed.conversations] == [[], [0]]
    assert [question.question_id for question in replayed.questions] == ["cats"]
    assert replayed.rejected == {
        "played the same way before": 1,
        "right without a right query": 2,
        "not right": 1,
        "guided": 1,
        "of no training question": 1,
    }
    assert str(replayed).startswith("2 episodes of 1 questions are replayed (easy 1, ")

    best = sample_by_rejection(written(tmp_path, records), ["pets"], AnswerMode.VALUE, EnvSettings(), 1)
    assert [len(c.turns) for c in best.conversations] == [3]
    assert best.conversations[0] == replayed.conversations[0]
    assert best.rejected["more than enough of their question"] > 0


@pytest.mark.usefixtures("setting")
def test_a_query_that_is_right_by_luck_is_refused_where_queries_are_submitted(
    environment: SQLEnvironment, pets: Dataset, tmp_path: Path
) -> None:
    """What the file says of it counts for nothing: it is judged anew, on variants."""
    won = played(environment, pets, "cats", ("QUERY", CATS), ("ANSWER", "2"))
    right, lucky = (asdict(won) | {"turns": [t | {"argument": sql} for t in won.turns]} for sql in (CATS, LUCKY))
    records = [EpisodeRecord(**each) for each in (right, lucky)]
    replayed = sample_by_rejection(written(tmp_path, records), ["pets"], AnswerMode.SQL, EnvSettings(), 4)
    assert [c.turns[-1][0].argument for c in replayed.conversations] == [CATS]
    assert replayed.rejected == {"not right when replayed": 1}
    with pytest.raises(ConfigError, match="nothing to learn from 1 episodes"):
        sample_by_rejection(written(tmp_path, records[1:]), ["pets"], AnswerMode.SQL, EnvSettings(), 4)


def test_a_question_is_known_by_its_words_too(environment: SQLEnvironment, pets: Dataset) -> None:
    """Ids alone are not unique over data sets, nor are they over versions of one."""
    found = played(environment, pets, "cats", ("QUERY", CATS), ("ANSWER", "2"))
    rejected: Counter[str] = Counter()
    other = EpisodeRecord(**asdict(found) | {"question": "How many dogs are there?"})
    first, second = choose([found, other], [pets, pets], rejected)
    assert [question.question_id for question in first] == ["cats"]
    assert not second
    assert rejected == {"of no training question": 1}
    assert not any(choose([found], [pets], rejected, QuestionFilter((Hardness.EXTRA,))))
    assert rejected["of another difficulty or part of the data"] == 1


def test_repeats_and_errors_are_missteps(environment: SQLEnvironment, pets: Dataset) -> None:
    moves = [("DESCRIBE", "pets"), ("DESCRIBE", "Pets"), ("SAMPLE", "cats"), ("QUERY", CATS), ("ANSWER", "2")]
    episode, conversation = play(environment, pets.question("cats"), ReplayPlayer(actions(moves)))
    assert missteps(episode) == {1, 2}
    assert conversation == Conversation(conversation.opening, conversation.turns)


def test_an_episode_that_does_not_end_is_not_right(environment: SQLEnvironment, pets: Dataset) -> None:
    episode, _ = play(environment, pets.question("cats"), ReplayPlayer(actions([("QUERY", CATS)])))
    assert not episode.correct
    assert len(episode.turns) == 15


@pytest.mark.usefixtures("setting")
def test_a_file_that_is_not_there_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no file"):
        sample_by_rejection([str(tmp_path / "none.jsonl")], ["pets"], AnswerMode.VALUE, EnvSettings(), 4)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="line 1"):
        sample_by_rejection([str(tmp_path / "bad.jsonl")], ["pets"], AnswerMode.VALUE, EnvSettings(), 4)
