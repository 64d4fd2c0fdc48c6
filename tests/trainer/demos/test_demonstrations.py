"""Expert demonstrations: all of them are right, and a share explores."""

from __future__ import annotations

import pytest

from env_server.dataset import Dataset
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from trainer.chat.format import Conversation
from trainer.demos.demonstrations import demonstrate


def test_clean_play_is_right(environment: SQLEnvironment, pets: Dataset) -> None:
    played = list(demonstrate(environment, pets.questions, seed=0))
    assert len(played) == len(pets.questions)
    assert all(episode.correct for episode, _ in played)


def test_queries_are_submitted_where_queries_are_asked_for(pets: Dataset) -> None:
    settings = EnvSettings(judging=JudgingSettings(variants=False))
    with EnvironmentFactory(pets, settings, AnswerMode.SQL) as factory:
        environment = factory.make()
        clean = [e for e, _ in demonstrate(environment, pets.questions, 0, AnswerMode.SQL)]
        assert [e.turns[-1].argument for e in clean] == [q.gold_sql for q in pets.questions]
        assert all(episode.correct for episode in clean)


def test_a_share_of_the_play_explores(environment: SQLEnvironment, pets: Dataset) -> None:
    def conversations(explore: float, seed: int = 0) -> list[Conversation]:
        played = demonstrate(environment, pets.questions, seed=seed, explore=explore)
        return [conversation for _, conversation in played]

    clean = conversations(0.0)
    many = [conversations(1.0, seed) for seed in range(20)]
    assert all(len(played) == len(clean) for played in many), "all of it is right"
    assert conversations(1.0) == many[0]
    assert sum(played != clean for played in many) == 20
    assert any(c.masked_turns for played in many for c in played)
    assert not any(c.masked_turns for c in clean)
    half = [conversations(0.5, seed) for seed in range(20)]
    assert 20 < sum(a == b for played in half for a, b in zip(played, clean, strict=True)) < 60


def test_a_question_explores_alike_whatever_is_played_beside_it(environment: SQLEnvironment, pets: Dataset) -> None:
    ((_, alone),) = demonstrate(environment, [pets.question("oslo")], seed=3, explore=1.0)
    among = [c for _, c in demonstrate(environment, pets.questions, seed=3, explore=1.0)]
    assert alone in among


@pytest.mark.parametrize("explore", [-0.1, 2.0])
def test_shares_outside_the_unit_interval_are_refused(environment: SQLEnvironment, explore: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        list(demonstrate(environment, [], seed=0, explore=explore))
