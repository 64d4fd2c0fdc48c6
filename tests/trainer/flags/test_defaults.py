"""What a run does without flags, on each kind of machine; what was given wins, by flag or by config."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOConfig, ModelConfig, SFTConfig

from env_server.service.settings import ServiceSettings
from inference.launch.launcher import read_arguments
from inference.precision import measure_precision
from trainer.config import SQLEnvArguments
from trainer.flags.defaults import EPISODES_PER_STEP, Machine, train_defaults, warmup_defaults
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import departures, parse_arguments, parse_warmup_arguments

A100 = Machine(gpu=True, cpu=False, bf16=True)
T4 = Machine(gpu=True, cpu=False, bf16=False)
MAC = Machine(gpu=False, cpu=False, bf16=True)
OLD_CPU = Machine(bf16=False)
NEW_CPU = Machine(bf16=True)
MACHINES = [A100, T4, MAC, OLD_CPU, NEW_CPU]


def chosen(machine: Machine, **given: Any) -> dict[str, Any]:
    return train_defaults(given, machine)


@pytest.mark.parametrize("machine", MACHINES)
def test_defaults_are_of_fields_that_exist(machine: Machine) -> None:
    trained = {field.name for kind in (GRPOConfig, ModelConfig) for field in fields(kind)}
    warmed = {field.name for kind in (SFTConfig, ModelConfig) for field in fields(kind)}
    assert chosen(machine).keys() <= trained
    assert warmup_defaults({}, machine).keys() <= warmed


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        (A100, {}, {"use_peft": True, "dtype": "bfloat16", "bf16": True, "fp16": None, "use_cpu": None}),
        (A100, {"use_peft": False}, {"dtype": None, "bf16": True}),
        (A100, {"bf16": False}, {"bf16": None, "fp16": None}),
        (A100, {"fp16": True}, {"bf16": None, "fp16": None}),
        (T4, {}, {"use_peft": True, "dtype": "float16", "bf16": False, "fp16": True}),
        (T4, {"fp16": False}, {"bf16": False, "fp16": None}),
        (T4, {"bf16": False}, {"fp16": None}),
        (MAC, {}, {"use_peft": False, "dtype": None, "bf16": True, "use_cpu": None}),
        (OLD_CPU, {}, {"use_peft": False, "dtype": None, "bf16": False, "fp16": None, "use_cpu": True}),
        (NEW_CPU, {}, {"use_peft": False, "dtype": None, "bf16": True, "use_cpu": True}),
        (NEW_CPU, {"use_peft": True}, {"use_peft": True, "dtype": None, "learning_rate": 1e-5}),
    ],
)
def test_precision_and_adapters_follow_from_the_machine(
    machine: Machine, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    defaults = chosen(machine, **given)
    assert {name: defaults.get(name) for name in expected} == expected


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("given", [{}, {"use_peft": True}, {"use_peft": False}, {"load_in_4bit": True}])
def test_a_warm_up_trains_what_training_trains(machine: Machine, given: dict[str, Any]) -> None:
    warmed, trained = warmup_defaults(given, machine), train_defaults(given, machine)
    for name in ("use_peft", "dtype", "bf16", "fp16", "use_cpu", "lora_target_modules", "lora_dropout"):
        assert warmed.get(name) == trained.get(name)
    assert warmed["learning_rate"] == (3e-4 if warmed["use_peft"] else 1e-4)


def test_weights_that_are_trained_stay_in_float32_and_frozen_ones_do_not() -> None:
    assert "dtype" not in warmup_defaults({"use_peft": False}, A100)
    assert warmup_defaults({}, A100)["dtype"] == "bfloat16"
    assert warmup_defaults({"load_in_4bit": True}, T4)["dtype"] == "float16"


def test_an_adapter_learns_at_ten_times_the_rate() -> None:
    assert chosen(A100)["learning_rate"] == pytest.approx(10 * chosen(A100, use_peft=False)["learning_rate"])


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.sampled_from([1, 2, 4, 8]))
def test_a_step_has_as_many_episodes_whatever_the_micro_batch_and_the_ranks(rows: int, ranks: int) -> None:
    defaults = train_defaults({"per_device_train_batch_size": rows}, Machine(ranks=ranks))
    assert max(EPISODES_PER_STEP, rows * ranks) == rows * ranks * defaults["gradient_accumulation_steps"]


@pytest.mark.parametrize("name", ["gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"])
def test_who_sets_the_step_gets_it(name: str) -> None:
    assert "gradient_accumulation_steps" not in chosen(A100, **{name: 4})


def test_who_sets_epochs_gets_no_number_of_steps_beside_it() -> None:
    assert chosen(A100)["max_steps"] > 0
    assert chosen(A100, num_train_epochs=1.0)["max_steps"] == -1


def test_servers_are_looked_for_where_they_are_started_and_that_is_no_environment_servers_port() -> None:
    launched, _ = read_arguments(["--model", "m"])
    assert chosen(A100)["vllm_server_port"] == launched.port != ServiceSettings.model_fields["port"].default


def test_a_bare_run_is_read_with_a_word_about_its_precision_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments, grpo, model = parse_arguments(["--use_cpu", "--model_name_or_path", "somewhere/m"])
    measured = measure_precision(None)
    assert capsys.readouterr().err == f"sqlenv train: --bf16 {str(grpo.bf16).lower()}: {measured}\n"
    assert grpo.bf16 is (measured.dtype == "bfloat16")
    assert arguments == SQLEnvArguments()
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
    parse_arguments(["--model_name_or_path", "somewhere/m", "--bf16", "false"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sqlenv train: there is no GPU here")
    named = re.findall(r"configs/[a-z0-9]+\.yaml", line)
    assert len(named) == 2
    assert all((Path(__file__).parents[3] / name).is_file() for name in named)
    parse_arguments(["--model_name_or_path", "somewhere/m", "--use_cpu", "true", "--bf16", "false"])
    parse_arguments(["--model_name_or_path", str(BASE_CHECKPOINT), "--bf16", "false"])
    assert capsys.readouterr().err == ""


def test_a_machine_without_an_accelerator_needs_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    here = Machine.here()
    assert (here.gpu, here.cpu, here.ranks) == (False, True, 2)
    assert Machine.here(use_cpu=True) == here


def test_a_flag_wins_over_a_config_and_that_over_a_default(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 3e-4\nmax_completion_length: 700\nstep_budget: 7\n", encoding="utf-8")
    flags = ["--use_cpu", "--model_name_or_path", "m", "--learning_rate", "1e-2", "--bf16", "false"]
    arguments, grpo, model = parse_arguments([*flags, "--config", str(config)])
    assert (grpo.learning_rate, grpo.max_completion_length, arguments.step_budget) == (1e-2, 700, 7)
    assert not grpo.bf16
    assert model.lora_target_modules == "all-linear"


def test_departures_are_the_flags_that_were_given_another_value_with_what_they_would_have_been(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("learning_rate: 3e-4\nmax_completion_length: 4096\nstep_budget: 7\n", encoding="utf-8")
    flags = ["--use_cpu", "--model_name_or_path", "m", "--temperature", "1.0", "--beta", "0.1", "--config", str(config)]
    assert departures(flags) == {"model_name_or_path": None, "beta": 0.0, "learning_rate": 1e-6, "step_budget": 15}


def test_a_warm_up_has_the_machines_defaults_too() -> None:
    _, sft, model = parse_warmup_arguments(
        ["--use_cpu", "--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", "x"], ""
    )
    assert sft.use_cpu
    assert (model.dtype, model.lora_dropout, model.lora_target_modules) == ("float32", 0.0, "all-linear")


@pytest.mark.parametrize(("machine", "steps"), [(NEW_CPU, 4), (Machine(ranks=2), 2), (Machine(ranks=32), 1), (A100, 4)])
def test_a_step_of_a_warm_up_has_16_episodes(machine: Machine, steps: int) -> None:
    assert warmup_defaults({}, machine)["gradient_accumulation_steps"] == steps
    assert warmup_defaults({"per_device_train_batch_size": 16}, NEW_CPU)["gradient_accumulation_steps"] == 1
