"""What a database holds: tables, columns, keys and row counts, as plain data.

`read_schema` is the one function with I/O; it reads through a sandbox, so its own work is bounded as well.
Tables and views come in the file's order. SQLite's internal tables and the shadow tables of virtual ones are
left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from env_server.dataset import Row
from env_server.errors import SQLError, UnknownTableError
from env_server.sql.lexer import fold
from env_server.sql.sandbox import Sandbox

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_SCHEMA_ROWS = 10_000
"""Tables of a database, and columns of a table, that are read."""

_QUOTES = {'"': '"', "'": "'", "`": "`", "[": "]"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column; `type` as declared, "" where none is."""

    name: str
    type: str
    nullable: bool
    primary_key: bool


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`columns` refer to `ref_columns` of `table`, pairwise; `ref_columns` is empty where nothing names them."""

    columns: tuple[str, ...]
    table: str
    ref_columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One table or view. `row_count` is None where counting failed or cost too much."""

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...]
    row_count: int | None
    is_view: bool = False
    is_virtual: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables and views of one database."""

    tables: tuple[Table, ...]

    @property
    def table_names(self) -> tuple[str, ...]:
        """The names, in the schema's order."""
        return tuple(table.name for table in self.tables)

    def find(self, argument: str) -> Table:
        """Return the table that an agent's argument names, in any case and quoting.

        Raises UnknownTableError.
        """
        for name in candidate_names(argument):
            if (table := named(self.tables, name)) is not None:
                return table
        raise UnknownTableError(" ".join(argument.split())[:80], self.table_names)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=_Named)


def named(among: Iterable[_N], name: str) -> _N | None:
    """Return the one of this name, in any case: but SQLite tells `Ä` from `ä`, so that the same case goes first."""
    same = [each for each in among if each.name.casefold() == name.casefold()]
    return next((each for each in same if fold(each.name) == fold(name)), same[0] if same else None)


@cache
def schema_codec() -> TypeAdapter[Schema]:
    """Return what writes a schema as JSON and reads it."""
    from pydantic import TypeAdapter  # which a query process need not have in memory

    return TypeAdapter(Schema)


def candidate_names(argument: str) -> list[str]:
    """Return what `argument` may mean, most literal first: as it is, without quotes, without `main.`."""
    text = argument.strip()
    names = [text]
    text = text.rstrip("; \t\r\n")
    names += [text, unquoted(text)]
    head, dot, tail = text.partition(".")
    if dot and unquoted(head.strip()).casefold() == "main":
        names.append(unquoted(tail.strip()))
    return names


def unquoted(name: str) -> str:
    """Return an identifier without its SQL quotes, doubled ones inside undone."""
    if len(name) >= 2 and _QUOTES.get(name[0]) == name[-1]:
        closing = name[-1]
        inner = name[1:-1]
        return inner if closing == "]" else inner.replace(closing * 2, closing)
    return name


def quote_identifier(name: str) -> str:
    """Return the name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def quote_text(text: str) -> str:
    """Return the text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def read_schema(sandbox: Sandbox) -> Schema:
    """Read the schema and count each table's rows. Raises SQLError when the file is corrupt."""
    kinds = {str(row[1]): str(row[2]) for row in _rows(sandbox, "PRAGMA main.table_list") if row[0] == "main"}
    listed = _rows(sandbox, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY rowid")
    names = [str(row[0]) for row in listed]
    wanted = [name for name in names if kinds.get(name, "table") != "shadow" and not _internal(name)]
    columns = {name: _columns(sandbox, name) for name in wanted}
    keys = {name.casefold(): _primary_key(columns[name][1]) for name in wanted}
    return Schema(
        tuple(
            Table(
                name=name,
                columns=columns[name][0],
                foreign_keys=_foreign_keys(sandbox, name, keys),
                row_count=_row_count(sandbox, name),
                is_view=kinds.get(name) == "view",
                is_virtual=kinds.get(name) == "virtual",
            )
            for name in wanted
        )
    )


def read_statements(sandbox: Sandbox, schema: Schema) -> tuple[str, ...]:
    """Return the CREATE statements of the schema's tables and views, as the database has them. Raises SQLError."""
    rows = _rows(sandbox, "SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY rowid")
    names = set(schema.table_names)
    return tuple(str(sql) for name, sql in rows if name in names and sql is not None)


def _internal(name: str) -> bool:
    return name.casefold().startswith("sqlite_")


def _rows(sandbox: Sandbox, sql: str) -> tuple[Row, ...]:
    return sandbox.query(sql, MAX_SCHEMA_ROWS).rows


def _columns(sandbox: Sandbox, table: str) -> tuple[tuple[Column, ...], tuple[Row, ...]]:
    """Return the visible columns, and the raw rows they came from; none for a view that is broken."""
    try:
        rows = _rows(sandbox, f"PRAGMA main.table_xinfo({quote_identifier(table)})")
    except SQLError:
        return (), ()
    # cid, name, type, notnull, dflt_value, pk, hidden (1: a virtual table's hidden column)
    return tuple(
        Column(str(row[1]), str(row[2]), nullable=not row[3], primary_key=bool(row[5])) for row in rows if row[6] != 1
    ), rows


def _primary_key(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Return the primary key's columns in the key's order."""
    members = [(row[5], str(row[1])) for row in rows if isinstance(row[5], int) and row[5] > 0]
    return tuple(name for _, name in sorted(members, key=lambda member: member[0] or 0))


def _foreign_keys(sandbox: Sandbox, table: str, keys: dict[str, tuple[str, ...]]) -> tuple[ForeignKey, ...]:
    # id, seq, table, from, to, ...; `to` is NULL where the parent's primary key is meant.
    grouped: dict[int, list[Row]] = {}
    for row in _rows(sandbox, f"PRAGMA main.foreign_key_list({quote_identifier(table)})"):
        grouped.setdefault(int(str(row[0])), []).append(row)
    found = []
    for _, rows in sorted(grouped.items(), reverse=True):
        rows.sort(key=lambda row: int(str(row[1])))
        parent = str(rows[0][2])
        named = tuple(str(row[4]) for row in rows if row[4] is not None)
        implied = keys.get(parent.casefold(), ())
        ref_columns = named or (implied if len(implied) == len(rows) else ())
        found.append(ForeignKey(tuple(str(row[3]) for row in rows), parent, ref_columns))
    return tuple(found)


def _row_count(sandbox: Sandbox, table: str) -> int | None:
    try:
        (row,) = _rows(sandbox, f"SELECT COUNT(*) FROM main.{quote_identifier(table)}")
    except SQLError:
        return None
    return row[0] if isinstance(row[0], int) else None
