"""Arguments from YAML and flags: what is refused, and what is read as it was written."""

from __future__ import annotations

import pickle
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from env_server.dataset import Hardness
from trainer.config import TOKEN_VARIABLE, ConfigError, SQLEnvArguments, WarmupArguments, token_of
from trainer.flags.configs import SQLEnvConfig
from trainer.training.arguments import parse_train

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def parse(*argv: str) -> tuple[SQLEnvConfig, ModelConfig]:
    return parse_train(["--use_cpu", "true", "--model_name_or_path", "here", *argv])


@pytest.mark.parametrize("name", ["step_budget", "max_concurrency", "max_turn_length"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_of_things_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"--{name} must be positive, not {value}"):
        SQLEnvArguments(**{name: value})  # type: ignore[arg-type]


def test_servers_by_flag_and_by_config(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("env_server: ws://a:8000\nenv: {SQLENV_UNUSED: x}\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SQLENV_UNUSED", "")
        assert parse("--config", str(file))[0].env_server == "ws://a:8000"
        assert parse("--config", str(file), "--env", "local")[0].env_server == "local"
    assert parse("--env", "ws://a:8000,ws://b:8000")[0].env_server == "ws://a:8000,ws://b:8000"
    assert parse()[0].env_server == "local"


def test_the_token_is_in_nothing_that_a_run_writes() -> None:
    config, _ = parse("--env", "ws://a:8000", "--env_token", "geheim")
    assert config.env_token == "geheim"
    for written in (repr(config), str(config.to_log()), str(config.trl_dict()), str(config.to_sanitized_dict())):
        assert "geheim" not in written
    assert b"geheim" not in pickle.dumps(config), "which is in every checkpoint"
    assert config.to_log().keys() == {each.name for each in fields(SQLEnvArguments) if each.init} - {"env_token"}
    assert not config.to_log().keys() & config.trl_dict().keys()


def test_the_token_comes_from_the_flag_or_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_of(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "of the variable")
    assert token_of(None) == "of the variable"
    assert token_of("of the flag") == "of the flag"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("answer_mode", ["value", "sql"]),
        ("weight_sync", ["auto", "disk", "lora", "nccl"]),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(name: str, known: list[str]) -> None:
    with pytest.raises(ValueError, match=f"--{name} must be one of {', '.join(known)}, not 'prose'"):
        SQLEnvArguments(**{name: "prose"})  # type: ignore[arg-type]
    assert all(getattr(SQLEnvArguments(**{name: word}), name) == word for word in known)  # type: ignore[arg-type]


def test_every_argument_is_explained() -> None:
    for kind in (SQLEnvArguments, WarmupArguments):
        assert all(each.metadata["help"].endswith((".", ")")) for each in fields(kind) if each.init), kind


def test_the_tiny_config_is_read_as_written_and_needs_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    config, model = parse_train(["--config", str(TINY)])
    assert capsys.readouterr().err == ""
    written = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    read = vars(model) | vars(config)
    numbers = {key: value for key, value in written.items() if isinstance(value, int | float | list)}
    assert {key: read[key] for key in numbers} == numbers
    assert config.generation_batch_size % config.num_generations == 0


@pytest.mark.parametrize(
    ("content", "problem"), [(None, "No such file"), (b" \n", "the file is empty"), (b"\xff", "not UTF-8")]
)
def test_a_system_prompt_that_cannot_be_used_is_named(content: bytes | None, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--system_prompt .*prompt.txt: .*{problem}"):
        SQLEnvArguments(system_prompt=str(file))


def test_levels_are_read_from_the_easiest_to_the_hardest() -> None:
    assert SQLEnvArguments().difficulties == tuple(Hardness)
    assert WarmupArguments(difficulty="extra, easy").difficulties == (Hardness.EASY, Hardness.EXTRA)
    for wrong in ("simple", "easy,,hard", ""):
        with pytest.raises(
            ConfigError, match="--difficulty takes easy, medium, hard, extra, unknown, separated by commas, not"
        ):
            SQLEnvArguments(difficulty=wrong)
