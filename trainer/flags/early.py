"""What `sqlenv train` and `sqlenv warmup` answer before torch is imported, which takes seconds.

Promises:

1. `--help` shows the flags in groups (`help`); `--help-all` is left to TRL's parser.
2. A flag, or a key of `--config`, that nothing knows is refused, with the one that was probably meant. So are a config
   file that cannot be read, and a policy that is not there. Values are not looked at: the parser judges those.
3. What is refused here would be refused later. Several ranks look later alone, so that one of them speaks for all.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from inference.adapters import PolicyNameError, find_policy
from sqlenv.parser import did_you_mean
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments
from trainer.flags.help import train_help, warmup_help
from trainer.flags.table import TRAIN_FLAGS, WARMUP_FLAGS, FlagTable

STAGES = "stages"
HELP, HELP_ALL, CONFIG, MODEL = ("-h", "--help"), ("--help-all", "--help_all"), "config", "model_name_or_path"


@dataclass(frozen=True, slots=True)
class _Flags:
    """A command's flags: TRL's in the table, ours as fields."""

    table: FlagTable
    ours: type
    help: Callable[[], str]

    @property
    def names(self) -> frozenset[str]:
        """All of them, without dashes."""
        return self.table.honoured | self.table.notes.keys() | {field.name for field in fields(self.ours)}


class Command(Enum):
    """The commands whose flags are TRL's."""

    TRAIN = _Flags(TRAIN_FLAGS, SQLEnvArguments, train_help)
    WARMUP = _Flags(WARMUP_FLAGS, WarmupArguments, warmup_help)


def look(command: Command, argv: Sequence[str]) -> list[str]:
    """Return the words that the command is to go on with. Raises ConfigError; ends the process after help."""
    if set(HELP_ALL) & set(argv):
        return ["--help"]
    if set(HELP) & set(argv):
        sys.stdout.write(command.value.help())
        sys.exit(0)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _refuse(command, argv)
    return list(argv)


def _refuse(command: Command, argv: Sequence[str]) -> None:
    values = _values(argv)
    written = _read(values[CONFIG]) if CONFIG in values else {}
    known = command.value.names
    if STAGES in written:
        known = frozenset().union(*(each.value.names for each in Command))
    check_names((f"--{name}" for name in values), known | {CONFIG, "env"}, "flag")
    if STAGES not in written:  # of stages, each has keys of its own; see `trainer.stages.plan`
        check_names(written, known | {"env"}, f"key of {values.get(CONFIG)}:")
    policy = values.get(MODEL) or written.get(MODEL)
    if policy:
        try:
            find_policy(str(policy), values.get("model_revision") or written.get("model_revision"))
        except PolicyNameError as error:
            raise ConfigError(str(error)) from None
    elif command is Command.TRAIN and STAGES not in written:
        raise ConfigError(
            "name the policy to train with --model_name_or_path (a folder or a model on the Hub), or begin with "
            "--config configs/tiny.yaml, which takes two CPU cores and no GPU"
        )


def check_names(given: Iterable[str], known: frozenset[str], what: str) -> None:
    """Refuse names that nothing knows; flags begin with dashes, and may be abbreviated. Raises ConfigError."""
    for word in given:
        name = word.lstrip("-")
        dashes = word[: len(word) - len(name)]
        switched_off = name.startswith("no_") and name[3:] in known
        abbreviated = bool(dashes) and any(other.startswith(name) for other in known)
        if name not in known and not switched_off and not abbreviated:
            raise ConfigError(f"there is no {what} {word}{did_you_mean(word, (dashes + other for other in known))}")


def _values(argv: Sequence[str]) -> dict[str, str]:
    """The flags of a command line, each with the word that follows it, if that is a value."""
    found = {}
    for word, after in zip_longest(argv, argv[1:], fillvalue=""):
        if re.match(r"--[A-Za-z]", word):
            flag, equals, value = word[2:].partition("=")
            found[flag.replace("-", "_")] = value if equals else "" if after.startswith("--") else after
    return found


def _read(path: str) -> Mapping[str, Any]:
    """The keys of a config file. Raises ConfigError."""
    if path and not Path(path).is_file():
        near = did_you_mean(path, map(str, Path(path).parent.glob("*.y*ml")))
        raise ConfigError(f"--config {path}: there is no such file{near}")
    if find_spec("yaml") is None:
        return {}  # it comes with the packages of training, which are missed next
    from trainer.flags.config_file import read_config

    return read_config(path)
