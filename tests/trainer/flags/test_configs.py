"""What becomes of TRL's fields: refused, or beside another alone; by the tables and the command line."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import pytest
from transformers.integrations.integration_utils import get_available_reporting_integrations
from trl import GRPOConfig, ModelConfig, SFTConfig

from sqlenv import cli
from trainer.config import ConfigError, SQLEnvArguments
from trainer.flags.configs import (
    EVALUATION_METRICS,
    NEEDS,
    UNSUPPORTED,
    SQLEnvConfig,
    WarmupConfig,
    check_given,
    check_needs,
)
from trainer.flags.early import Command, flags_of
from trainer.training.arguments import check_together

KINDS = [(SQLEnvConfig, Command.TRAIN), (WarmupConfig, Command.WARMUP)]
NOWHERE = ["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "nowhere", "--output_dir", "nowhere"]
NOWHERE += ["--data", "answers:synthetic", "--answer_mode", "sql"]
"""Both commands get past their flags, and then find that the data set and the mode do not go together."""
EVERY_TWO = ("--eval_strategy", "steps", "--eval_steps", "2")
NO_CORRECTION = "--vllm_importance_sampling_correction"
SERVERS = ("--use_vllm", "true", "--use_peft", "true")


def said(capsys: pytest.CaptureFixture[str], *flags: str, command: str = "train") -> list[str]:
    assert cli.main([command, *NOWHERE, *flags]) == 2
    return [line.removeprefix(f"sqlenv {command}: ") for line in capsys.readouterr().err.splitlines()]


def test_every_field_of_the_pinned_trl_was_looked_at() -> None:
    """A new TRL has others: say of each what becomes of it, and then count again."""
    assert (len(GRPOConfig.__dataclass_fields__), len(SFTConfig.__dataclass_fields__)) == (189, 133)


@pytest.mark.parametrize(("kind", "command"), KINDS)
def test_tables_are_of_fields_and_say_one_thing_of_each(
    kind: type[SQLEnvConfig | WarmupConfig], command: Command
) -> None:
    names = flags_of(command).keys()
    assert UNSUPPORTED[kind].keys() <= names
    both = flags_of(Command.TRAIN).keys() | flags_of(Command.WARMUP).keys()
    assert both >= NEEDS.keys()
    assert both >= {need.split()[0].removeprefix("--") for text in NEEDS.values() for need in text.split(" or ")}


@pytest.mark.parametrize(("kind", "command"), KINDS)
def test_no_flag_is_ignored_in_silence(kind: type[SQLEnvConfig | WarmupConfig], command: Command) -> None:
    for name, reason in UNSUPPORTED[kind].items():
        check_given(kind, {name: "x"}, {name: "x"})
        check_given(kind, {name: False}, {name: True})
        with pytest.raises(ConfigError) as refused:
            check_given(kind, {name: ["x", 1]}, {name: None})
        assert str(refused.value) == f"--{name} x 1: {reason}; leave it out"
    off = dict.fromkeys(flags_of(command)) | {"env_server": "local"}
    for name in NEEDS.keys() & flags_of(command).keys() - UNSUPPORTED[kind].keys():
        assert check_needs({name: "x"}, off) == [f"--{name} has no effect without {NEEDS[name]}"]
        needed, _, value = NEEDS[name].partition(" or ")[0].removeprefix("--").partition(" ")
        assert check_needs({name: "x"}, off | {needed: value or True}) == []
    assert check_needs({"env_token": "x"}, off) == ["--env_token has no effect without --env"]


@pytest.mark.parametrize("command", ["train", "warmup"])
def test_the_command_says_what_does_nothing_and_goes_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs, end = said(capsys, "--use_dora", "true", command=command)
    assert needs == "--use_dora has no effect without --use_peft"
    assert "answers:synthetic" in end


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--top_p", "0.5"), "--top_p 0.5: .* use --temperature; leave it out"),
        ((*EVERY_TWO, "--eval_episodes", "0"), ".*--eval_episodes 0 leaves no questions.*"),
        ((*EVERY_TWO, "--lr_scheduler_type", "reduce_lr_on_plateau"), ".* follows the loss of evaluations, .*"),
        (("--save_strategy", "best"), ".*; add --eval_strategy steps --eval_steps N"),
        (
            (*EVERY_TWO, "--save_strategy", "best", "--metric_for_best_model", "bleu"),
            f"--metric_for_best_model must be one of {', '.join(EVALUATION_METRICS)}, not bleu",
        ),
        (("--max_completion_length", "0"), "--max_completion_length must be positive, not 0"),
        (("--temperature", "0"), "--temperature must be positive, not 0.0"),
        (("--num_generations", "1"), "--num_generations must be at least 2, .*"),
        (("--sync_ref_model", "true"), "--sync_ref_model .* --beta 0 has no such term"),
        (("--sync_ref_model", "true", "--beta", "0.1", "--use_peft", "true"), "--sync_ref_model .* Leave one .*"),
        (("--report_to", "abacus"), "--report_to abacus: there is no such tracker; known are .*wandb.*"),
        (("--reward_weights", "1", "1"), "--reward_weights .*"),
        (("--max_steps", "0"), "--max_steps must be positive, or -1 .*"),
        (("--chat_template_kwargs", "think"), "--chat_template_kwargs think is no mapping; .*"),
        (("--load_in_4bit", "true"), "--load_in_4bit: .* add --use_peft"),
        (("--staleness", "1"), ".* Hugging Face generate .*"),
        ((*SERVERS, "--staleness", "1", "--steps_per_generation", "16"), ".* leave out --steps_per_generation .*"),
        ((*SERVERS, "--staleness", "1", NO_CORRECTION, "false"), f".* {NO_CORRECTION} false .*"),
        (("--use_vllm", "true", "--weight_sync", "nccl"), ".* the trainer has none.*"),
        (("--use_vllm", "true", "--weight_sync", "lora"), "--weight_sync lora .* add --use_peft"),
        ((*SERVERS, "--use_dora", "true"), "--use_dora: .* --weight_sync disk.*"),
        ((*SERVERS, "--lora_modules_to_save", "embed_tokens"), "--lora_modules_to_save: .* --weight_sync disk.*"),
        (("--num_generations", "7"), r"generation_batch_size \(64\) must be divisible by num_generations \(7\)\."),
        (("--accelerator_config", '{"speed": 9}'), ".*speed.*"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    flags: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = said(capsys, *flags)
    assert re.fullmatch(complaint, line)


@pytest.mark.parametrize(
    "flag", [{"dynamic_sampling": 1.0}, {"rollout_downsampling": 2}, {"guided_starts": True}, {"advantages": "turn"}]
)
def test_groups_that_span_ranks_are_not_judged(flag: dict[str, Any]) -> None:
    config = SQLEnvConfig(use_cpu=True, bf16=False, **flag)
    config.num_generations = 7  # as on several ranks
    with pytest.raises(ConfigError, match=f"--{next(iter(flag))} .*judges whole groups"):
        check_together(config, ModelConfig())


@pytest.mark.parametrize(
    "name", [n for n, f in flags_of(Command.TRAIN).items() if not f.own and "choices" in f.metadata]
)
def test_a_wrong_choice_is_refused_with_the_right_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", *NOWHERE, f"--{name}", "nonsense"])
    choices = flags_of(Command.TRAIN)[name].metadata["choices"]
    line = capsys.readouterr().err
    assert [choice for choice in choices if str(choice) not in line] == []


def test_a_tracker_that_is_not_installed_is_named_with_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    installed = get_available_reporting_integrations()
    missing = next(name for name in ("swanlab", "clearml", "wandb") if name not in installed)
    for command in ("train", "warmup"):
        (line,) = said(capsys, "--report_to", missing, command=command)
        assert line == f"--report_to {missing}: {missing} is not installed; pip install {missing}"


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_few_bits_without_bitsandbytes_name_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    fix = "bitsandbytes is not installed; in SQLEnv's folder: pip install -e '.[quantization]'"
    assert said(capsys, "--load_in_4bit", "true", "--use_peft", "true") == [f"--load_in_4bit: {fix}"]
    assert said(capsys, "--optim", "adamw_8bit", command="warmup") == [f"--optim adamw_8bit: {fix}"]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--reward_weights", "1", "1", "1", "1"), "--reward_weights 1 1 1 1: .* can collect 2.15, and .* pays 1; .*"),
        (("--multi_objective_aggregation", "normalize_then_sum"), "--multi_objective_aggregation .*"),
    ],
)
def test_what_trains_badly_is_said_and_the_run_goes_on(
    flags: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, end = said(capsys, *flags)
    assert re.fullmatch(advice, line)
    assert "answers:synthetic" in end


def test_python_gets_the_defaults_and_the_checks_of_the_command() -> None:
    config = SQLEnvConfig(use_cpu=True, bf16=False)
    assert isinstance(config, SQLEnvArguments)
    assert isinstance(config, GRPOConfig)
    assert (config.scale_rewards, config.reward_weights, config.vllm_mode) == ("batch", [1.0, 0.2, 0.2, 0.1], "server")
    with pytest.raises(ConfigError, match="--advantages must be one of episode, turn"):
        SQLEnvConfig(use_cpu=True, bf16=False, advantages="token")
