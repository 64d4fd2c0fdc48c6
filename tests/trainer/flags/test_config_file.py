"""Config files of `sqlenv train` and `warmup`: what is wrong is told, and a word is read as its flag reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import ModelConfig

from trainer.config import ConfigError
from trainer.flags.config_file import read_config, split_config
from trainer.flags.configs import SQLEnvConfig
from trainer.flags.early import Command, look
from trainer.training.arguments import FlagParser, parse_train


def given(*words: str) -> dict[str, Any]:
    return FlagParser((SQLEnvConfig, ModelConfig), "sqlenv train").given(words)


UTF16 = "seed: 1\n".encode("utf-16")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"seed: 1\n\tbeta: 2\n", ["line 2"]),
        (b"env:\n\tA: 2\n", ["line 2"]),
        (UTF16, ["UTF-8"]),
        (UTF16[2:], []),
        (b"seed: \xff\n", ["UTF-8"]),
        (b"seed: 1\x00\n", []),
        (b"- seed: 1\n", ["key"]),
        (b"", ["key"]),
        (b"seed: [1\n", ["line 2"]),
        (b"seed: 1\n---\nseed: 2\n", ["line 2"]),
        (b"seed: !!python/object:os.system 1\n", ["line 1"]),
        (b"beta: 0\nseed: 1\n\nbeta: 0\n", ["beta", "line 4"]),
        (b"model_init_kwargs:\n  a: 1\n  a: 2\n", ["a", "line 3"]),
        (b"stages:\n- kind: grpo\n  seed: 1\n  seed: 2\n", ["seed", "line 4"]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("command", Command)
def test_what_is_wrong_with_a_file_is_told_before_anything_else(
    command: Command, content: bytes, named: list[str], config: Path
) -> None:
    config.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        look(command, ["--config", str(config)])
    text = str(refused.value)
    assert [word for word in (str(config), *named) if word not in text] == []
    assert "\n" not in text
    assert text.count(str(config)) == 1


@pytest.mark.parametrize("text", ["\ufeffsave_strategy: no\n", "save_strategy: no\n", 'save_strategy: "no"\n'])
def test_a_word_that_is_a_choice_is_no_switch(text: str, config: Path) -> None:
    config.write_text(text, encoding="utf-8")
    assert given("--config", str(config)) == {"save_strategy": "no"}
    flags = ["--model_name_or_path", "x", "--use_cpu", "true", "--bf16", "false"]
    assert parse_train(["--config", str(config), *flags])[0].save_strategy == "no"


@pytest.mark.parametrize(
    ("text", "switches"),
    [
        ("use_peft: yes\nbf16: no\nuse_cpu: on\nlog_completions: off\n", (True, False, True, False)),
        ("use_peft: true\nbf16: False\nuse_cpu: 'yes'\nlog_completions: 'n'\n", (True, False, True, False)),
    ],
)
def test_a_switch_may_be_written_in_any_of_yamls_words(text: str, switches: tuple[bool, ...], config: Path) -> None:
    config.write_text(text, encoding="utf-8")
    found = given("--config", str(config))
    assert tuple(found[name] for name in ("use_peft", "bf16", "use_cpu", "log_completions")) == switches


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("chat_template_kwargs: {enable_thinking: no}\n", {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            "stages: [{kind: grpo, eval_strategy: no}]\n",
            {"stages": [{"kind": "grpo", "eval_strategy": "no"}]},
        ),
        ("reward_weights: [1, 2e-1, 1.5e3]\n", {"reward_weights": [1, 0.2, 1500.0]}),
        ("run_name: 2026-11-25\n", {"run_name": "2026-11-25"}),
        ("env: {NO: no, 1: 2}\n", {"env": {"NO": False, "1": 2}}),
        ("seed: 1\n<<: {beta: 2, seed: 3}\n", {"seed": 1, "beta": 2}),
    ],
)
def test_values_are_what_was_written(text: str, read: dict[str, Any], config: Path) -> None:
    config.write_text(text, encoding="utf-8")
    assert read_config(str(config)) == read


def test_a_config_may_be_named_with_an_equals_sign(config: Path) -> None:
    config.write_text("seed: 3\n", encoding="utf-8")
    assert split_config([f"--config={config}", "--beta", "1"]) == (str(config), ["--beta", "1"])
    assert given(f"--config={config}") == {"seed": 3}
