"""Flags that do not go together, by the real command line: what is refused, what is advised against, in one line."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from transformers.integrations.integration_utils import get_available_reporting_integrations

from sqlenv import cli
from trainer.flags.combinations import context_advice, length_advice
from trainer.rollout.rewards import REWARD_FUNCTIONS, reward_hacking_advice

NOWHERE = ["--use_cpu", "true", "--bf16", "false", "--model_name_or_path", "nowhere", "--data", "answers:synthetic"]
NOWHERE += ["--answer_mode", "sql"]


def said(capsys: pytest.CaptureFixture[str], *flags: str, command: str = "train") -> list[str]:
    assert cli.main([command, *NOWHERE, "--output_dir", "nowhere", *flags]) == 2
    return [line.removeprefix(f"sqlenv {command}: ") for line in capsys.readouterr().err.splitlines()]


SERVERS = ("--use_vllm", "true", "--use_peft", "true")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--max_completion_length", "0"), "--max_completion_length must be positive, not 0"),
        (("--temperature", "0"), "--temperature must be positive, not 0.0: .*"),
        (("--sync_ref_model", "true"), "--sync_ref_model .* --beta 0 has no such term"),
        (("--sync_ref_model", "true", "--beta", "0.1", "--use_peft", "true"), "--sync_ref_model .* Leave one .*"),
        (("--report_to", "abacus"), "--report_to abacus: there is no such tracker; known are .*wandb.*"),
        (
            ("--reward_weights", "1", "1"),
            "--reward_weights takes 4 numbers .correctness, .* got 2; --reward_functions adds rewards",
        ),
        (("--max_steps", "0"), "--max_steps must be positive, or -1 .*"),
        (("--scale_rewards", "false"), "--scale_rewards must be one of .*'none'.*, not 'false'"),
        (("--chat_template_kwargs", "think"), "--chat_template_kwargs think is no mapping; .*"),
        (("--gradient_checkpointing_kwargs", '{"a": 1}'), "--gradient_checkpointing_kwargs takes .*, not a"),
        (("--load_in_4bit", "true"), "--load_in_4bit: .* add --use_peft"),
        (("--load_in_8bit", "true"), "--load_in_8bit: .* add --use_peft"),
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


def test_a_tracker_that_is_not_installed_is_named_with_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    installed = get_available_reporting_integrations()
    missing = next(name for name in ("swanlab", "clearml", "wandb") if name not in installed)
    for command in ("train", "warmup"):
        (line,) = said(capsys, "--report_to", missing, command=command)
        assert line == f"--report_to {missing}: {missing} is not installed; pip install {missing}"


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("command", ["train", "warmup"])
def test_few_bits_without_bitsandbytes_name_the_extra(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    fix = "bitsandbytes is not installed; in SQLEnv's folder: pip install -e '.[quantization]'"
    assert said(capsys, "--load_in_4bit", "true", "--use_peft", "true", command=command) == [f"--load_in_4bit: {fix}"]
    for optimizer in ("adamw_8bit", "paged_adamw_32bit"):
        assert said(capsys, "--optim", optimizer, command=command) == [f"--optim {optimizer}: {fix}"]


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (("--reward_weights", "1", "1", "1", "1"), "--reward_weights 1 1 1 1: .* can collect 2.15, and .* pays 1; .*"),
        (
            ("--reward_functions", "structure", "--reward_weights", *("1", "0.2", "0.2", "0.1", "1")),
            "--reward_weights 1 0.2 0.2 0.1 1: .* 1.33, .*",
        ),
        (("--multi_objective_aggregation", "normalize_then_sum"), "--multi_objective_aggregation .*"),
        (("--max_completion_length", "512"), "--max_completion_length 512 starves episodes: .* about 1218 tokens"),
        (("--max_turn_length", "5000"), "--max_turn_length 5000 is more than .*--max_completion_length 4096.*"),
    ],
)
def test_what_trains_badly_is_said_and_the_run_goes_on(
    flags: tuple[str, ...], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, end = said(capsys, *flags)
    assert re.fullmatch(advice, line)
    assert "answers:synthetic" in end


def test_weights_are_judged_by_what_a_wrong_episode_can_collect() -> None:
    def advised(*weights: float, steps: int = 15) -> bool:
        return bool(reward_hacking_advice(REWARD_FUNCTIONS, weights, "sum_then_normalize", steps))

    assert not advised(1.0, 0.2, 0.2, 0.1)
    assert not advised(1.0, 0.5, 0.2, 0.4)
    assert advised(1.0, 0.5, 0.0, 0.5)
    assert advised(0.0, 0.0, 0.0, 0.0)
    assert advised(1.0, 0.0, 10.0, 0.0)
    assert not advised(1.0, 0.0, 10.0, 0.0, steps=5)
    assert not reward_hacking_advice(REWARD_FUNCTIONS, None, "sum_then_normalize", 15)


def test_advice_on_lengths() -> None:
    lengths = [(4096, 256), (1024, 64), (1217, 256), (100, 200)]
    assert [len(length_advice(completion, turn)) for completion, turn in lengths] == [0, 0, 1, 1]


def test_advice_on_a_context() -> None:
    assert context_advice(606, 256) == []
    (line,) = context_advice(605, 256)
    assert line.startswith("a context of 605 tokens is less than a prompt (about 350) and a turn")
