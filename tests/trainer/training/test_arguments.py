"""From flags to a run's dataclasses: what was given wins, what was not follows from the policy and the machine."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import ModelConfig

from env_server.types import AnswerMode
from inference.adapters import NamedPolicy
from inference.precision import measure_precision
from tests.trainer.test_policy import OTHER
from trainer.config import ConfigError
from trainer.flags.configs import SQLEnvConfig
from trainer.flags.early import Command
from trainer.policy import WARMUP_NAMES, PlaySettings, resolve_policy
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import (
    FlagParser,
    Machine,
    implied_flags,
    machine_defaults,
    parse_train,
    parse_warmup,
    starting_line,
)

A100 = Machine(gpu=True, bf16=True)
T4 = Machine(gpu=True)
MAC = Machine(bf16=True)
OLD_CPU = Machine(cpu=True)
NEW_CPU = Machine(cpu=True, bf16=True)
MACHINES = [A100, T4, MAC, OLD_CPU, NEW_CPU]
CPU = ["--use_cpu", "--bf16", "false", "--model_name_or_path"]


def given_by(*words: str) -> dict[str, Any]:
    return FlagParser((SQLEnvConfig, ModelConfig), "sqlenv train").given(words)


def train_defaults(given: dict[str, Any], machine: Machine) -> dict[str, Any]:
    return FlagParser((SQLEnvConfig, ModelConfig), "").defaults() | machine_defaults(Command.TRAIN, given, machine)


def test_a_value_that_equals_the_default_is_given_all_the_same(tmp_path: Path) -> None:
    assert given_by() == {}
    flags = ["--temperature", "1.0", "--top-k", "0", "--use_peft", "--no_gradient_checkpointing"]
    assert given_by(*flags) == {"temperature": 1.0, "top_k": 0, "use_peft": True, "gradient_checkpointing": False}


def test_a_flag_wins_over_the_config_file_and_both_are_typed(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 1e-5\nbf16: 'false'\nnum_generations: 4\nreward_weights: [1, 0.5, 0, 0]\n")
    read = given_by("--num_generations", "16", "--config", str(config), "--beta", "0.1")
    asked = {"learning_rate": 1e-5, "bf16": False, "num_generations": 16, "reward_weights": [1, 0.5, 0, 0], "beta": 0.1}
    assert read == asked


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2]", "one key for each flag"),
        ("no_such_key: 1", "no_such_key"),
        ("dtype: float31", "--dtype must be one of"),
        ("answer_mode: prose", "--answer_mode must be one of value, sql"),
        ("learning_rate: fast", "--learning_rate"),
        ("env: 3", "env"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((ConfigError, SystemExit)) as refusal:
        given_by("--config", str(tmp_path / "run.yaml"))
    assert complaint in f"{refusal.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        (A100, {}, {"use_peft": True, "dtype": "bfloat16", "bf16": True, "fp16": False, "use_cpu": False}),
        (A100, {"use_peft": False}, {"dtype": "float32", "bf16": True}),
        (A100, {"bf16": False}, {"bf16": None, "fp16": False}),
        (A100, {"fp16": True}, {"bf16": None, "fp16": False}),
        (T4, {}, {"use_peft": True, "dtype": "float16", "bf16": False, "fp16": True}),
        (T4, {"fp16": False}, {"bf16": False, "fp16": False}),
        (T4, {"bf16": False}, {"fp16": False}),
        (MAC, {}, {"use_peft": False, "dtype": "float32", "bf16": True, "use_cpu": False}),
        (OLD_CPU, {}, {"use_peft": False, "dtype": "float32", "bf16": False, "fp16": False, "use_cpu": True}),
        (NEW_CPU, {}, {"use_peft": False, "dtype": "float32", "bf16": True, "use_cpu": True}),
        (NEW_CPU, {"use_peft": True}, {"use_peft": True, "dtype": "float32", "learning_rate": 1e-5}),
    ],
)
def test_precision_and_adapters_follow_from_the_machine(
    machine: Machine, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    defaults = train_defaults(given, machine)
    assert {name: defaults.get(name) for name in expected} == expected


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.sampled_from([1, 2, 4, 8]))
def test_a_step_has_as_many_episodes_whatever_the_micro_batch_and_the_ranks(rows: int, ranks: int) -> None:
    defaults = train_defaults({"per_device_train_batch_size": rows}, Machine(ranks=ranks))
    assert max(64, rows * ranks) == rows * ranks * defaults["gradient_accumulation_steps"]


def test_who_sets_the_step_gets_it() -> None:
    for flags, episodes in ((("--generation_batch_size", "16"), 16), (("--gradient_accumulation_steps", "3"), 24)):
        config, _ = parse_train([*CPU, "x", *flags])
        assert config.generation_batch_size == episodes


def test_who_sets_epochs_gets_no_number_of_steps_beside_it() -> None:
    assert train_defaults({}, A100)["max_steps"] > 0
    assert train_defaults({"num_train_epochs": 1.0}, A100)["max_steps"] == -1


def test_a_bare_run_is_read_with_a_word_about_its_precision_alone(capsys: pytest.CaptureFixture[str]) -> None:
    grpo, model = parse_train(["--use_cpu", "--model_name_or_path", "somewhere/m"])
    measured = measure_precision(None)
    assert capsys.readouterr().err == f"sqlenv train: --bf16 {str(grpo.bf16).lower()}: {measured}\n"
    assert grpo.bf16 is (measured.dtype == "bfloat16")
    assert grpo.to_log() == SQLEnvConfig(use_cpu=True, bf16=False).to_log()
    assert (grpo.output_dir, grpo.max_steps, grpo.generation_batch_size) == ("runs/m", 200, 64)
    assert (grpo.max_completion_length, grpo.reward_weights) == (4096, [1.0, 0.2, 0.2, 0.1])
    assert grpo.scale_rewards == "batch"
    assert (grpo.learning_rate, grpo.disable_dropout, model.lora_dropout) == (1e-6, True, 0.0)
    assert (grpo.vllm_importance_sampling_mode, grpo.report_to, grpo.logging_steps) == ("token_truncate", [], 1)
    assert grpo.use_cpu
    assert not grpo.fp16
    assert not model.use_peft


def test_without_a_gpu_the_configs_for_a_cpu_are_named_unless_it_is_asked_for_or_the_policy_is_tiny(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    parse_train(["--model_name_or_path", "somewhere/m", "--bf16", "false"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sqlenv train: there is no GPU here")
    named = re.findall(r"configs/[a-z0-9]+\.yaml", line)
    assert len(named) == 2
    assert all((Path(__file__).parents[3] / name).is_file() for name in named)
    parse_train(["--model_name_or_path", "somewhere/m", "--use_cpu", "true", "--bf16", "false"])
    parse_train(["--model_name_or_path", str(BASE_CHECKPOINT), "--bf16", "false"])
    assert capsys.readouterr().err == ""


def test_a_run_knows_the_flags_that_were_given_another_value_with_what_they_would_have_been(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 3e-4\nmax_completion_length: 4096\nstep_budget: 7\n", encoding="utf-8")
    flags = ["--use_cpu", "--model_name_or_path", "m", "--temperature", "1.0", "--beta", "0.1", "--config", str(config)]
    assert parse_train(flags)[0].changed == {
        "model_name_or_path": None,
        "beta": 0.0,
        "learning_rate": 1e-6,
        "step_budget": 15,
    }


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
        ({"lora_target_modules": ["q_proj"]}, r"made with q_proj v_proj"),
        ({"use_dora": True}, "--use_dora True"),
        ({"use_peft": False}, "merge it first"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_does(adapter: NamedPolicy, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        implied_flags(adapter, given)


SAVED = replace(OTHER, data="synthetic:3")


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A policy that was played in a way of its own."""
    folder = tmp_path / "warm"
    shutil.copytree(BASE_CHECKPOINT, folder)
    SAVED.save(folder)
    return folder


def trained(*words: str) -> PlaySettings:
    return parse_train(["--use_cpu", *words])[0].play_settings()


def warmed(*words: str) -> PlaySettings:
    return parse_warmup(["--use_cpu", *words])[0].play_settings()


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
