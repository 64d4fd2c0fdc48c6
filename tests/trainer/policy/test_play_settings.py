"""How a policy is meant to be played: written beside its weights, read wherever they are, differences said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from env_server.types import AnswerMode
from inference.adapters import Place
from trainer.config import ActionFormat
from trainer.policy.checkpoint_settings import SavePlaySettings
from trainer.policy.play_settings import (
    SETTINGS_FILE,
    PlaySettings,
    PlaySettingsError,
    SavedPlay,
    differences,
    saved_play,
)
from trainer.training.arguments import parse_arguments

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
    assert saved_play(Place(str(tmp_path))) == SavedPlay(settings, settings.chat.system_prompt)


def test_a_setting_that_a_file_lacks_is_the_default(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text('{"answer_mode": "sql", "later": 1}')
    saved = saved_play(Place(str(tmp_path)))
    assert saved is not None
    assert saved.settings == PlaySettings(answer_mode=AnswerMode.SQL)


def test_the_defaults_are_those_of_training() -> None:
    arguments, grpo, _ = parse_arguments(["--model_name_or_path", "x"])
    own = PlaySettings()
    assert own.max_completion_length == grpo.max_completion_length
    for name in (
        "data",
        "answer_mode",
        "action_format",
        "few_shot",
        "step_budget",
        "max_context_length",
        "max_turn_length",
        "max_thinking_length",
    ):
        assert getattr(own, name) == getattr(arguments, name)


@pytest.mark.parametrize("policy", ["", "no/such/folder/at/all", "not a name"])
def test_a_policy_may_say_nothing(policy: str, tmp_path: Path) -> None:
    assert saved_play(Place(policy or str(tmp_path))) is None


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
        saved_play(Place(str(tmp_path)))


def test_each_difference_is_a_line() -> None:
    saved = SavedPlay(OTHER, "Explore.")
    assert differences(OTHER, saved) == []
    own = replace(OTHER, max_turn_length=64, max_context_length=None, eval_episodes=-1, chat_template_kwargs={})
    assert differences(own, saved) == [
        '--chat_template_kwargs {}, the run had {"enable_thinking": false}',
        "--max_context_length as the model allows, the run had 512",
        "--max_turn_length 64, the run had 16",
        "--episodes -1, the run had 8",
    ]


def test_another_system_prompt_is_said() -> None:
    (line,) = differences(OTHER, SavedPlay(OTHER, "You are a pirate."))
    assert "system prompt" in line


def test_each_checkpoint_gets_the_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    callback = SavePlaySettings(OTHER)
    callback.on_save(
        SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=2, is_world_process_zero=True), None
    )
    assert json.loads((tmp_path / "checkpoint-2" / SETTINGS_FILE).read_text())["max_turn_length"] == 16
