"""What is read of the flags from source is what the dataclasses are, and what TRL's parser takes."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

import pytest
from trl import ModelConfig

from trainer.flags.configs import SQLEnvConfig, WarmupConfig
from trainer.flags.early import Command, flags_of
from trainer.training.arguments import FlagParser

KINDS = {Command.TRAIN: SQLEnvConfig, Command.WARMUP: WarmupConfig}
COMPUTED = {"optim", "include_for_metrics", "vllm_server_port"}
"""Fields whose default is no literal in the source."""


@pytest.mark.parametrize("command", Command)
def test_names_and_defaults_are_those_of_the_dataclasses(command: Command) -> None:
    theirs = {each.name: each for kind in (KINDS[command], ModelConfig) for each in fields(kind) if each.init}
    flags = flags_of(command)
    assert flags.keys() == theirs.keys()
    for name in theirs.keys() - COMPUTED:
        default = theirs[name].default
        factory: Any = theirs[name].default_factory
        default = factory() if default is MISSING else default
        assert flags[name].default == getattr(default, "value", default), name


@pytest.mark.parametrize("command", Command)
def test_types_are_those_of_trls_parser(command: Command) -> None:
    flags = flags_of(command)
    for action in FlagParser((KINDS[command], ModelConfig), command.prog)._actions:
        options = flags[action.dest].options
        if isinstance(action, argparse._StoreFalseAction):
            assert flags[action.dest].default is True
        elif "type" in options and options["type"] is not str:
            for text in ("7", "1.5", "none", "x"):
                assert parsed(action.type, text) == parsed(options["type"], text), action.dest
        assert (action.nargs == "+") == (options.get("nargs") == "+"), action.dest


def parsed(kind: Any, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return ValueError


def test_own_flags_come_first() -> None:
    for command in Command:
        own = [flag.own for flag in flags_of(command).values()]
        assert own == sorted(own, reverse=True)
        assert 10 <= sum(own) <= 30
