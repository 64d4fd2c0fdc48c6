"""Every field of TRL's dataclasses is in its command's table, and what the table says is what a user reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, ModelConfig, SFTConfig

import sqlenv
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments
from trainer.flags.given import read_given
from trainer.flags.table import TRAIN_FLAGS, WARMUP_FLAGS, FlagTable, Need, Note

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
TABLES = {"train": TRAIN_FLAGS, "warmup": WARMUP_FLAGS}
KINDS: dict[str, tuple[type, ...]] = {
    "train": (SQLEnvArguments, GRPOConfig, ModelConfig),
    "warmup": (WarmupArguments, SFTConfig, ModelConfig),
}
NOWHERE = {
    "train": ["--model_name_or_path", "nowhere", "--data", "/no/such/data"],
    "warmup": ["--model_name_or_path", "nowhere", "--data", "/no/such/data", "--output_dir", "nowhere"],
}
"""Both commands get past their flags, and then find no data set."""
VALUES = {
    "local_rank": "0",
    "use_transformers_paged": "true",
    "use_cache": "true",
    "data_seed": "3",
    "prediction_loss_only": "true",
    "eval_strategy": "steps",
    "train_sampling_strategy": "group_by_length",
    "packing_strategy": "wrapped",
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": "2",
    "vllm_importance_sampling_clip_min": "0.1",
    "vllm_mode": "colocate",
    "weight_sync": "disk",
    "weight_sync_pause": "none",
    "hub_strategy": "end",
    "truncation_mode": "keep_end",
    "include_num_input_tokens_seen": "true",
    "bnb_4bit_quant_type": "fp4",
    "greater_is_better": "true",
    "disable_tqdm": "true",
    "eval_packing": "true",
    "completion_only_loss": "true",
    "fsdp_config": "{}",
    "gradient_checkpointing_kwargs": '{"use_reentrant": false}',
    "metric_for_best_model": "reward",
}
"""A value that is not the default, where `value_of` would not find one."""


BY_CONFIG = {"parallelism_config": "{'tp_size': 2}", "liger_kernel_config": "{'rope': True}"}
"""Mappings that no flag can carry."""


def value_of(command: str, name: str) -> str:
    """A value of the field's type that is neither its default nor neutral."""
    (default,) = (field.default for kind in KINDS[command] for field in fields(kind) if field.name == name)
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return str(not default).lower()
    if isinstance(default, int | float):
        return str(default + 2)
    if name.endswith("kwargs"):
        return '{"a": 1}'
    return "0.5" if name in ("min_p", "neftune_noise_alpha") else "3"


def setting(command: str, name: str, folder: Path) -> list[str]:
    """The flags that set the field to `value_of`."""
    if name not in BY_CONFIG:
        return [f"--{name}", value_of(command, name)]
    config = folder / "run.yaml"
    config.write_text(f"{name}: {BY_CONFIG[name]}\n", encoding="utf-8")
    return ["--config", str(config)]


def said(capsys: pytest.CaptureFixture[str], command: str, flags: Sequence[str]) -> list[str]:
    """The lines on stderr of a command that ends with status 2."""
    assert sqlenv.main([command, "--use_cpu", "true", *NOWHERE[command], *flags]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", TABLES)
def test_the_table_knows_every_field_and_no_other(command: str) -> None:
    _, *of_trl = KINDS[command]
    accepted = {field.name for kind in of_trl for field in fields(kind)}
    table = TABLES[command]
    known = table.honoured | table.notes.keys()
    assert known - accepted == set(), "TRL has no such field"
    assert accepted - known == set(), "the table does not say what becomes of these"
    assert table.honoured & table.notes.keys() == set(), "a field is one or the other"


@pytest.mark.parametrize("command", TABLES)
def test_needs_and_choices_are_of_fields_that_are_honoured(command: str) -> None:
    table = TABLES[command]
    ours, *_ = KINDS[command]
    honoured = table.honoured | {field.name for field in fields(ours)}
    assert {name for need in table.needs for name in need.names.split()} <= honoured
    assert table.choices.keys() <= honoured


@pytest.mark.parametrize("command", TABLES)
def test_sentences_end_without_a_full_stop_and_are_one_line(command: str) -> None:
    for note in TABLES[command].notes.values():
        assert "\n" not in note.sentence
        assert not note.sentence.endswith(".")


REFUSED = [(c, n) for c, table in TABLES.items() for n, note in table.notes.items() if note.refused]
INEFFECTIVE = [(c, n) for c, table in TABLES.items() for n, note in table.notes.items() if not note.refused]
NEEDING = [(c, n, need) for c, table in TABLES.items() for need in table.needs for n in need.names.split()]


@pytest.mark.parametrize(("command", "name"), REFUSED)
def test_a_refused_flag_ends_the_command_with_its_sentence(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = BY_CONFIG.get(name) or value_of(command, name)
    (line,) = said(capsys, command, setting(command, name, tmp_path))
    start, sentence = f"sqlenv {command}: --{name} ", f": {TABLES[command].notes[name].sentence}"
    assert line.startswith(start)
    assert line.endswith(sentence)
    shown = line[len(start) : -len(sentence)]
    assert shown.lower() in (value, f"{value}.0")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("command", "name"), INEFFECTIVE)
def test_a_flag_without_effect_is_said_and_the_command_goes_on(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    advice, *others, end = said(capsys, command, [f"--{name}", value_of(command, name)])
    assert advice == f"sqlenv {command}: --{name} has no effect: {TABLES[command].notes[name].sentence}"
    assert others == []
    assert "/no/such/data" in end


@pytest.mark.parametrize(("command", "name", "need"), NEEDING, ids=lambda part: part if isinstance(part, str) else "")
def test_a_flag_that_needs_another_says_so(
    command: str, name: str, need: Need, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {
        "--gradient_checkpointing": ["--gradient_checkpointing", "false"],
        "--vllm_importance_sampling_correction": ["--vllm_importance_sampling_correction", "false"],
        "--save_strategy steps": ["--save_strategy", "no"],
        "--max_steps -1": ["--max_steps", "7"],
    }
    advice, end = said(capsys, command, [*without.get(need.words, []), *setting(command, name, tmp_path)])
    assert advice == f"sqlenv {command}: --{name} has no effect without {need.words}"
    assert "/no/such/data" in end


@pytest.mark.parametrize(
    "flags",
    [
        ("--top_p", "1.0", "--top_k", "-1", "--min_p", "0", "--repetition_penalty", "1", "--generation_kwargs", "{}"),
        ("--lora_dropout", "0", "--use_peft", "true", "--lora_r", "8", "--vllm_mode", "server"),
        ("--gradient_checkpointing_kwargs", '{"use_reentrant": false}', "--num_train_epochs", "2"),
        ("--beta", "0.1", "--use_bias_correction_kl", "false", "--save_steps", "3"),
    ],
)
def test_neutral_values_and_flags_with_what_they_need_pass_in_silence(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (end,) = said(capsys, "train", flags)
    assert "/no/such/data" in end


@pytest.mark.parametrize("name", TRAIN_FLAGS.choices)
def test_what_trl_would_find_out_later_is_refused_at_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, "train", [f"--{name}", "nonsense"])
    assert line.startswith(f"sqlenv train: --{name} must be one of [")
    help_text = str(next(f.metadata["help"] for f in fields(GRPOConfig) if f.name == name))
    assert all(choice in help_text for choice in TRAIN_FLAGS.choices[name])


def test_no_checkpoint_of_a_warm_up_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, "warmup", ["--save_strategy", "best"])
    assert line.startswith("sqlenv warmup: --save_strategy must be one of ['no', ")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_sets_nothing_in_vain(path: Path) -> None:
    assert TRAIN_FLAGS.check(read_given(KINDS["train"], ["--config", str(path)], "sqlenv"), {}) == []


def test_a_table_compares_with_the_defaults_that_it_is_given() -> None:
    table = FlagTable(frozenset(), {"a": Note("no", refused=True, neutral=(5,)), "b": Note("why", refused=False)}, ())
    assert table.check({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}) == []
    assert table.check({"a": 5, "b": 3}, {"a": 1, "b": 2}) == ["--b has no effect: why"]
    with pytest.raises(ConfigError, match=r"^--a 2 3: no$"):
        table.check({"a": [2, 3]}, {"a": 1})


def test_needs_are_judged_by_what_was_resolved() -> None:
    table = FlagTable(frozenset(), {}, (Need("a b", "--c", lambda values: bool(values["c"])),))
    given: dict[str, Any] = {"a": 1}
    assert table.check_needs(given, {"c": False}) == ["--a has no effect without --c"]
    assert table.check_needs(given, {"c": True}) == []
