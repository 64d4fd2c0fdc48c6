"""Play to learn from: clean play is right, stumbling play is mostly wrong, and all of it really happened."""

from __future__ import annotations

import random

import pytest

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.factory import EnvironmentFactory
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from trainer.chat.format import Conversation
from trainer.rollout.players import play
from trainer.warmup.demonstrations import StumblingPlayer, demonstrate


def test_clean_play_is_right(environment: SQLEnvironment, pets: Dataset) -> None:
    played = list(demonstrate(environment, pets.questions, good=1.0, seed=0))
    assert len(played) == len(pets.questions)
    assert all(episode.correct for episode, _ in played)


def test_stumbling_play_is_mostly_wrong_but_valid(environment: SQLEnvironment, pets: Dataset) -> None:
    played = [e for seed in range(25) for e, _ in demonstrate(environment, pets.questions, good=0.0, seed=seed)]
    assert len(played) == 100
    assert 0 < sum(episode.correct for episode in played) < 40
    assert all(turn.action_type in ("DESCRIBE", "SAMPLE", "QUERY", "ANSWER") for e in played for turn in e.turns)
    assert all(episode.turns[-1].action_type == "ANSWER" for episode in played)


def test_the_seed_decides_the_play(environment: SQLEnvironment, pets: Dataset) -> None:
    def turns(seed: int) -> list[object]:
        return [c.turns for _, c in demonstrate(environment, pets.questions, good=0.5, seed=seed)]

    assert turns(1) == turns(1)
    assert any(turns(1) != turns(seed) for seed in range(2, 6))


def test_a_guess_comes_from_what_was_seen(environment: SQLEnvironment, pets: Dataset) -> None:
    for seed in range(40):
        episode, _ = play(
            environment, pets.question("cats"), StumblingPlayer(pets.question("cats"), random.Random(seed))
        )
        answer, before = episode.turns[-1].argument, episode.turns[-2]
        assert answer in before.result or answer == "0"


def test_queries_are_submitted_where_queries_are_asked_for(pets: Dataset) -> None:
    settings = EnvSettings(judging=JudgingSettings(variants=False))
    with EnvironmentFactory(pets, settings, AnswerMode.SQL) as factory:
        environment = factory.make()
        clean = [e for e, _ in demonstrate(environment, pets.questions, 1.0, 0, AnswerMode.SQL)]
        assert [e.turns[-1].argument for e in clean] == [q.gold_sql for q in pets.questions]
        assert all(episode.correct for episode in clean)
        stumbling = [
            e for seed in range(10) for e, _ in demonstrate(environment, pets.questions, 0.0, seed, AnswerMode.SQL)
        ]
    assert all(episode.turns[-1].argument.startswith("SELECT ") for episode in stumbling)
    assert sum(episode.correct for episode in stumbling) < 16


def test_a_share_of_the_good_play_explores(environment: SQLEnvironment, pets: Dataset) -> None:
    def conversations(explore: float, seed: int = 0) -> list[Conversation]:
        played = demonstrate(environment, pets.questions, good=1.0, seed=seed, explore=explore)
        return [conversation for _, conversation in played]

    clean = conversations(0.0)
    many = [conversations(1.0, seed) for seed in range(20)]
    assert all(len(played) == len(clean) for played in many), "all of it is right"
    assert conversations(1.0) == many[0]
    assert sum(played != clean for played in many) == 20
    assert any(c.unlearned for played in many for c in played)
    assert not any(c.unlearned for c in clean)
    half = [conversations(0.5, seed) for seed in range(20)]
    assert 20 < sum(a == b for played in half for a, b in zip(played, clean, strict=True)) < 60


def test_a_question_explores_alike_whatever_is_played_beside_it(environment: SQLEnvironment, pets: Dataset) -> None:
    ((_, alone),) = demonstrate(environment, [pets.question("oslo")], good=1.0, seed=3, explore=1.0)
    among = [c for _, c in demonstrate(environment, pets.questions, good=1.0, seed=3, explore=1.0)]
    assert alone in among


@pytest.mark.parametrize(("good", "explore"), [(-0.1, 0.0), (1.1, 0.0), (1.0, -0.1), (1.0, 2.0)])
def test_shares_outside_the_unit_interval_are_refused(environment: SQLEnvironment, good: float, explore: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        list(demonstrate(environment, [], good=good, seed=0, explore=explore))
