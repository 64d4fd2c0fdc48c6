"""Every field of TRL's dataclasses is in its command's table, and what the table says is what a user reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, ModelConfig, SFTConfig

from sqlenv import cli
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments
from trainer.flags.defaults import Machine, train_defaults, warmup_defaults
from trainer.flags.given import FlagParser, read_given
from trainer.flags.table import SEVERAL, TRAIN_FLAGS, WARMUP_FLAGS, FlagTable, Note

TABLES = {"train": TRAIN_FLAGS, "warmup": WARMUP_FLAGS}
DEFAULTS = {"train": train_defaults({}, Machine()), "warmup": warmup_defaults({}, Machine())}
KINDS: dict[str, tuple[type, ...]] = {
    "train": (SQLEnvArguments, GRPOConfig, ModelConfig),
    "warmup": (WarmupArguments, SFTConfig, ModelConfig),
}
NOWHERE = ["--model_name_or_path", "nowhere", "--output_dir", "nowhere"]
NOWHERE += ["--data", "answers:synthetic", "--answer_mode", "sql"]
"""Both commands get past their flags, and then find that the data set and the mode do not go together."""
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
    "weight_sync_check": "off",
    "hub_strategy": "end",
    "optim": "sgd",
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


def said(capsys: pytest.CaptureFixture[str], command: str, flags: Sequence[str]) -> list[str]:
    """The lines on stderr of a command that ends with status 2; the precision is given, so none is said of it."""
    assert cli.main([command, "--use_cpu", "true", "--bf16", "false", *NOWHERE, *flags]) == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", TABLES)
def test_the_table_knows_every_field_and_no_other(command: str) -> None:
    _, *of_trl = KINDS[command]
    accepted = {field.name for kind in of_trl for field in fields(kind)}
    table = TABLES[command]
    known = table.honoured | table.notes.keys()
    assert known - accepted == set(), "TRL has no such field"
    assert not any("\n" in note.sentence or note.sentence.endswith(".") for note in table.notes.values())
    assert accepted - known == set(), "the table does not say what becomes of these"
    assert table.honoured & table.notes.keys() == set(), "a field is one or the other"


@pytest.mark.parametrize("command", TABLES)
def test_the_fields_that_take_several_values_are_known(command: str) -> None:
    parser = FlagParser(KINDS[command], command)
    several = {action.dest for action in parser._actions if action.nargs == "+"}
    assert several - {"rejection_sampling", "reward_functions"} == SEVERAL & {action.dest for action in parser._actions}


@pytest.mark.parametrize("command", TABLES)
def test_needs_and_choices_are_of_fields_that_are_honoured(command: str) -> None:
    table = TABLES[command]
    ours, *_ = KINDS[command]
    honoured = table.honoured | {field.name for field in fields(ours)}
    assert {name for need in table.needs for name in need.names.split()} <= honoured
    assert table.choices.keys() <= honoured


def read(command: str, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a user gives who sets all of these fields to `value_of`, by flag or, where that cannot be, by config."""
    flags = [part for name in names if name not in BY_CONFIG for part in (f"--{name}", value_of(command, name))]
    config = folder / "run.yaml"
    config.write_text("".join(f"{name}: {BY_CONFIG[name]}\n" for name in names if name in BY_CONFIG) or "{}")
    given = read_given(KINDS[command], [*flags, "--config", str(config)], "sqlenv")
    assert given.keys() == set(names)
    return given


def defaults(command: str) -> dict[str, Any]:
    of_fields = {field.name: field.default for kind in KINDS[command] for field in fields(kind)}
    return of_fields | DEFAULTS[command]


@pytest.mark.parametrize("command", TABLES)
def test_each_refused_flag_ends_the_command_with_its_sentence(command: str, tmp_path: Path) -> None:
    notes = {name: note for name, note in TABLES[command].notes.items() if note.refused}
    for name, value in read(command, list(notes), tmp_path).items():
        with pytest.raises(ConfigError) as refusal:
            TABLES[command].check({name: value}, defaults(command))
        assert str(refusal.value) == f"--{name} {value}: {notes[name].sentence}"


@pytest.mark.parametrize("command", TABLES)
def test_each_flag_without_effect_is_said(command: str, tmp_path: Path) -> None:
    notes = {name: note for name, note in TABLES[command].notes.items() if not note.refused}
    given = read(command, list(notes), tmp_path)
    assert TABLES[command].check(given, defaults(command)) == [
        f"--{name} has no effect: {notes[name].sentence}" for name in given
    ]


@pytest.mark.parametrize("command", TABLES)
def test_each_flag_that_needs_another_says_so(command: str, tmp_path: Path) -> None:
    table = TABLES[command]
    needs = {name: need for need in table.needs for name in need.names.split()}
    given = read(command, list(needs), tmp_path)
    off = {
        "gradient_checkpointing": False,
        "vllm_importance_sampling_correction": False,
        "save_strategy": "no",
        "max_episodes": 0,
    }
    resolved = defaults(command) | off | {"max_steps": 7, "eval_strategy": "no", "difficulty": "easy,medium"}
    said = table.check_needs(given, resolved)
    assert said == [f"--{name} has no effect without {need.words}" for name, need in needs.items()]


@pytest.mark.parametrize(
    ("command", "flags", "line"),
    [
        ("train", ("--top_p", "0.5"), "--top_p 0.5: the engines sample from the policy's whole distribution"),
        ("warmup", ("--eval_strategy", "steps"), "--eval_strategy steps: a warm-up evaluates nothing"),
    ],
)
def test_a_refusal_is_all_that_a_user_reads(
    command: str, flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (only,) = said(capsys, command, flags)
    assert only.startswith(f"sqlenv {command}: {line}")


@pytest.mark.parametrize("command", TABLES)
def test_the_command_says_what_does_nothing_and_goes_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    no_effect, needs, end = said(capsys, command, ["--do_train", "true", "--use_dora", "true"])
    assert no_effect == f"sqlenv {command}: --do_train has no effect: the command trains"
    assert needs == f"sqlenv {command}: --use_dora has no effect without --use_peft"
    assert "answers:synthetic" in end


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
    assert "answers:synthetic" in end


@pytest.mark.parametrize("name", TRAIN_FLAGS.choices)
def test_what_trl_would_find_out_later_is_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--{name} must be one of \["):
        TRAIN_FLAGS.check({name: "nonsense"}, {})
    help_text = str(next(f.metadata["help"] for f in fields(GRPOConfig) if f.name == name))
    assert all(choice in help_text for choice in TRAIN_FLAGS.choices[name])


def test_no_checkpoint_of_a_warm_up_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, "warmup", ["--save_strategy", "best"])
    assert line.startswith("sqlenv warmup: --save_strategy must be one of ['no', ")


def test_a_table_compares_with_the_defaults_that_it_is_given() -> None:
    table = FlagTable(frozenset(), {"a": Note("no", refused=True, neutral=(5,)), "b": Note("why", refused=False)}, ())
    assert table.check({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2}) == []
    assert table.check({"a": 5, "b": 3}, {"a": 1, "b": 2}) == ["--b has no effect: why"]
    with pytest.raises(ConfigError, match=r"^--a 2 3: no$"):
        table.check({"a": [2, 3]}, {"a": 1})
