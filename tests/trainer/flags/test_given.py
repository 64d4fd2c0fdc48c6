"""What a user wrote is told from what is a default: by flag, by config, with its type, a flag first."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl import GRPOConfig, ModelConfig

from trainer.config import ConfigError, SQLEnvArguments
from trainer.flags.given import read_given

KINDS = (SQLEnvArguments, GRPOConfig, ModelConfig)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_nothing_is_given_without_flags() -> None:
    assert read_given(KINDS, [], "sqlenv") == {}


def test_a_value_that_equals_the_default_is_given_all_the_same() -> None:
    flags = ["--temperature", "1.0", "--top-k", "0", "--use_peft", "--no_gradient_checkpointing"]
    given = read_given(KINDS, flags, "sqlenv")
    assert given == {"temperature": 1.0, "top_k": 0, "use_peft": True, "gradient_checkpointing": False}


def test_a_flag_wins_over_the_config_file_and_both_are_typed(config: Path) -> None:
    config.write_text(
        "learning_rate: 1e-5\nbf16: 'false'\nnum_generations: 4\nreward_weights: [1, 0.5, 0, 0]\nenv: {A: b}\n",
        encoding="utf-8",
    )
    given = read_given(KINDS, ["--num_generations", "16", "--config", str(config), "--beta", "0.1"], "sqlenv")
    assert given == {
        "learning_rate": 1e-5,
        "bf16": False,
        "num_generations": 16,
        "reward_weights": [1, 0.5, 0, 0],
        "beta": 0.1,
    }


def test_what_is_unknown_is_left_to_the_parser_of_the_arguments(config: Path) -> None:
    config.write_text("no_such_key: 1\nseed: 3\n", encoding="utf-8")
    assert read_given(KINDS, ["--no_such_flag", "2", "-h", "--config", str(config)], "sqlenv") == {"seed": 3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2]", "one key for each flag"),
        ("a: [1", "line 1"),
        ("dtype: float31", "--dtype must be one of"),
        ("bnb_4bit_quant_type: nf5", "--bnb_4bit_quant_type must be one of"),
        ("learning_rate: fast", "float"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(text: str, complaint: str, config: Path) -> None:
    config.write_text(text, encoding="utf-8")
    with pytest.raises((ConfigError, SystemExit)) as refusal:
        read_given(KINDS, ["--config", str(config)], "sqlenv")
    assert complaint in str(refusal.value) or refusal.value.args == (2,)


def test_a_config_without_a_path_or_a_file_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="path of a YAML file"):
        read_given(KINDS, ["--config"], "sqlenv")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        read_given(KINDS, ["--config", str(config)], "sqlenv")


def test_a_value_that_does_not_fit_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_given(KINDS, ["--learning_rate", "fast"], "sqlenv train")
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        "sqlenv train: --learning_rate: invalid float value: 'fast' (sqlenv train --help lists the flags)\n"
    )
