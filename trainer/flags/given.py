"""What a user has written, by flag or in `--config`, apart from everything that is a default.

Defaults that depend on other flags, and the table of flags (`table`), must tell one from the other: a value that equals
a default may have been written down on purpose.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from sqlenv.parser import refuse
from trainer.config import ConfigError, config_errors

CONFIG_FLAG = "--config"


class FlagParser(TrlParser):  # type: ignore[misc]  # TRL carries no types
    """TRL's parser, for `prog`: what is wrong is one line, without a usage of two hundred flags."""

    def __init__(self, kinds: Sequence[type], prog: str, **options: Any) -> None:
        super().__init__(kinds, prog=prog, usage=f"{prog} [flags]", **options)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        refuse(self, message)


def read_given(kinds: Sequence[type], argv: Sequence[str], prog: str) -> dict[str, Any]:
    """Return the fields of the dataclasses that flags or the config file name, with their values; a flag wins.

    Unknown flags and keys are left to the parser that reads the arguments themselves, and `-h` too. A value that does
    not fit its flag ends the process as argparse does, with status 2, but in one line. Raises
    ConfigError for a config file that cannot be read, or a value in it that is none of its field's choices.
    """
    parser = FlagParser(kinds, prog=prog, add_help=False)
    # Not `set_defaults`, which would put the mark itself where nothing was given.
    parser.set_defaults_with_config(**{field.name: argparse.SUPPRESS for kind in kinds for field in fields(kind)})
    config, flags = split_config(argv)
    if config is not None:
        written = {key: value for key, value in read_config(config).items() if key != "env"}
        _check_choices(kinds, written)
        parser.set_defaults_with_config(**written)
    namespace, _ = parser.parse_known_args(flags)
    return dict(vars(namespace))


def split_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the config file that flags name, if any, and the other flags. Raises ConfigError."""
    flags = list(argv)
    if CONFIG_FLAG not in flags:
        return None, flags
    place = flags.index(CONFIG_FLAG)
    _, *path = flags[place : place + 2]
    del flags[place : place + 2]
    if not path:
        raise ConfigError(f"{CONFIG_FLAG} wants the path of a YAML file")
    return path[0], flags


def read_config(path: str) -> dict[str, Any]:
    """Return the keys of a config file. Raises ConfigError."""
    with config_errors():
        try:
            written = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"{CONFIG_FLAG} {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(written, dict):
        raise ConfigError(f"{CONFIG_FLAG} {path} must hold one key for each flag")
    return {str(key): value for key, value in written.items()}


def _check_choices(kinds: Sequence[type], written: dict[str, Any]) -> None:
    """Refuse what argparse would refuse by flag: it does not look at defaults, which a config's values are for it."""
    for field in (field for kind in kinds for field in fields(kind)):
        choices = field.metadata.get("choices")
        value = written.get(field.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(f"--{field.name} must be one of {list(choices)}, not {value!r}")
