"""Scripts have the lengths that were asked for, and say what a policy and an environment would."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from env_server.dataset import Dataset
from env_server.types import AnswerMode
from inference.simulated.engine import Asked
from trainer.chat.format import ChatFormat
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import record
from trainer.rollout.players import OraclePlayer, play
from trainer.simulation.scripts import Lengths, ScriptedPolicy, drawn, made_up, played_by_the_oracle, recorded

LENGTHS = Lengths(turns=5, turn_tokens=60, reply_tokens=80, question_tokens=30, spread=0.5)


def test_made_up_episodes_have_the_lengths_that_were_asked_for(chat: ChatFormat) -> None:
    scripts = made_up(chat, LENGTHS, 300, seed=1, max_turns=100)
    turns = [turn for script in scripts for turn in script.turns]
    assert fmean(len(script.turns) for script in scripts) == pytest.approx(5, rel=0.1)
    assert fmean(len(chat.renderer.turn_ids(turn.text)) for turn in turns) == pytest.approx(60, rel=0.1)
    assert fmean(len(chat.renderer.turn_ids(turn.result)) for turn in turns) == pytest.approx(80, rel=0.1)


def test_made_up_episodes_are_drawn_from_their_seed_and_end_with_an_answer(chat: ChatFormat) -> None:
    scripts = made_up(chat, LENGTHS, 20, seed=1, max_turns=4)
    assert scripts == made_up(chat, LENGTHS, 20, seed=1, max_turns=4)
    assert scripts != made_up(chat, LENGTHS, 20, seed=2, max_turns=4)
    for script in scripts:
        kinds = [chat.parse(turn.text).action.action_type for turn in script.turns]
        assert kinds == ["QUERY"] * (len(kinds) - 1) + ["ANSWER"]
        assert len(kinds) <= 4


@pytest.mark.parametrize(("mean", "spread"), [(10.0, 0.0), (10.0, 0.3), (2.0, 1.5)])
def test_a_draw_has_its_mean_and_spread(mean: float, spread: float) -> None:
    chance = random.Random(0)
    found = [drawn(chance, mean, spread) for _ in range(20_000)]
    middle = fmean(found)
    assert middle == pytest.approx(mean, rel=0.05)
    assert fmean((value - middle) ** 2 for value in found) ** 0.5 == pytest.approx(mean * spread, rel=0.2)


def test_a_runs_episodes_and_the_oracles_are_the_same_scripts(pets: Dataset) -> None:
    by_oracle = played_by_the_oracle(pets, pets.questions, AnswerMode.VALUE)
    local = LocalEnvironments(pets)
    with local.blocking() as environment:
        played = [record(play(environment, question, OraclePlayer(question))[0]) for question in pets.questions]
    local.close()
    from_log = recorded(played)
    assert [script.turns for script in from_log] == [script.turns for script in by_oracle]
    assert [script.question_id for script in from_log] == [question.question_id for question in pets.questions]


def test_the_policy_says_a_scripts_words_and_then_answers(chat: ChatFormat) -> None:
    scripts = made_up(chat, LENGTHS, 2, seed=0, max_turns=100)
    policy = ScriptedPolicy(chat, scripts)
    for key, script in enumerate((*scripts, scripts[0])):
        said = [chat.text_of(policy(Asked(key, turn, (1,), 0))) for turn in range(len(script.turns) + 1)]
        assert said == [*(turn.text for turn in script.turns), "ANSWER 1"]
