"""A table that is to become part of a SQLite database: its names, types and key. Pure decisions, no I/O.

`rows` reads the source again each time it is called, one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from env_server.data.cells import normal, stripped
from env_server.dataset import Row
from env_server.errors import DataError
from env_server.sql.lexer import fold
from env_server.sql.schema import quote_identifier

MAX_COLUMNS = 2_000
"""Columns of a SQLite table."""


class ColumnType(StrEnum):
    """The types that an imported column may have."""

    INTEGER = "INTEGER"
    REAL = "REAL"
    TEXT = "TEXT"
    BLOB = "BLOB"


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """One column; `complete`: no cell of it is NULL."""

    name: str
    type: ColumnType
    complete: bool


@dataclass(frozen=True, slots=True)
class SourceTable:
    """One table of a file. `rows` may raise DataError while it is read."""

    name: str
    path: Path
    columns: tuple[SourceColumn, ...]
    rows: Callable[[], Iterator[Row]]


def bare_name(header: str) -> str:
    """Return a column's name without white space around it, and in composed letters (NFC)."""
    return " ".join(stripped(normal(header)).split())


def column_names(headers: Sequence[str]) -> list[str]:
    """Return a name for each column: its header, or `column_3` for a blank one, or `price_2` for a second `price`.

    SQLite's names do not differ by the case of ASCII letters alone. Any white space inside is one blank.
    """
    cleaned = [bare_name(header) or f"column_{place}" for place, header in enumerate(headers, start=1)]
    taken = {fold(name) for name in cleaned}
    used: set[str] = set()
    names = []
    for first in cleaned:
        name, number = first, 2
        if fold(first) in used:
            while fold(f"{first}_{number}") in taken:
                number += 1
            name = f"{first}_{number}"
        taken.add(fold(name))
        used.add(fold(name))
        names.append(name)
    return names


def is_text(name: str) -> bool:
    """Tell whether a file's name can be written as Unicode; on some systems it may be any bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def table_name(path: Path) -> str:
    """Return the name of a file's table or database: the file's without its suffix, in composed letters (NFC)."""
    return normal(path.stem)


def table_names(files: Sequence[Path]) -> dict[str, Path]:
    """Map each table's name (`table_name`) to its file. Raises DataError for a name that is taken."""
    found: dict[str, Path] = {}
    for path in files:
        name = table_name(path)
        if fold(name).startswith("sqlite_"):
            raise DataError(f"{path}: the names of tables that begin with sqlite_ are SQLite's own. Rename the file")
        if not is_text(name):
            raise DataError(f"{str(path)!r}: a table cannot be called so, the name is not Unicode. Rename the file")
        clash = next((other for other in found if fold(other) == fold(name)), None)
        if clash is not None:
            raise DataError(f"{found[clash]} and {path.name} would be the same table. Rename or remove one of them")
        found[name] = path
    return found


def key_column(table: SourceTable) -> str | None:
    """Return the column that may be the primary key, if its values turn out to differ; None where there is none.

    It is the first of `id`, `orders_id` and `order_id` (for a table `orders`), complete, and whole numbers or text.
    """
    stem = fold(table.name)
    columns = {fold(column.name): column for column in table.columns}
    for name in ("id", f"{stem}_id", f"{stem.removesuffix('s')}_id"):
        column = columns.get(name)
        if column and column.complete and column.type in (ColumnType.INTEGER, ColumnType.TEXT):
            return column.name
    return None


def create_statement(table: SourceTable, key: str | None, parents: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Return the CREATE TABLE statement. Raises DataError when there are more columns than a table can have.

    `parents`: for a column that is a foreign key, the table and the column that it refers to.
    """
    if len(table.columns) > MAX_COLUMNS:
        count = len(table.columns)
        raise DataError(f"{table.path} has {count} columns; a table can have {MAX_COLUMNS}. Split the file")
    columns = ", ".join(
        f"{quote_identifier(column.name)} {column.type}"
        + (" PRIMARY KEY" if column.name == key else "")
        + _reference((parents or {}).get(column.name))
        for column in table.columns
    )
    return f"CREATE TABLE {quote_identifier(table.name)} ({columns})"


def _reference(parent: tuple[str, str] | None) -> str:
    return f" REFERENCES {quote_identifier(parent[0])}({quote_identifier(parent[1])})" if parent else ""


def insert_statement(table: SourceTable) -> str:
    """Return the INSERT statement for one row."""
    return f"INSERT INTO {quote_identifier(table.name)} VALUES ({', '.join('?' * len(table.columns))})"
