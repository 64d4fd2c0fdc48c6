"""The parser of a command's flags: argparse, with errors that are one line and say what was probably meant.

What every command has in common, whichever package it is in. Guarantees:

1. An unknown flag is named before one that is missing, with the known one that is most like it.
2. A value that is none of a flag's choices is answered with all of them.
3. Flags are written out: an abbreviation that is clear today would be another flag after the next one is added.
4. Importing this module loads argparse and difflib, and nothing else.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Choice = TypeVar("Choice", bound=Enum)

WIDTH = 100
"""Of help in columns, where the terminal has as many."""
FLAG_COLUMN = 34
"""Where the texts of flags begin."""
MOST_IN_USAGE = 8
"""Flags that the line of usage names one by one."""


class HelpText(argparse.RawDescriptionHelpFormatter):
    """Help with room for long flags, and descriptions as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=FLAG_COLUMN)
        self._width = min(self._width, WIDTH)


class Parser(argparse.ArgumentParser):
    """A parser for `prog`; arguments as argparse's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpText, "allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for what a namespace may be
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse's, but for flags that are unknown: those end the process whatever else is wrong."""
        if args is not None and self._subparsers is None:
            flags = self._option_string_actions
            for word in args:
                flag = word.partition("=")[0]
                if re.match(r"--[A-Za-z]", flag) and flag not in flags:
                    self.error(f"there is no flag {flag}{did_you_mean(flag, flags)}")
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Argparse's, with a usage that names what is required, where all flags would be a page."""
        optional = [action for action in self._actions if action.option_strings and not action.required]
        if self.usage is None and len(optional) > MOST_IN_USAGE:
            required = [action for action in self._actions if action.required]
            words = " ".join(
                " ".join((*action.option_strings, str(action.metavar or action.dest.upper()))) for action in required
            )
            self.usage = " ".join(filter(None, ("%(prog)s", words, "[flags]")))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End the process with status 2 and one line."""
        refuse(self, message)


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the process with status 2 and what argparse has to say, in one line."""
    said = re.fullmatch(r"argument ([^\s/]+)\S*: invalid choice: (.*) \(choose from (.*)\)", message, re.DOTALL)
    if said is not None:
        name, value, known = said.groups()
        value, choices = value.strip("'"), [choice.strip("'") for choice in known.split(", ")]
        message = f"{name} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}"
    message = re.sub(r"^argument (--[^\s/]+)\S*: (invalid .*)", r"\1: \2", message)
    message = re.sub(r"^argument (--[^\s/]+)\S*: ", r"\1 ", message)
    parser.exit(2, f"{parser.prog}: {message} ({parser.prog} --help lists the flags)\n")


def choice(kind: type[Choice]) -> Callable[[str], Choice]:
    """What argparse is given as the type of a flag whose values are those of an Enum."""

    def read(text: str) -> Choice:
        try:
            return kind(text)
        except ValueError:
            known = [str(member.value) for member in kind]
            raise argparse.ArgumentTypeError(
                f"must be one of {', '.join(known)}, not {text!r}{did_you_mean(text, known)}"
            ) from None

    return read


def whole_number(least: int) -> Callable[[str], int]:
    """What argparse is given as the type of a flag that is a whole number from `least` on."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return number

    return read


def output_file(text: str) -> Path:
    """What argparse is given as the type of a flag that names a file to write, which is tried before any work."""
    return _output(text, unwritable_file)


def output_folder(text: str) -> Path:
    """What argparse is given as the type of a flag that names a folder to write into or to make."""
    return _output(text, unwritable_folder)


def _output(text: str, problem_of: Callable[[Path], str]) -> Path:
    path = Path(text)
    if problem := problem_of(path):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {problem}. Choose another place")
    return path


def unwritable_file(path: Path) -> str:
    """Say why a file cannot be written or replaced; empty where it can. Nothing is left behind.

    What is there and is no regular file, such as a pipe, is not tried.
    """
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists() and not path.is_file():
            return ""
        if path.is_file():
            path.open("ab").close()
    except OSError as error:
        return str(error.strerror)
    return unwritable_folder(path.parent) if path.parent.exists() else f"there is no folder {path.parent}"


def unwritable_folder(path: Path) -> str:
    """Say why a folder cannot be made or written into; empty where it can. Nothing is left behind."""
    from tempfile import TemporaryFile

    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            return f"{there} is no folder"
        TemporaryFile(dir=there).close()
    except OSError as error:
        return str(error.strerror)
    return ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what it is most like, or nothing."""
    # The dashes that flags begin with would make all of them alike.
    names = {name.lstrip("-"): name for name in known}
    likest = get_close_matches(word.lstrip("-"), names, 1)
    return f"; did you mean {names[likest[0]]}?" if likest else ""
