"""The text of an ANSWER in value mode: how a table of values is written, and how a text is read back.

`format_answer` writes one canonical text per table. `parse_answer` returns every sensible reading of a text as
a table of cells; `judging` accepts an answer when one of its readings is the gold table. Guarantees:

1. The readings of `format_answer(rows)` include the table `rows`, whatever the values are.
2. A reading uses the whole text: nothing an agent writes is skipped except a wrapper (a code fence, backticks,
   "Answer:", "The answer is", a final period). So a text that lists alternatives, explains itself or starts with
   a header line has no reading that equals the gold table.
3. Quotes make one cell: `"a, b"` is never a list and `"NULL"` is never NULL. Apart from that a cell does not say
   whether it is a text, a number or a blob, so '42' and 42 are the same answer.
4. Reading never raises and takes time linear in the length of the text.

Forms that are read, for a table of one column: a scalar, values separated by commas or one per line; of several
columns: one row per line with cells separated by `|` or commas; of any width: JSON (a scalar string, a list, a
list of lists, an object or a list of objects, whose keys are ignored) and the same in Python's notation. A flat
list is one column or one row, as the width asked for says.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from env_server.dataset import Row, SQLValue

NULL_WORDS = frozenset({"null", "none"})
"""Normalised bare words that may mean NULL."""

_MAX_WRAPPERS = 6
_QUOTES = "\"'"
_PREFIX = re.compile(r"(?:the\s+)?(?:final\s+)?answer(?:\s+is\s*:?|\s*[:=])\s*(?=\S)", re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^']|'')*'", re.DOTALL)
# Up to the first closing quote that a separator or the end follows, so a quote inside need not be escaped.
_QUOTED_CELL = {
    separator: re.compile(rf""""(?:[^"\\]|\\.|"(?!{end}))*"(?={end})|'(?:[^']|'(?!{end}))*'(?={end})""", re.DOTALL)
    for separator, end in ((",", r"\s*(?:,|\Z)"), ("|", r"\s*(?:\||\Z)"))
}
_LANGUAGE = re.compile(r"\w*\s*")
_SPACE = re.compile(r"\s*")
_LITERAL_TOKEN = re.compile(rf"\s*(?:([\[(])|([\])])|(,)|({_QUOTED.pattern})|([^,\[\]()]+))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as it was typed. `quoted`: it stood in quotes, so it is a text or a number, never NULL."""

    text: str
    quoted: bool


Table = tuple[tuple[Cell, ...], ...]
"""One reading of an answer: rows of cells, all of one width."""

_Items = list["Cell | list[Cell]"]


def normalize_text(text: str) -> str:
    """Return the form in which texts are compared: NFKC, case-folded, trimmed."""
    if text.isascii():
        return text.lower().strip()
    return unicodedata.normalize("NFKC", text).casefold().strip()


def format_answer(rows: Sequence[Row]) -> str:
    """Write the canonical answer text of a table.

    `[]` for no row; one column: the values separated by ", "; several columns: one row per line, `a | b`. Where
    a text cell would make that ambiguous (a separator in it, a line break, quotes or space around it, the word
    NULL, ...) the whole table is JSON, in which a blob is the string x'..'.
    """
    if not rows:
        return "[]"
    width = len(rows[0])
    separator = "," if width == 1 else "|"
    if all(_is_plain(cell, separator) for row in rows for cell in row):
        if width == 1:
            return ", ".join(_plain(row[0]) for row in rows)
        return "\n".join(" | ".join(_plain(cell) for cell in row) for row in rows)
    table = [[_json_value(cell) for cell in row] for row in rows]
    if width > 1:
        return json.dumps(table, ensure_ascii=False)
    column = [row[0] for row in table]
    return json.dumps(column[0] if len(column) == 1 else column, ensure_ascii=False)


def parse_answer(text: str, width: int) -> list[Table]:
    """Return the readings of a text as tables of `width` columns, the most literal first.

    The empty table `()` is the reading of `[]` for every width. The list may be empty.
    """
    tables = (table for variant in _variants(text) for table in _readings(variant, width))
    return list(dict.fromkeys(tables))


def _is_plain(value: SQLValue, separator: str) -> bool:
    """Tell whether a value can be written without quotes between such separators."""
    if not isinstance(value, str):
        return True
    return (
        value.isprintable()
        and value.strip() == value != ""
        and separator not in value
        and value[0] not in "\"'`[({"
        and value[-1] not in "\"'`"
        and normalize_text(value) not in NULL_WORDS
    )


def _plain(value: SQLValue) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return value if isinstance(value, str) else repr(value)


def _json_value(value: SQLValue) -> int | float | str | None:
    return _plain(value) if isinstance(value, bytes) else value


def _variants(text: str) -> Iterator[str]:
    """Yield the trimmed text, then the text with one wrapper after the other taken off."""
    current: str | None = text.replace("\r\n", "\n").strip()
    for _ in range(_MAX_WRAPPERS):
        if not current:
            return
        yield current
        current = _without_wrapper(current)


def _without_wrapper(text: str) -> str | None:
    """Take the outermost wrapper off; None when there is none."""
    if len(text) > 6 and text.startswith("```") and text.endswith("```"):
        first, line_break, rest = text[3:-3].partition("\n")
        return (rest if line_break and _LANGUAGE.fullmatch(first) else text[3:-3]).strip()
    if len(text) > 2 and text[0] == text[-1] == "`":
        return text[1:-1].strip()
    if prefix := _PREFIX.match(text):
        return text[prefix.end() :]
    if text.endswith(".") and not text.endswith(".."):
        return text[:-1].rstrip()
    return None


def _readings(text: str, width: int) -> Iterator[Table]:
    """Yield the readings of a text without wrappers."""
    # What is JSON is read as such alone: in Python's notation, its null would be a bare word, and might be a text.
    items = _json_items(text) or _literal_items(text)
    table = None if items is None else _table(items, width)
    if table is not None:
        yield table
    lines = [line for line in text.split("\n") if line.strip()]
    if width == 1:
        yield ((Cell(text, quoted=False),),)
        for unquote in (True, False):
            yield ((_cell(text, unquote=unquote),),)
            yield tuple((cell,) for cell in _split(text, ",", unquote=unquote))
            yield tuple((_cell(line, unquote=unquote),) for line in lines)
    elif width > 1:
        for unquote in (True, False):
            for separator in (" | ", "|", ","):
                yield from _grid(lines, separator, width, unquote=unquote)


def _grid(lines: Sequence[str], separator: str, width: int, *, unquote: bool) -> Iterator[Table]:
    """Yield the lines as a table when each has the right width; read no further than the first that has not."""
    rows: list[tuple[Cell, ...]] = []
    for line in lines:
        # Two cells more tell that there are too many, should the last one be dropped.
        row = _split(line, separator, unquote=unquote, most=width + 2)
        if len(row) != width:
            return
        rows.append(tuple(row))
    if rows:
        yield tuple(rows)


def _cell(text: str, *, unquote: bool) -> Cell:
    text = text.strip()
    if unquote and len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES:
        return _unquote(text)
    return Cell(text, quoted=False)


def _unquote(token: str) -> Cell:
    """Read a quoted token: JSON's escapes in double quotes, SQL's doubled quote in single quotes."""
    if token[0] == "'":
        return Cell(token[1:-1].replace("''", "'"), quoted=True)
    try:
        return Cell(str(json.loads(token, strict=False)), quoted=True)
    except ValueError:
        return Cell(token[1:-1], quoted=True)


def _split(text: str, separator: str, *, unquote: bool, most: int = sys.maxsize) -> list[Cell]:
    """Split at the separators, into the first `most` cells; with `unquote`, those inside of a quoted cell do not count.

    The outer bars of a Markdown row and one trailing comma are dropped.
    """
    text = text.strip()
    if "|" in separator and len(text) > 1 and text[0] == text[-1] == "|":
        text = text[1:-1].strip()
    cells: list[Cell] = []
    unclosed = "" if unquote else _QUOTES
    start = 0
    while start <= len(text) and len(cells) < most:
        start = _skip_space(text, start)
        quoted = None
        if text[start : start + 1] in set(_QUOTES) - set(unclosed):
            quoted = _QUOTED_CELL[separator.strip()].match(text, start)
            # What is not closed from here on is not closed from further on: no second scan.
            unclosed += "" if quoted else text[start]
        if quoted:
            cells.append(_unquote(quoted.group()))
            start = _skip_space(text, quoted.end()) + 1
            continue
        end = text.find(separator, start)
        end = len(text) if end < 0 else end
        cells.append(_cell(text[start:end], unquote=unquote))
        start = end + len(separator)
    if separator == "," and len(cells) > 1 and cells[-1] == Cell("", quoted=False):
        cells.pop()
    return cells


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _table(items: _Items, width: int) -> Table | None:
    """Arrange the items of a literal: rows, or a flat list, which is one column or one row."""
    if not items:
        return ()
    flat = [item for item in items if isinstance(item, Cell)]
    nested = [tuple(item) for item in items if not isinstance(item, Cell)]
    if flat and nested:
        return None
    rows = tuple(nested) if nested else tuple((cell,) for cell in flat) if width == 1 else (tuple(flat),)
    return rows if all(len(row) == width for row in rows) else None


class _Object(list[object]):
    """The values of a JSON object, in the order written."""


def _json_items(text: str) -> _Items | None:
    """Read a JSON list, object or string; None when the text is none, or is nested too deeply."""
    if text[0] not in '[{"':
        return None
    bare = _bare_cell
    try:
        value = json.loads(
            text,
            strict=False,
            parse_int=bare,
            parse_float=bare,
            parse_constant=bare,
            object_pairs_hook=lambda pairs: _Object(item for _, item in pairs),
        )
    except (ValueError, RecursionError):
        return None
    if isinstance(value, _Object) or not isinstance(value, list):
        value = [value]
    items: _Items = []
    for item in value:
        if not isinstance(item, list):
            items.append(_json_cell(item))
        elif any(isinstance(inner, list) for inner in item):
            return None
        else:
            items.append([_json_cell(inner) for inner in item])
    return items


def _bare_cell(literal: str) -> Cell:
    return Cell(literal, quoted=False)


def _json_cell(value: object) -> Cell:
    """Read a JSON scalar; true and false are texts, never 1 and 0."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, bool):
        return Cell(str(value), quoted=True)
    return Cell("NULL", quoted=False) if value is None else Cell(str(value), quoted=True)


def _literal_items(text: str) -> _Items | None:
    """Read a list or tuple in Python's notation, `(a, 1), (b, 2)` included; None when the text is none."""
    if text[0] not in "[(":
        return None
    items = _parse_literal(text)
    return items if items is not None or text[0] == "[" else _parse_literal(f"[{text}]")


def _parse_literal(text: str) -> _Items | None:
    """Read one bracketed list whose items are cells or lists of cells."""
    outer: _Items = []
    inner: list[Cell] | None = None
    depth, position, after_value = 0, 0, False
    while position < len(text):
        token = _LITERAL_TOKEN.match(text, position)
        if token is None or (position > 0 and depth == 0):
            return None
        position = token.end()
        opening, closing, comma, quoted, bare = token.groups()
        if opening:
            if after_value or depth == 2:
                return None
            depth += 1
            inner = [] if depth == 2 else None
        elif closing:
            if inner is not None:
                outer.append(inner)
            depth, inner, after_value = depth - 1, None, True
        elif comma:
            if not after_value:
                return None
            after_value = False
        elif after_value and (quoted or bare.strip()):
            return None
        elif quoted or bare.strip():
            cell = _unquote(quoted) if quoted else Cell(bare.strip(), quoted=False)
            (outer if inner is None else inner).append(cell)
            after_value = True
    return outer if depth == 0 else None
