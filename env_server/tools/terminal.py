"""What the commands of `sqlenv data` print and read at the terminal, and how they tell of a disk that refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from env_server.errors import DataError


def say(text: str) -> None:
    """Print a line, however long."""
    Console(highlight=False).print(text, markup=False, soft_wrap=True)


def ask(console: Console, prompt: str, default: str = "") -> str:
    """Return a line that a person types; `default` after Ctrl-D."""
    try:
        return console.input(prompt, markup=False).strip()
    except EOFError:
        console.print()
        return default


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise what the disk refuses as a DataError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{folder} cannot be written: {reason}. Free space, or choose another") from error
