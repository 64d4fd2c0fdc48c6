"""How a table and a result read as plain text: few tokens, one line per row, a bounded length.

Pure functions: the text depends on the arguments alone. No line break of the data reaches the text, so every
line is a header, a row or the closing notice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

from env_server.dataset import Row, SQLValue
from env_server.settings import DisplaySettings
from env_server.sql.lexer import is_plain_name
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Table, quote_identifier

CUT = "…"
SEPARATOR = " | "
MAX_COLUMNS = 40
"""Columns shown of a result; what is left out is counted."""
MAX_DESCRIBED_COLUMNS = 60
"""Columns shown of a table's description."""
MAX_NAME_CHARS = 80
"""Characters of a name or a declared type."""
FLOAT_DIGITS = 10
"""Significant digits of a float."""

_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SHORT_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@lru_cache(maxsize=1_024)
def describe_table(table: Table) -> str:
    """Return the name and row count, then one line per column with its type and keys."""
    references = {
        column: _reference(key.table, key.ref_columns[i : i + 1])
        for key in reversed(table.foreign_keys)
        for i, column in enumerate(key.columns)
    }
    kind = " (view)" if table.is_view else ""
    lines = [f"{sql_name(table.name)}{kind}: {_count_words(table.row_count)}"]
    for column in table.columns[:MAX_DESCRIBED_COLUMNS]:
        parts = [sql_name(column.name), shortened(column.type, MAX_NAME_CHARS)]
        parts.append("primary key" if column.primary_key else "")
        parts.append(references.get(column.name, ""))
        lines.append(" ".join(part for part in parts if part))
    hidden = len(table.columns) - MAX_DESCRIBED_COLUMNS
    if hidden > 0:
        lines.append(_more_columns(hidden))
    return "\n".join(lines)


def format_result(result: QueryResult, settings: DisplaySettings) -> str:
    """Return the header, the rows that fit, and a notice of what is left out; at most `max_chars` characters."""
    header, width = _header(result.columns, settings)
    if not result.rows:
        return _fitted([header], "(more rows)" if result.more else "no rows", settings.max_chars)
    rows = result.rows[: settings.max_rows]
    lines = [_row_line(row[:width], settings) for row in rows]
    for shown in range(len(lines), 0, -1):
        text = _joined([header, *lines[:shown]], _notice(result, shown))
        if len(text) <= settings.max_chars:
            return text
    return _fitted([header, lines[0]], _notice(result, 1), settings.max_chars)


def format_cell(value: SQLValue, max_chars: int) -> str:
    """Return one value as text of at most `max_chars` characters, marked where it is cut.

    NULL reads NULL. Text is plain, but quoted where it could be taken for something else: empty, the word
    NULL, blanks at an end, or the column separator inside.
    """
    if isinstance(value, str):
        if value in ("", "NULL") or value[0] == " " or value[-1] == " " or SEPARATOR in value:
            value = f"'{value}'"
        return shortened(value, max_chars)
    if isinstance(value, float):
        return format_float(value)
    if isinstance(value, int):
        return str(value)
    if value is None:
        return "NULL"
    digits = value[:max_chars].hex()
    return f"x'{digits}'" if len(digits) + 3 <= max_chars else f"x'{digits}"[: max(max_chars - 1, 0)] + CUT


def format_float(value: float) -> str:
    """Return a float in at most FLOAT_DIGITS significant digits, always with a point or an exponent."""
    if not math.isfinite(value):
        return "-Inf" if value < 0 else "Inf"
    text = repr(value + 0.0)  # + 0.0 turns -0.0 into 0.0
    if sum(char.isdigit() for char in text.split("e")[0].replace(".", "").lstrip("-0")) <= FLOAT_DIGITS:
        return text
    if not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{FLOAT_DIGITS}g}"
    decimals = max(1, FLOAT_DIGITS - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{decimals}f}".rstrip("0")
    return text + "0" if text.endswith(".") else text


def shortened(text: str, max_chars: int) -> str:
    """Return the text in one line, unprintable characters escaped, cut and marked past `max_chars`."""
    if len(text) <= max_chars and text.isascii() and text.isprintable():
        return text
    # Escaping never shortens, so no more than this much of a long text is looked at.
    line = _UNPRINTABLE.sub(_escape, text[: max_chars + 1])
    return line if len(line) <= max_chars else line[: max_chars - 1] + CUT


def sql_name(name: str) -> str:
    """Return a name as it must be written in SQL: quoted only where it has to be."""
    return shortened(name if is_plain_name(name) else quote_identifier(name), MAX_NAME_CHARS)


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    code = ord(char)
    return _SHORT_ESCAPES.get(char) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def _reference(table: str, column: Sequence[str]) -> str:
    return f"references {sql_name(table)}" + "".join(f"({sql_name(name)})" for name in column)


def _count_words(row_count: int | None) -> str:
    if row_count is None:
        return "unknown number of rows"
    return f"{row_count} row" if row_count == 1 else f"{row_count} rows"


def _more_columns(count: int) -> str:
    return f"{CUT} and {count} more column" + ("" if count == 1 else "s")


def _header(columns: Sequence[str], settings: DisplaySettings) -> tuple[str, int]:
    """Return the header line and how many columns are shown: they take at most a third of the text."""
    names: list[str] = []
    length = 0
    for column in columns[:MAX_COLUMNS]:
        name = shortened(column, settings.max_cell_chars)
        length += len(name) + len(SEPARATOR)
        if names and length > settings.max_chars // 3:
            break
        names.append(name)
    hidden = len(columns) - len(names)
    return SEPARATOR.join([*names, *([_more_columns(hidden)] if hidden else [])]), len(names)


def _row_line(row: Row, settings: DisplaySettings) -> str:
    return SEPARATOR.join([format_cell(value, settings.max_cell_chars) for value in row])


def _notice(result: QueryResult, shown: int) -> str:
    if result.row_count is None:
        return "(more rows)"
    left = result.row_count - shown
    if left <= 0:
        return ""
    return "(1 more row)" if left == 1 else f"({left} more rows)"


def _joined(lines: Sequence[str], notice: str) -> str:
    return "\n".join([*lines, notice] if notice else lines)


def _fitted(lines: Sequence[str], notice: str, max_chars: int) -> str:
    """Join the lines and the notice, the lines cut where they leave no room for it."""
    body = "\n".join(lines)
    room = max_chars - (len(notice) + 1 if notice else 0)
    if len(body) > room:
        body = body[: max(room - 1, 0)] + CUT
    return _joined([body], notice)[:max_chars]
