"""The help of the commands whose flags are TRL's: complete as to ours, right as to the defaults of TRL's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
from trl import GRPOConfig, ModelConfig, SFTConfig

from sqlenv import cli
from trainer.config import SQLEnvArguments, WarmupArguments
from trainer.flags.defaults import Machine, train_defaults, warmup_defaults
from trainer.flags.help import TRAIN_GROUPS, TRAIN_TRL, WARMUP_GROUPS, WARMUP_TRL, TRLFlag, train_help, warmup_help

KINDS: list[tuple[type, Mapping[str, str], Mapping[str, TRLFlag], type, Callable[..., Mapping[str, Any]]]] = [
    (SQLEnvArguments, TRAIN_GROUPS, TRAIN_TRL, GRPOConfig, train_defaults),
    (WarmupArguments, WARMUP_GROUPS, WARMUP_TRL, SFTConfig, warmup_defaults),
]


@pytest.mark.parametrize(("ours", "groups", "trl", "config", "defaults"), KINDS)
def test_every_flag_of_ours_is_in_one_group_and_trls_are_said_to_do_what_they_do(
    ours: type,
    groups: Mapping[str, str],
    trl: Mapping[str, TRLFlag],
    config: type,
    defaults: Callable[..., Mapping[str, Any]],
) -> None:
    shown = " ".join(groups.values()).split()
    own = {field.name for field in fields(ours)}
    assert len(shown) == len(set(shown))
    assert own <= set(shown)
    theirs = {field.name: field.default for kind in (config, ModelConfig) for field in fields(kind)}
    assert set(shown) - own <= theirs.keys()
    for name in set(shown) - own:
        said = trl[name].default
        assert said is None or said == {**theirs, **defaults({}, Machine())}[name], name


@pytest.mark.parametrize(("text", "kind"), [(train_help(), SQLEnvArguments), (warmup_help(), WarmupArguments)])
def test_help_fits_a_screen_of_eighty_columns_and_teaches(text: str, kind: type) -> None:
    assert (
        text.index("--model_name_or_path") < text.index("--data") < text.rindex("--help-all") < text.index("examples")
    )
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 300, "TRL's own is a thousand lines longer"
    words = " ".join(text.split())
    assert all(re.search(rf"--{field.name}\b|--env\b", words) for field in fields(kind))


def test_all_flags_are_listed_with_a_short_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: sqlenv train [flags]\n")
    assert "--adam_beta1" in text
