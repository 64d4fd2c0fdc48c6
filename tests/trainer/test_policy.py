"""How a policy is meant to be played: written beside its weights, read wherever they are, and said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_server.types import AnswerMode
from inference.adapters import ModelRef
from trainer.config import ActionFormat
from trainer.policy import (
    SETTINGS_FILE,
    WARMUP_NAMES,
    PlaySettings,
    PlaySettingsError,
    SavedPlay,
    Settled,
    saved_play,
    settle,
)
from trainer.training.arguments import parse_train

OTHER = PlaySettings(
    data="spider:x",
    answer_mode=AnswerMode.SQL,
    action_format=ActionFormat.TOOLS,
    chat_template_kwargs={"enable_thinking": False},
    custom_system_prompt="Explore.",
    few_shot=2,
    step_budget=6,
    max_completion_length=192,
    max_context_length=512,
    max_turn_length=16,
    max_thinking_length=64,
    eval_episodes=8,
    seed=3,
)


@pytest.mark.parametrize("settings", [PlaySettings(), OTHER])
def test_what_was_saved_is_read(settings: PlaySettings, tmp_path: Path) -> None:
    settings.save(tmp_path)
    assert saved_play(ModelRef(str(tmp_path))) == SavedPlay(settings, settings.chat.system_prompt)


def test_a_setting_that_a_file_lacks_is_the_default(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text('{"answer_mode": "sql", "later": 1}')
    saved = saved_play(ModelRef(str(tmp_path)))
    assert saved is not None
    assert saved.settings == PlaySettings(answer_mode=AnswerMode.SQL)


def test_the_defaults_are_those_of_training() -> None:
    config, _ = parse_train(["--model_name_or_path", "x"])
    own = PlaySettings()
    assert own.max_completion_length == config.max_completion_length
    for name in (
        "data",
        "answer_mode",
        "action_format",
        "few_shot",
        "step_budget",
        "max_turn_length",
        "max_thinking_length",
    ):
        assert getattr(own, name) == getattr(config, name)


@pytest.mark.parametrize("policy", ["", "no/such/folder/at/all", "not a name"])
def test_a_policy_may_say_nothing(policy: str, tmp_path: Path) -> None:
    assert saved_play(ModelRef(policy or str(tmp_path))) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "the settings: Input should be a dictionary"),
        ('{"step_budget": "many"}', "step_budget: Input should be a valid integer"),
        ('{"answer_mode": "guess"}', "answer_mode: Input should be 'value' or 'sql'"),
    ],
)
def test_a_broken_file_is_named(content: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text(content)
    with pytest.raises(PlaySettingsError, match=f"{SETTINGS_FILE}.*{problem}"):
        saved_play(ModelRef(str(tmp_path)))


def test_what_is_given_wins_over_what_was_saved_and_that_over_the_default() -> None:
    saved = SavedPlay.of(OTHER)
    assert settle("p", saved, {}).settings == OTHER
    assert settle("p", None, {"step_budget": 3}) == Settled(PlaySettings(step_budget=3), ())
    given: dict[str, Any] = {
        "max_turn_length": 64,
        "max_context_length": None,
        "chat_template_kwargs": {},
        "answer_mode": "value",
    }
    assert settle("p", saved, given).settings == replace(OTHER, **given)


def test_one_line_says_what_was_taken_over_and_what_was_changed() -> None:
    (line,) = settle("p", SavedPlay.of(OTHER), {"max_turn_length": 64, "step_budget": 6}).lines
    taken, _, changed = line.partition("; changed")
    assert "taken over from p" in taken
    for words in ("answer_mode sql", "step_budget 6", "system_prompt Explore.", '{"enable_thinking": false}'):
        assert words in taken
        assert words not in changed
    assert "max_turn_length 64 (it had 16)" in changed
    assert "max_turn_length" not in taken


def test_settings_that_a_command_does_not_take_over_are_the_default() -> None:
    settled = settle("p", SavedPlay.of(OTHER), {}, WARMUP_NAMES)
    assert settled.settings == replace(
        PlaySettings(),
        data="spider:x",
        answer_mode=AnswerMode.SQL,
        action_format=ActionFormat.TOOLS,
        chat_template_kwargs={"enable_thinking": False},
        custom_system_prompt="Explore.",
        step_budget=6,
    )
    assert "episodes" not in settled.lines[0]


def test_another_system_prompt_is_said() -> None:
    _, line = settle("p", SavedPlay(OTHER, "You are a pirate."), {}).lines
    assert "system prompt" in line
