"""What a test database must respect and may draw from: tables, keys, types, and a sample of the values.

`read_profile` and `read_sample` have the I/O. They read through a sandbox, so their work is bounded: of a table's first
`SCANNED_ROWS` rows every n-th is sampled, and where even that is too much for the sandbox, the first few are. The same
table gives the same sample.

Tables come parents first. Views and indexes are rebuilt in a test database, triggers are not: nothing is ever written
to it. A database with a virtual table has no profile, because its module decides what may be stored; a damaged file
is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from env_server.dataset import Row, SQLValue
from env_server.errors import DataError, NoVariantsError, SQLError
from env_server.sql.lexer import fold
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import MAX_SCHEMA_ROWS, Schema, quote_identifier, quote_text, read_schema

SAMPLED_ROWS = 2_000
KEPT_ROWS = 60
FEW_ROWS = 30
"""Rows whose sizes the sandbox allows in any case."""
SCANNED_ROWS = 200_000
"""Of a larger table no more are passed over."""
_DAMAGE = ("disk image is malformed", "malformed database schema", "file is not a database", "disk I/O error")
"""Words of SQLite's errors about a file, not about a statement."""
_DATE = re.compile(r"\d{4}-\d{1,2}(-\d{1,2})?([ T]\d{2}:\d{2}(:\d{2})?)?")

T = TypeVar("T")


class Kind(Enum):
    """What a column's values are; the values decide, and the declared type where there are none. JSON: no scalar."""

    INTEGER = "integer"
    REAL = "real"
    TEXT = "text"
    DATE = "date"
    JSON = "json"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ColumnProfile:
    """One column that can be written. `values`: distinct sampled values without NULL. `has_null`: NULL occurs."""

    name: str
    kind: Kind
    required: bool
    values: tuple[SQLValue, ...]
    has_null: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key: `columns` take their values from one row of `parent`, pairwise from `parent_columns`."""

    columns: tuple[int, ...]
    parent: str
    parent_columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TableProfile:
    """One table. `unique`: sets of column indexes whose values together may occur once. `rows`: sampled rows.

    `checked`: a check, a generated column or an index of an expression may refuse a row.
    """

    name: str
    columns: tuple[ColumnProfile, ...]
    unique: tuple[frozenset[int], ...]
    references: tuple[Reference, ...]
    rows: tuple[Row, ...]
    checked: bool

    def index(self, column: str) -> int | None:
        """Return the index of a column, by name in any case."""
        wanted = fold(column)
        return next((i for i, each in enumerate(self.columns) if fold(each.name) == wanted), None)


@dataclass(frozen=True)
class DatabaseProfile:
    """All of a database that its test databases need. `statements` create the empty schema, in order."""

    schema: Schema
    tables: tuple[TableProfile, ...]
    statements: tuple[str, ...]

    def table(self, name: str) -> TableProfile | None:
        """Return a table by its name, in any case."""
        wanted = fold(name)
        return next((table for table in self.tables if fold(table.name) == wanted), None)

    def references(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Yield each column of a foreign key and the one that it refers to, as (table, column) in lower case."""
        for table in self.tables:
            for reference in table.references:
                for i, column in zip(reference.columns, reference.parent_columns, strict=True):
                    child = (fold(table.name), fold(table.columns[i].name))
                    yield child, (fold(reference.parent), fold(column))


def read_profile(sandbox: Sandbox) -> DatabaseProfile:
    """Read the profile of the database that `sandbox` has open.

    Raises NoVariantsError where there can be none, DataError where the file cannot be read.
    """
    try:
        schema = read_schema(sandbox)
        virtual = [table.name for table in schema.tables if table.is_virtual]
        if virtual:
            raise NoVariantsError(f"the database has virtual tables: {', '.join(virtual)}")
        tables = [_table(sandbox, schema, table.name) for table in schema.tables if not table.is_view]
        # Tables, then views, then indexes with a statement of their own.
        statements = _rows(
            sandbox,
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND type IN ('table', 'view', 'index') "
            "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type = 'index', type = 'view', rowid",
        )
    except SQLError as error:
        if not error.deterministic or any(words in error.message for words in _DAMAGE):
            raise DataError(f"the database cannot be read: {error.message}") from error
        raise NoVariantsError(f"its tables cannot be sampled: {error.message}") from error
    return DatabaseProfile(schema, tuple(_parents_first(tables)), tuple(str(sql) for (sql,) in statements))


def read_sample(sandbox: Sandbox, table: str, columns: Sequence[str], row_count: int | None) -> tuple[Row, ...]:
    """Return rows at equal distances. `row_count`: None where counting failed. Raises SQLError, DataError."""
    names = ", ".join(map(quote_identifier, columns))
    rows = f"SELECT {names} FROM main.{quote_identifier(table)}"
    place = quote_identifier("_" + max(columns, key=len))  # a name that none of the columns has
    numbered = f"SELECT *, row_number() OVER () - 1 AS {place} FROM ({rows} LIMIT {SCANNED_ROWS})"
    count = SCANNED_ROWS if row_count is None else min(row_count, SCANNED_ROWS)
    step = max(1, -(-count // SAMPLED_ROWS))
    try:
        return sandbox.query(f"SELECT {names} FROM ({numbered}) WHERE {place} % {step} = 0", SAMPLED_ROWS).rows
    except SQLError as error:
        if error.kind not in ("size", "budget"):
            raise
        return sandbox.query(f"{rows} LIMIT {FEW_ROWS}", FEW_ROWS).rows


def spaced(items: Sequence[T], most: int) -> tuple[T, ...]:
    """Return at most `most` (two or more) items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return tuple(items)
    return tuple(items[i * (len(items) - 1) // (most - 1)] for i in range(most))


def kind_of(values: Sequence[SQLValue], declared: str) -> Kind:
    """Return the kind that most values have, or that the declared type suggests (SQLite's affinity rules)."""
    counts = dict.fromkeys(Kind, 0)
    for value in values:
        match value:
            case int():
                kind = Kind.INTEGER
            case float():
                kind = Kind.REAL
            case str():
                kind = Kind.DATE if _DATE.fullmatch(value) else Kind.JSON if _is_json(value) else Kind.TEXT
            case _:
                kind = Kind.OTHER
        counts[kind] += 1
    if values:
        return max(counts, key=lambda kind: counts[kind])
    text = declared.upper()
    if "DATE" in text or "TIME" in text:
        return Kind.DATE
    if "INT" in text or "BOOL" in text:
        return Kind.INTEGER
    if any(word in text for word in ("CHAR", "CLOB", "TEXT")) or not text:
        return Kind.TEXT
    return Kind.OTHER if "BLOB" in text else Kind.REAL


def _is_json(text: str) -> bool:
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _table(sandbox: Sandbox, schema: Schema, name: str) -> TableProfile:
    # cid, name, type, notnull, dflt_value, pk, hidden (2 and 3: generated, which cannot be written)
    every = _rows(sandbox, f"PRAGMA main.table_xinfo({quote_identifier(name)})")
    info = [row for row in every if not row[6]]
    computed = len(info) < len(every)
    place = {fold(str(row[1])): i for i, row in enumerate(info)}
    sample = read_sample(sandbox, name, [str(row[1]) for row in info], schema.find(name).row_count)
    columns = []
    for i, row in enumerate(info):
        values = list(dict.fromkeys(each[i] for each in sample if each[i] is not None))
        kind, has_null = kind_of(values, str(row[2])), any(each[i] is None for each in sample)
        columns.append(ColumnProfile(str(row[1]), kind, bool(row[3]), spaced(values, KEPT_ROWS), has_null))
    key = frozenset(i for i, row in enumerate(info) if row[5])
    unique = {key} if key else set()
    for _, index, is_unique, *_ in _rows(sandbox, f"PRAGMA main.index_list({quote_identifier(name)})"):
        members = [row[2] for row in _rows(sandbox, f"PRAGMA main.index_info({quote_identifier(str(index))})")]
        computed |= None in members
        if is_unique and all(fold(str(member)) in place for member in members):
            unique.add(frozenset(place[fold(str(member))] for member in members))
    ddl = _rows(sandbox, f"SELECT sql FROM sqlite_master WHERE type = 'table' AND name = {quote_text(name)}")
    return TableProfile(
        name=name,
        columns=tuple(columns),
        unique=tuple(sorted(unique, key=sorted)),
        references=_references(schema, name, place),
        rows=spaced(sample, KEPT_ROWS),
        checked=computed or (bool(ddl) and re.search(r"\bcheck\s*\(", str(ddl[0][0]), re.IGNORECASE) is not None),
    )


def _references(schema: Schema, name: str, place: dict[str, int]) -> tuple[Reference, ...]:
    found = []
    for key in schema.find(name).foreign_keys:
        parent = next((each for each in schema.tables if fold(each.name) == fold(key.table)), None)
        if parent is None or parent.is_view:
            continue
        known = {fold(column.name) for column in parent.columns}
        children = [place[fold(column)] for column in key.columns if fold(column) in place]
        if len(children) == len(key.ref_columns) and all(fold(column) in known for column in key.ref_columns):
            found.append(Reference(tuple(children), parent.name, key.ref_columns))
    return tuple(found)


def _parents_first(tables: Sequence[TableProfile]) -> list[TableProfile]:
    """Order the tables so that references point backwards; those of a cycle that do not are left out."""
    waiting, placed = list(tables), list[TableProfile]()
    while waiting:
        names = {table.name for table in waiting}
        ready = [table for table in waiting if not any(r.parent in names - {table.name} for r in table.references)]
        for table in ready or waiting[:1]:
            known = {each.name for each in placed} | {table.name}
            kept = tuple(reference for reference in table.references if reference.parent in known)
            placed.append(replace(table, references=kept))
            waiting.remove(table)
    return placed


def _rows(sandbox: Sandbox, sql: str) -> tuple[Row, ...]:
    return sandbox.query(sql, MAX_SCHEMA_ROWS).rows
