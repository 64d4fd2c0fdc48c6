"""What training takes over from its policy, by the flags that were given: an adapter's shape, and how it is played."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_server.types import AnswerMode
from inference.adapters import NamedPolicy
from trainer.config import ActionFormat, ConfigError
from trainer.policy import WARMUP_NAMES, PlaySettings, resolve_policy
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import (
    departures,
    parse_arguments,
    parse_warmup_arguments,
    play_settings,
    warmup_play_settings,
)
from trainer.training.starting_point import implied_flags, starting_line

CONFIG = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 12,
    "target_modules": ["v_proj", "q_proj"],
    "use_rslora": False,
    "modules_to_save": None,
    "base_model_name_or_path": str(BASE_CHECKPOINT),
}


@pytest.fixture
def adapter(tmp_path: Path) -> NamedPolicy:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return resolve_policy(str(tmp_path))


def test_a_full_checkpoint_implies_nothing() -> None:
    checkpoint = resolve_policy(str(BASE_CHECKPOINT))
    assert implied_flags(checkpoint, {"use_peft": True, "lora_r": 2}) == {}
    assert starting_line(checkpoint) == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lora_r": 8, "lora_alpha": 12},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": "all-linear"},
        {"lora_modules_to_save": None, "use_dora": False},
    ],
)
def test_an_adapter_goes_on_as_it_is(adapter: NamedPolicy, given: dict[str, Any]) -> None:
    assert implied_flags(adapter, given) == {
        "use_peft": True,
        "lora_r": 8,
        "lora_alpha": 12,
        "lora_target_modules": ["v_proj", "q_proj"],
        "use_rslora": False,
    }
    (line,) = starting_line(adapter)
    assert "rank 8, q_proj, v_proj" in line


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_r": 16}, r"--lora_r 16: the adapter .* was made with 8.*merge it first \(sqlenv export"),
        ({"lora_target_modules": ["q_proj"]}, r"made with v_proj q_proj"),
        ({"use_dora": True}, "--use_dora True"),
        ({"use_peft": False}, "merge it first"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(adapter: NamedPolicy, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        implied_flags(adapter, given)


SAVED = PlaySettings(
    data="synthetic:3",
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


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A policy that was played in a way of its own."""
    folder = tmp_path / "warm"
    shutil.copytree(BASE_CHECKPOINT, folder)
    SAVED.save(folder)
    return folder


def trained(*words: str) -> PlaySettings:
    arguments, grpo, _ = parse_arguments(["--use_cpu", *words])
    return play_settings(arguments, grpo)


def warmed(*words: str) -> PlaySettings:
    arguments, _, _ = parse_warmup_arguments(["--use_cpu", *words], "")
    return warmup_play_settings(arguments)


def test_training_plays_as_its_policy_was_played(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = PlaySettings(eval_episodes=400, seed=42)
    assert trained("--model_name_or_path", str(warm)) == replace(
        SAVED, max_context_length=None, eval_episodes=400, seed=42
    )
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "taken over" in line)
    assert line.startswith("sqlenv train: ")
    assert "answer_mode sql" in line
    assert trained("--model_name_or_path", str(BASE_CHECKPOINT)) == own
    assert "taken over" not in capsys.readouterr().err


def test_a_further_warm_up_plays_as_its_policy_was_played(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken_over = {name: getattr(SAVED, name) for name in WARMUP_NAMES}
    assert warmed("--model_name_or_path", str(warm)) == replace(PlaySettings(), **taken_over)
    assert "sqlenv warmup: taken over" in capsys.readouterr().err
    assert warmed("--model_name_or_path", str(BASE_CHECKPOINT)) == PlaySettings()


def test_a_flag_or_a_key_wins_over_the_policy_and_is_said(
    warm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt, config = tmp_path / "prompt.txt", tmp_path / "run.yaml"
    prompt.write_text("Look.", encoding="utf-8")
    config.write_text("answer_mode: value\nstep_budget: 9\nchat_template_kwargs: {opening: x}\n", encoding="utf-8")
    flags = ["--model_name_or_path", str(warm), "--config", str(config), "--system_prompt", str(prompt)]
    settings = trained(*flags, "--step_budget", "4", "--max_turn_length", "32")
    changed: dict[str, Any] = {
        "answer_mode": AnswerMode.VALUE,
        "step_budget": 4,
        "max_turn_length": 32,
        "custom_system_prompt": "Look.",
    }
    own = replace(SAVED, max_context_length=None, eval_episodes=400, seed=42)
    expected = replace(own, **changed, chat_template_kwargs={"opening": "x"})
    assert settings == expected
    _, _, said = capsys.readouterr().err.partition("changed by flag or config: ")
    for words in (
        "answer_mode value",
        "step_budget 4",
        "max_turn_length 32",
        "system_prompt Look.",
        '{"opening": "x"}',
    ):
        assert words in said


def test_a_run_that_goes_on_keeps_what_it_had(warm: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    replace(SAVED, step_budget=11, custom_system_prompt=None).save(checkpoint)
    flags = ["--model_name_or_path", str(warm), "--output_dir", str(checkpoint.parent)]
    for resumed in ("true", str(checkpoint)):
        settings = trained(*flags, "--resume_from_checkpoint", resumed)
        assert (settings.step_budget, settings.custom_system_prompt) == (11, None)
        assert warmed(*flags, "--resume_from_checkpoint", resumed).step_budget == 11


def test_what_was_taken_over_is_no_departure(warm: Path) -> None:
    given = ["--use_cpu", "--model_name_or_path", str(warm), "--step_budget", "6", "--max_turn_length", "32"]
    assert departures(given) == {"model_name_or_path": None, "max_turn_length": 16}
