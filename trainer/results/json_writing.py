"""JSON files that a killed process leaves readable: objects line by line, and whole files at once.

Promises:

1. A line is on its way to the disk when `JsonlWriter.write` returns; a killed process loses at most the line being
   written.
2. `replace_file` leaves the old file or the new one, never a part.
3. Numbers of other libraries are written as Python's, those that are not finite as strings, since JSON has none; text
   that is no Unicode is marked instead of refused: it may be a model's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonlWriter:
    """Appends objects to a JSONL file, each line flushed; a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8", errors="replace", newline="\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object."""
        self.write_lines(json_line(row))

    def write_lines(self, lines: str) -> None:
        """Append lines that `json_line` made."""
        self._file.write(lines)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def json_line(row: Mapping[str, Any]) -> str:
    """Return an object as a line of JSONL."""
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as a whole file, indented for people."""
    replace_file(path, json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a whole file, or leave the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8", errors="replace")
    temporary.replace(path)


def _plain(value: Any) -> Any:
    """Turn numbers of other libraries into Python's, and the non-finite ones into strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return value
