"""What a user has written, by flag or in `--config`, apart from everything that is a default.

Defaults that depend on other flags, and the table of flags (`table`), must tell one from the other: a value that equals
a default may have been written down on purpose.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from trl import TrlParser

from sqlenv.parser import refuse
from trainer.config import ConfigError
from trainer.flags.config_file import CONFIG_FLAG, read_config


class FlagParser(TrlParser):  # type: ignore[misc]  # TRL carries no types
    """TRL's parser, for `prog`: what is wrong is one line, without a usage of two hundred flags."""

    def __init__(self, kinds: Sequence[type], prog: str, **options: Any) -> None:
        super().__init__(kinds, prog=prog, usage=f"{prog} [flags]", **options)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        refuse(self, message)

    def parse_args_and_config(self, args: Sequence[str], **options: Any) -> tuple[Any, ...]:
        """As TRL's, of a file that is read as `config_file` does. Raises ConfigError, ValueError."""
        config, flags = split_config(args)
        written = {} if config is None else read_config(config)
        variables = written.pop("env", None) or {}
        if not isinstance(variables, dict):
            raise ConfigError(f"{CONFIG_FLAG} {config}: env must hold a value for each environment variable")
        os.environ.update({name: str(value) for name, value in variables.items()})
        if unknown := self.set_defaults_with_config(**written):
            raise ConfigError(f"{CONFIG_FLAG} {config}: there is no flag {unknown[0]}")
        parsed: tuple[Any, ...] = super().parse_args_and_config(flags, **options)
        return parsed


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
    place = next((i for i, word in enumerate(flags) if word.partition("=")[0] == CONFIG_FLAG), None)
    if place is None:
        return None, flags
    _, equals, value = flags.pop(place).partition("=")
    path = value if equals else flags.pop(place) if place < len(flags) else ""
    if not path:
        raise ConfigError(f"{CONFIG_FLAG} wants the path of a YAML file")
    return path, flags


def _check_choices(kinds: Sequence[type], written: dict[str, Any]) -> None:
    """Refuse what argparse would refuse by flag: it does not look at defaults, which a config's values are for it."""
    for field in (field for kind in kinds for field in fields(kind)):
        choices = field.metadata.get("choices")
        value = written.get(field.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(f"--{field.name} must be one of {list(choices)}, not {value!r}")
