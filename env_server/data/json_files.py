"""Files of questions in JSON or JSON Lines: read whole and checked, every complaint with its file and line.

A file holds one list of objects, or one object on each line. Its content decides which, so JSON Lines in a file that
is called `.json` are read as well. It must be UTF-8, with or without a byte order mark. Lines count from 1,
entries from 0. Every error is a DataError that names the file, the line and the fix.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env_server.errors import DataError

HEAD_BYTES = 65_536
"""Of a file, to tell its encoding and its form by."""
_BLANK = " \t\r\n"


@dataclass(frozen=True)
class QuestionFile:
    """The questions of one file, as objects of JSON, each with its line."""

    path: Path
    entries: Sequence[dict[str, Any]]
    _text: str = field(repr=False)
    _lines: Sequence[int] | None = field(repr=False)

    def line(self, index: int) -> int:
        """Return the line on which an entry begins."""
        return _line_of(self._text, index) if self._lines is None else self._lines[index]

    def error(self, index: int, problem: str, fix: str = "") -> DataError:
        """Return the error that says what is wrong with an entry."""
        place = f"{self.path}, line {self.line(index)} (question {index})"
        return DataError(f"{place}: {problem}. {fix or 'Correct or remove this question'}")

    def strings(self, index: int, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, str]:
        """Return an entry's text for each key; "" for an optional one that is absent, null or blank.

        Raises DataError when a required one is absent or blank, and when a value is not text.
        """
        entry = self.entries[index]
        problem = _problem(entry, required, optional)
        if problem:
            raise self.error(index, problem)
        return {key: entry[key] for key in required} | {key: (entry.get(key) or "").strip() for key in optional}


def read_json_file(path: Path) -> QuestionFile:
    """Read a file of objects. Raises DataError when it cannot be read, is not UTF-8, not JSON or of another shape."""
    text = _read_text(path)
    lines: list[int] | None = None
    if _holds_lines(path, text):
        numbered = [(i, line) for i, line in enumerate(text.split("\n"), start=1) if line.strip(_BLANK)]
        lines = [number for number, _ in numbered]
        value: Any = [_parse(path, line, number) for number, line in numbered]
    else:
        value = _parse(path, text, 1)
        if not isinstance(value, list):
            raise DataError(f"{path}, line 1: holds {kind_of(value)}, not a list of questions. Wrap it in [ ]")
    file = QuestionFile(path, value, text, lines)
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise file.error(index, f"is {kind_of(entry)}, not an object")
    return file


def kind_of(value: object) -> str:
    """Name a JSON value's type as JSON names it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def cannot_read(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the system does not let us read."""
    return DataError(f"{path} cannot be read: {error.strerror}. Check that it exists and is readable")


def wide_encoding(head: bytes) -> str:
    """Return UTF-16 or UTF-32 where a text is surely in one of them: it begins with its mark, or only so is it text."""
    marks = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    if marked := next((encoding for mark, encoding in marks.items() if head.startswith(mark)), ""):
        return marked
    for encoding in ("utf-16-le", "utf-16-be") if b"\0" in head else ():
        with suppress(UnicodeDecodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(head)
            ends, bytes_of_ends = len(re.findall(r"[\r\n]", text)), len(re.findall(rb"[\r\n]", head))
            # UTF-8 with stray NULs in it has line ends without one, and reads as control characters here and there.
            if ends and ends * 2 > bytes_of_ends and not re.search(r"[\0-\x08\x0e-\x1f]", text):
                return encoding
    return ""


def not_utf8(path: Path) -> DataError:
    """Return the error for a file that is not UTF-8: it names the first line that is not."""
    place, found = "", ""
    with path.open("rb") as file:
        if wide := wide_encoding(file.read(HEAD_BYTES)):
            kind = wide[:6].upper()
            return DataError(f"{path}, line 1: is {kind}, not UTF-8. Save it as UTF-8, or convert it with iconv")
        file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                place, found = f", line {number}", f" (byte 0x{line[error.start]:02x})"
                break
    return DataError(
        f"{path}{place}: not UTF-8{found}. Save it as UTF-8, or convert it: iconv -f ITS-ENCODING -t UTF-8. For a "
        "table, sqlenv data doctor suggests its encoding"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").lstrip("\ufeff")
    except OSError as error:
        raise cannot_read(path, error) from error
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error


def _holds_lines(path: Path, text: str) -> bool:
    """Tell JSON Lines from a list, and from a single object, which is refused later."""
    start = len(text) - len(text.lstrip(_BLANK))
    if text.startswith("[", start):
        return False
    if path.suffix.lower() == ".jsonl":
        return True
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(text[end:].strip(_BLANK))


def _parse(path: Path, text: str, first_line: int) -> object:
    """Read one JSON value, which begins on `first_line` of the file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {first_line + error.lineno - 1}, column {error.colno}"
        raise DataError(f"{place}: not JSON ({error.msg}). Correct the line") from error
    except RecursionError as error:
        raise DataError(f"{path}, line {first_line}: lists are nested too deeply. Correct the file") from error
    except ValueError as error:
        raise DataError(f"{path}, line {first_line}: not JSON ({error}). Correct the file") from error


def _problem(entry: dict[str, Any], required: Sequence[str], optional: Sequence[str]) -> str:
    """Say what is wrong with the values of an entry; empty when nothing is."""
    for key in required:
        if key not in entry:
            others = ", ".join(map(str, list(entry)[:8])) or "no key"
            return f'the key "{key}" is missing (it has {others})'
    for key in (*required, *optional):
        value = entry.get(key)
        if value is None and key in optional:
            continue
        if not isinstance(value, str):
            return f'"{key}" is {kind_of(value)}, not a string'
        if key in required and not value.strip():
            return f'"{key}" is blank'
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return f'"{key}" holds half of a surrogate pair, which is no character'
    return ""


def _line_of(text: str, index: int) -> int:
    """Return the line, counted from 1, where element `index` of the JSON list in `text` begins."""
    decoder = json.JSONDecoder()
    position = text.index("[")
    for _ in range(index + 1):
        start = _skip(text, position + 1)
        position = _skip(text, decoder.raw_decode(text, start)[1])
    return text.count("\n", 0, start) + 1


def _skip(text: str, position: int) -> int:
    """Return the position of the next character that is not JSON's white space."""
    while text[position] in _BLANK:
        position += 1
    return position
