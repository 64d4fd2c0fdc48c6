"""What `sqlenv train` and `sqlenv warmup` answer before torch is imported, which takes seconds.

Promises:

1. `--help` shows the flags in groups (`help`); `--help-all` is left to TRL's parser.
2. A flag, or a key of `--config`, that nothing knows is refused, with the one that was probably meant. So are a word
   that belongs to no flag, a number that is none, a config file or data that cannot be read, a policy that is not
   there, and an output folder that the run must not write into. The parser judges all other values.
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
from pathlib import Path
from typing import Any

from sqlenv.parser import did_you_mean
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments
from trainer.flags.help import train_help, warmup_help
from trainer.flags.ranges import RANGES, check_ranges
from trainer.flags.table import SEVERAL, TRAIN_FLAGS, WARMUP_FLAGS, FlagTable
from trainer.policy import resolve_policy

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


_OURS = {field.name: str(field.type) for command in Command for field in fields(command.value.ours)}
_NUMBERS: Mapping[str, type[int] | type[float]] = {
    **{name: int if allowed.whole else float for name, allowed in RANGES.items()},
    **{name: int for name, kind in _OURS.items() if kind.startswith("int")},
    **{name: float for name, kind in _OURS.items() if kind.startswith("float")},
}
"""The flags that take numbers, as far as they are known without TRL."""
_SEVERAL = SEVERAL | {name for name, kind in _OURS.items() if kind.startswith("list")}


def look(command: Command, argv: Sequence[str]) -> list[str]:
    """Return the words that the command is to go on with. Raises ConfigError; ends the process after help."""
    if set(HELP_ALL) & set(argv):
        return ["--help"]
    if set(HELP) & set(argv):
        sys.stdout.write(command.value.help())
        sys.exit(0)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _refuse(command, argv)
    words, _ = _words(argv)
    variables = _read("".join(words[CONFIG])).get("env") if CONFIG in words else None
    if isinstance(variables, dict):  # set here, since torch reads OMP_NUM_THREADS when it is imported
        os.environ.update({name: str(value) for name, value in variables.items()})
    return list(argv)


def _refuse(command: Command, argv: Sequence[str]) -> None:
    words, strays = _words(argv)
    config = "".join(words.get(CONFIG, []))
    written = _read(config) if CONFIG in words else {}
    known = command.value.names
    if STAGES in written:
        known = frozenset().union(*(each.value.names for each in Command))
    check_names((f"--{name}" for name in words), known | {CONFIG, "env"}, "flag")
    if STAGES not in written:  # of stages, each has keys of its own; see `trainer.stages`
        check_names(written, known | {"env"}, f"key of {config}:")
    _refuse_strays(strays, known)
    given = {**written, **{name: values if len(values) > 1 else "".join(values) for name, values in words.items()}}
    given |= _numbers(given)
    _check_policy(command, given)
    # Help does not wait for these.
    from env_server.data.loading import check_readable
    from trainer.eval.output_folder import RunKind, find_output

    find_output(RunKind.STAGES if STAGES in given else RunKind[command.name], given)
    if STAGES not in given and (data := given.get("data")):
        for source in str(data).split(",") if command is Command.WARMUP else [str(data)]:
            check_readable(source)


def _refuse_strays(strays: Sequence[str], known: frozenset[str]) -> None:
    for word in strays:
        if word.endswith((".yaml", ".yml")):
            raise ConfigError(f"name the config file by its flag: --{CONFIG} {word}")
        meant = did_you_mean(word, (f"--{name}" for name in known))
        raise ConfigError(
            f"{word!r} belongs to no flag{meant or ': flags begin with --, and a value with spaces is put in quotes'}"
        )


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the flags that take numbers. Raises ConfigError for what is none, or out of range."""
    numbers = {}
    for name, value in given.items():
        if name in _NUMBERS and value not in (None, ""):
            numbers[name] = [_number(name, each) for each in value] if isinstance(value, list) else _number(name, value)
    check_ranges(numbers)
    return numbers


def _number(name: str, value: Any) -> Any:
    """Read a number; a config file may hold it as one, and some flags take "none"."""
    if not isinstance(value, str):
        return value
    try:
        return None if value.lower() == "none" else _NUMBERS[name](value)
    except ValueError:
        whole = "whole " if _NUMBERS[name] is int else ""
        raise ConfigError(f"--{name} takes a {whole}number, not {value!r}") from None


def _check_policy(command: Command, given: Mapping[str, Any]) -> None:
    policy = given.get(MODEL)
    if policy:
        resolve_policy(str(policy), given.get("model_revision"))
    elif command is Command.TRAIN and STAGES not in given:
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


def _words(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The flags of a command line, each with its values, and the words that belong to none of them."""
    found: dict[str, list[str]] = {}
    strays: list[str] = []
    taking = strays
    for word in argv:
        if not re.match(r"--[A-Za-z]", word):
            taking.append(word)
            continue
        flag, equals, value = word[2:].partition("=")
        values = found[flag.replace("-", "_")] = [value] if equals else []
        taking = strays if equals else values
    for name, values in found.items():
        if not any(several.startswith(name) for several in _SEVERAL):  # a flag may be abbreviated
            strays += values[1:]
            del values[1:]
    return found, strays


def _read(path: str) -> Mapping[str, Any]:
    """The keys of a config file. Raises ConfigError."""
    if path and not Path(path).is_file():
        near = did_you_mean(path, map(str, Path(path).parent.glob("*.y*ml")))
        raise ConfigError(f"--config {path}: there is no such file{near}")
    if find_spec("yaml") is None:
        return {}  # it comes with the packages of training, which are missed next
    from trainer.flags.config_file import read_config

    return read_config(path)
