"""What a variant of a database must respect and may draw from: tables, keys, types, and a sample of the values.

`read_profile` is the one function with I/O. It reads through a sandbox, so its work is bounded: a sample of each
table is read (`row_sampling`) and `KEPT_ROWS` of its rows, at equal distances, are kept.

Tables come parents first. Views and indexes are rebuilt in a variant, triggers are not: nothing is ever written
to it. A database with a virtual table has no profile, because its module decides what may be stored; a damaged file
is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from env_server.dataset import Row, SQLValue
from env_server.errors import DataError, NoVariantsError, SQLError
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import MAX_SCHEMA_ROWS, Schema, quote_identifier, read_schema
from env_server.test_suites.row_sampling import KEPT_ROWS, read_sample, spaced

_DAMAGE = ("disk image is malformed", "malformed database schema", "file is not a database", "disk I/O error")
"""Words of SQLite's errors about a file, not about a statement."""
_DATE = re.compile(r"\d{4}-\d{1,2}(-\d{1,2})?([ T]\d{2}:\d{2}(:\d{2})?)?")


class Kind(Enum):
    """What a column's values are; the values decide, and the declared type where there are none."""

    INTEGER = "integer"
    REAL = "real"
    TEXT = "text"
    DATE = "date"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class ColumnPlan:
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
class TablePlan:
    """One table. `unique`: sets of column indexes whose values together may occur once. `rows`: sampled rows."""

    name: str
    columns: tuple[ColumnPlan, ...]
    unique: tuple[frozenset[int], ...]
    references: tuple[Reference, ...]
    rows: tuple[Row, ...]
    checked: bool

    def index(self, column: str) -> int | None:
        """Return the index of a column, by name in any case."""
        wanted = column.casefold()
        return next((i for i, each in enumerate(self.columns) if each.name.casefold() == wanted), None)


@dataclass(frozen=True)
class DatabaseProfile:
    """All of a database that its variants need. `statements` create the empty schema, in order."""

    schema: Schema
    tables: tuple[TablePlan, ...]
    statements: tuple[str, ...]

    def table(self, name: str) -> TablePlan | None:
        """Return a table by its name, in any case."""
        wanted = name.casefold()
        return next((table for table in self.tables if table.name.casefold() == wanted), None)

    def references(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        """Yield each column of a foreign key and the one that it refers to, as (table, column) in lower case."""
        for table in self.tables:
            for reference in table.references:
                for i, column in zip(reference.columns, reference.parent_columns, strict=True):
                    child = (table.name.casefold(), table.columns[i].name.casefold())
                    yield child, (reference.parent.casefold(), column.casefold())


def read_profile(sandbox: Sandbox) -> DatabaseProfile:
    """Read the profile of the database that `sandbox` has open.

    Raises NoVariantsError where there can be none, DataError where the file cannot be read.
    """
    try:
        schema = read_schema(sandbox)
        virtual = [table.name for table in schema.tables if table.is_virtual]
        if virtual:
            raise NoVariantsError(f"the database has virtual tables: {', '.join(virtual)}")
        plans = [_plan(sandbox, schema, table.name) for table in schema.tables if not table.is_view]
        statements = _statements(sandbox)
    except SQLError as error:
        if not error.deterministic or any(words in error.message for words in _DAMAGE):
            raise DataError(f"the database cannot be read: {error.message}") from error
        raise NoVariantsError(f"its tables cannot be sampled: {error.message}") from error
    return DatabaseProfile(schema, tuple(parents_first(plans)), statements)


def parents_first(plans: Sequence[TablePlan]) -> list[TablePlan]:
    """Order the tables so that references point backwards; those of a cycle that do not are left out."""
    waiting = list(plans)
    placed: list[TablePlan] = []
    while waiting:
        names = {plan.name for plan in waiting}
        ready = [plan for plan in waiting if not any(r.parent in names - {plan.name} for r in plan.references)]
        for plan in ready or waiting[:1]:
            known = {each.name for each in placed} | {plan.name}
            kept = tuple(reference for reference in plan.references if reference.parent in known)
            placed.append(TablePlan(plan.name, plan.columns, plan.unique, kept, plan.rows, plan.checked))
            waiting.remove(plan)
    return placed


def _plan(sandbox: Sandbox, schema: Schema, name: str) -> TablePlan:
    # cid, name, type, notnull, dflt_value, pk, hidden (2 and 3: generated, which cannot be written)
    info = [row for row in _rows(sandbox, f"PRAGMA main.table_xinfo({quote_identifier(name)})") if not row[6]]
    names = [str(row[1]) for row in info]
    place = {column.casefold(): i for i, column in enumerate(names)}
    primary = [column for column, row in zip(names, info, strict=True) if row[5]]
    sample = read_sample(sandbox, name, names, primary, schema.find(name).row_count)
    columns = tuple(
        _column(
            column,
            str(row[2]),
            required=bool(row[3]),
            values=[each[i] for each in sample.rows],
            has_null=sample.has_null[i],
        )
        for i, (column, row) in enumerate(zip(names, info, strict=True))
    )
    key = frozenset(i for i, row in enumerate(info) if row[5])
    unique = {key} if key else set()
    for _, index, is_unique, *_ in _rows(sandbox, f"PRAGMA main.index_list({quote_identifier(name)})"):
        members = [row[2] for row in _rows(sandbox, f"PRAGMA main.index_info({quote_identifier(str(index))})")]
        if is_unique and all(str(member).casefold() in place for member in members):
            unique.add(frozenset(place[str(member).casefold()] for member in members))
    ddl = _rows(sandbox, f"SELECT sql FROM sqlite_master WHERE type = 'table' AND name = {_literal(name)}")
    return TablePlan(
        name=name,
        columns=columns,
        unique=tuple(sorted(unique, key=sorted)),
        references=_references(schema, name, place),
        rows=spaced(sample.rows, KEPT_ROWS),
        checked=bool(ddl) and re.search(r"\bcheck\s*\(", str(ddl[0][0]), re.IGNORECASE) is not None,
    )


def _references(schema: Schema, name: str, place: dict[str, int]) -> tuple[Reference, ...]:
    table = schema.find(name)
    found = []
    for key in table.foreign_keys:
        parent = next((each for each in schema.tables if each.name.casefold() == key.table.casefold()), None)
        if parent is None or parent.is_view:
            continue
        known = {column.name.casefold() for column in parent.columns}
        children = [place[column.casefold()] for column in key.columns if column.casefold() in place]
        if len(children) == len(key.ref_columns) and all(column.casefold() in known for column in key.ref_columns):
            found.append(Reference(tuple(children), parent.name, key.ref_columns))
    return tuple(found)


def _column(name: str, declared: str, *, required: bool, values: Sequence[SQLValue], has_null: bool) -> ColumnPlan:
    present = list(dict.fromkeys(value for value in values if value is not None))
    return ColumnPlan(name, kind_of(present, declared), required, spaced(present, KEPT_ROWS), has_null)


def kind_of(values: Sequence[SQLValue], declared: str) -> Kind:
    """Return the kind that most values have, or that the declared type suggests (SQLite's affinity rules)."""
    counts = dict.fromkeys(Kind, 0)
    for value in values:
        counts[_kind_of_value(value)] += 1
    if any(counts.values()):
        return max(counts, key=lambda kind: counts[kind])
    text = declared.upper()
    if "DATE" in text or "TIME" in text:
        return Kind.DATE
    if "INT" in text or "BOOL" in text:
        return Kind.INTEGER
    if any(word in text for word in ("CHAR", "CLOB", "TEXT")) or not text:
        return Kind.TEXT
    return Kind.OTHER if "BLOB" in text else Kind.REAL


def _kind_of_value(value: SQLValue) -> Kind:
    match value:
        case int():
            return Kind.INTEGER
        case float():
            return Kind.REAL
        case str():
            return Kind.DATE if _DATE.fullmatch(value) else Kind.TEXT
    return Kind.OTHER


def _statements(sandbox: Sandbox) -> tuple[str, ...]:
    """Return what creates the empty schema: tables, then views, then indexes with a statement of their own."""
    found = _rows(
        sandbox,
        "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND type IN ('table', 'view', 'index') "
        "AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY type = 'index', type = 'view', rowid",
    )
    return tuple(str(row[0]) for row in found)


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _rows(sandbox: Sandbox, sql: str) -> tuple[Row, ...]:
    return sandbox.query(sql, MAX_SCHEMA_ROWS).rows
