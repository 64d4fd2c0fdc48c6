"""The exploring player: other ways to the right answer, and out of mistakes that showed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from env_server.dataset import Dataset, Question
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from trainer.demos.noisy_expert import NoisyExpert
from trainer.rollout.episodes import Episode
from trainer.rollout.players import play

WITHOUT_VARIANTS = EnvSettings(judging=JudgingSettings(variants=False))


@pytest.fixture(params=list(AnswerMode))
def mode(request: pytest.FixtureRequest) -> AnswerMode:
    return AnswerMode(request.param)


@pytest.fixture
def environment(pets: Dataset, mode: AnswerMode) -> Iterator[SQLEnvironment]:
    with EnvironmentFactory(pets, WITHOUT_VARIANTS, mode) as factory:
        yield factory.make()


def played(
    environment: SQLEnvironment, question: Question, mode: AnswerMode, seeds: int = 60
) -> Iterator[tuple[NoisyExpert, Episode]]:
    for seed in range(seeds):
        player = NoisyExpert(question, random.Random(seed), mode)
        episode, _ = play(environment, question, player)
        yield player, episode


def test_it_is_right_and_mostly_as_it_was_meant(environment: SQLEnvironment, pets: Dataset, mode: AnswerMode) -> None:
    ways = [way for question in pets.questions for way in played(environment, question, mode)]
    assert all(episode.correct for _, episode in ways)
    assert sum(player.convincing(episode) for player, episode in ways) > len(ways) * 0.8


def test_it_explores_errs_and_recovers(environment: SQLEnvironment, pets: Dataset, mode: AnswerMode) -> None:
    good = [
        (player, episode)
        for question in pets.questions
        for player, episode in played(environment, question, mode)
        if player.convincing(episode)
    ]
    seen: Counter[str] = Counter()
    for player, episode in good:
        *before, query, answer = episode.turns
        gold = pets.question(episode.question_id).gold_sql
        assert (query.action_type, query.argument, query.error) == ("QUERY", gold, "")
        assert answer.action_type == "ANSWER"
        assert player.masked_turns <= set(range(len(before))), "the query and the answer are always learned"
        for number, turn in enumerate(before):
            assert not turn.error or number in player.masked_turns, "no error is learned"
            seen[turn.action_type] += 1
            seen["error"] += bool(turn.error)
            seen["off"] += number in player.masked_turns and turn.action_type == "QUERY" and not turn.error
            seen["needless"] += number in player.masked_turns and turn.action_type == "DESCRIBE" and not turn.error
            seen["lookup"] += turn.argument.startswith("SELECT DISTINCT")
    for kind in ("DESCRIBE", "SAMPLE", "QUERY", "error", "off", "needless", "lookup"):
        assert seen[kind] > 0, kind
    orders = {tuple(t.argument for t in e.turns if t.action_type == "DESCRIBE") for _, e in good}
    assert {("pets", "owners"), ("owners", "pets")} <= orders
    assert 0.2 < sum(not player.masked_turns for player, _ in good) / len(good) < 0.8


def test_a_mistake_that_does_not_show_convinces_nobody(environment: SQLEnvironment, pets: Dataset) -> None:
    """Tom is the oldest cat, and the oldest by name too: the query is wrong, and looks right."""
    question = pets.question("oldest")
    unconvincing = [
        episode
        for player, episode in played(environment, question, AnswerMode.VALUE, 300)
        if player.masked_turns and episode.correct and not player.convincing(episode)
    ]
    for episode in unconvincing:
        shapes = {len(turn.result.splitlines()) for turn in episode.turns if turn.action_type == "QUERY"}
        assert len(shapes) == 1 or any(turn.error for turn in episode.turns)
