"""Numbers that no flag takes are refused where flags are read, by a line that names the flag and what it takes."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from trl import GRPOConfig, ModelConfig, SFTConfig

from sqlenv import cli
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments
from trainer.flags.given import FlagParser
from trainer.flags.ranges import RANGES, check_ranges
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.arguments import parse_arguments, parse_warmup_arguments

BAD = [
    ("gradient_accumulation_steps", "0"),
    ("per_device_train_batch_size", "-1"),
    ("learning_rate", "-1"),
    ("learning_rate", "nan"),
    ("learning_rate", "inf"),
    ("weight_decay", "-0.1"),
    ("seed", "4294967296"),
    ("seed", "-1"),
    ("lora_r", "0"),
    ("num_train_epochs", "0"),
    ("logging_steps", "0"),
    ("adam_beta2", "1"),
    ("max_steps", "-2"),
]
OF_TRAIN = [
    ("reward_weights", "1 nan 0 0"),
    ("temperature", "nan"),
    ("temperature", "0"),
    ("top_p", "0"),
    ("beta", "-1"),
    ("num_generations", "1"),
]


@pytest.mark.parametrize(("name", "value"), BAD + OF_TRAIN)
def test_train_refuses_it(name: str, value: str) -> None:
    argv = ["--model_name_or_path", str(BASE_CHECKPOINT), "--use_cpu", "true", f"--{name}", *value.split()]
    with pytest.raises(ConfigError, match=rf"^--{name} must be "):
        parse_arguments(argv)


@pytest.mark.parametrize(("name", "value"), [*BAD, ("noisy_expert_fraction", "nan"), ("max_minutes", "inf")])
def test_warmup_refuses_it(name: str, value: str) -> None:
    argv = ["--model_name_or_path", str(BASE_CHECKPOINT), "--use_cpu", "true", f"--{name}", value]
    with pytest.raises(ConfigError, match=rf"^--{name} must be "):
        parse_warmup_arguments(argv, "")


def test_what_the_ends_are() -> None:
    for name, allowed in RANGES.items():
        check_ranges({name: None})
        for end, is_open in ((allowed.low, allowed.open_low), (allowed.high, allowed.open_high)):
            if abs(end) < float("inf"):
                assert allowed.admits(end) is not is_open
    with pytest.raises(
        ConfigError, match=re.escape("--seed must be a whole number, at least 0 and at most 4,294,967,295, not -3")
    ):
        check_ranges({"seed": -3})


def test_whole_numbers_are_those_of_the_parsers() -> None:
    for kinds in ((SQLEnvArguments, GRPOConfig, ModelConfig), (WarmupArguments, SFTConfig, ModelConfig)):
        for action in FlagParser(kinds, "sqlenv")._actions:
            if action.dest in RANGES:
                assert callable(action.type)
                with pytest.raises(ValueError, match="int") if RANGES[action.dest].whole else nullcontext():
                    action.type("1.5")


def test_a_dry_run_finds_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "run")
    flags = ["--model_name_or_path", str(BASE_CHECKPOINT), "--use_cpu", "true", "--bf16", "false", "--output_dir", out]
    assert cli.main(["train", *flags, "--dry_run", "true"]) == 2
    assert "--output_dir" in capsys.readouterr().err.splitlines()[-1]
