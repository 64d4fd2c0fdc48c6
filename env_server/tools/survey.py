"""What a database holds, counted: each column's texts and numbers, repeated rows, values without their row.

It is read through a sandbox, with limits for a database that its owner examines: a column that exceeds them is left
unexamined and named. Memory is bounded: of a column's texts the `MAX_TEXTS` commonest are kept, and as many that are no
plain numbers. Views and virtual tables are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from env_server.dataset import Row, SQLValue
from env_server.errors import SQLError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import Column, Schema, Table, named, quote_identifier, read_schema

SURVEY_LIMITS = SandboxSettings(vm_steps=4_000_000_000, deadline_s=120.0)
"""One statement reads a whole table."""
MAX_TEXTS = 20_000
MAX_TEXT_CHARS = 200
"""Longer texts are counted, and not examined."""
MAX_BLOBS = 1_000
COMMON_NUMBERS = 12
SENTINELS = tuple(sign * int("9" * length) for length in range(3, 10) for sign in (-1, 1))
"""Numbers that people write where there is none."""
UNKNOWN_COLLATION = re.compile("no such collation sequence: (.+)")
"""What SQLite says of an order of texts that the program defines which wrote the database."""


@dataclass(frozen=True, slots=True)
class ColumnSurvey:
    """One column of a table with `rows` rows. `texts` and `numbers`: distinct ones and how often, commonest first.

    `blobs`: the beginnings of some. `low` and `high` bound its numbers, SENTINELS aside. NULL is not in `distinct`.
    """

    name: str
    declared: str
    primary_key: bool
    rows: int
    nulls: int = 0
    distinct: int = 0
    text_cells: int = 0
    number_cells: int = 0
    texts: tuple[tuple[str, int], ...] = ()
    numbers: tuple[tuple[int | float, int], ...] = ()
    low: int | float | None = None
    high: int | float | None = None
    blobs: tuple[bytes, ...] = ()
    problem: str = ""

    @property
    def unique(self) -> bool:
        """Whether every row has a value of its own."""
        return self.rows > 0 and self.nulls == 0 and self.distinct == self.rows


@dataclass(frozen=True, slots=True)
class TableSurvey:
    """One table. `duplicates`: rows that occur already, one of which is `duplicate`.

    `last`: its last row, and `totals` the sum of each column before it, where rows come in the order of a file.
    `problem`: why its rows cannot be counted.
    """

    schema: Table
    columns: tuple[ColumnSurvey, ...]
    rows: int
    duplicates: int = 0
    duplicate: Row = ()
    last: Row = ()
    totals: Row = ()
    problem: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.schema.name

    def column(self, name: str) -> ColumnSurvey | None:
        """Return a column by its name, in any case."""
        return named(self.columns, name)


@dataclass(frozen=True, slots=True)
class Reference:
    """A column whose values should be those of another one. `lost` distinct values are not, such as `examples`."""

    table: str
    column: str
    parent: str
    parent_column: str
    declared: bool
    distinct: int = 0
    lost: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatabaseSurvey:
    """One database; `imported`: it was made from files of tables, so that rows have an order."""

    db_id: str
    schema: Schema
    tables: tuple[TableSurvey, ...]
    imported: bool = False

    def table(self, name: str) -> TableSurvey | None:
        """Return a table by its name, in any case."""
        return named(self.tables, name)


def read_survey(sandbox: Sandbox, db_id: str, *, imported: bool) -> DatabaseSurvey:
    """Survey the database that `sandbox` has open. Raises SQLError when the file is damaged, DataError."""
    schema = read_schema(sandbox)
    tables = [table for table in schema.tables if not table.is_view and not table.is_virtual]
    return DatabaseSurvey(db_id, schema, tuple(_table(sandbox, table, imported) for table in tables), imported=imported)


def read_references(sandbox: Sandbox, references: Iterable[Reference]) -> tuple[Reference, ...]:
    """Count the values of each reference that have no row. One that cannot be counted is left out."""
    found = []
    for each in references:
        parent_column = quote_identifier(each.parent_column)
        child = f"SELECT DISTINCT {quote_identifier(each.column)} AS v FROM {_main(each.table)}"
        parent = f"SELECT {parent_column} FROM {_main(each.parent)} WHERE {parent_column} IS NOT NULL"
        lost = f"SELECT v FROM ({child}) WHERE v IS NOT NULL AND v NOT IN ({parent})"
        try:
            count, distinct = _first(sandbox, f"SELECT (SELECT COUNT(*) FROM ({lost})), COUNT(v) FROM ({child})")
            examples = sandbox.query(f"{lost} LIMIT 3", 3).rows
        except SQLError:
            continue
        shown = tuple(str(value) for (value,) in examples)
        found.append(replace(each, distinct=_int(distinct), lost=_int(count), examples=shown))
    return tuple(found)


def _table(sandbox: Sandbox, table: Table, imported: bool) -> TableSurvey:
    rows, problem = table.row_count or 0, ""
    if table.row_count is None:
        try:
            rows = _int(_first(sandbox, f"SELECT COUNT(*) FROM {_main(table.name)}")[0])
        except SQLError as error:
            problem = error.message
    columns = tuple(_column(sandbox, table, column, rows) for column in table.columns)
    survey = TableSurvey(table, columns, rows, problem=problem)
    try:
        if rows and not any(column.unique or column.primary_key for column in columns):
            survey = _with_duplicates(sandbox, survey)
        if imported and rows > 2 and survey.column("rowid") is None:
            survey = _with_last(sandbox, survey)
    except SQLError:
        pass  # too large: such findings are left out
    return survey


def _column(sandbox: Sandbox, table: Table, column: Column, rows: int) -> ColumnSurvey:
    survey = ColumnSurvey(column.name, column.type, column.primary_key, rows)
    name, source = quote_identifier(column.name), f"FROM {_main(table.name)}"
    is_number = f"typeof({name}) IN ('integer', 'real')"
    usual = f"CASE WHEN {is_number} AND {name} NOT IN ({', '.join(map(str, SENTINELS))}) THEN {name} END"
    counts = (
        f"SELECT COUNT({name}), COUNT(DISTINCT {name}), COALESCE(SUM({is_number}), 0), "
        f"COALESCE(SUM(typeof({name}) = 'text'), 0), MIN({usual}), MAX({usual}) {source}"
    )
    is_short = f"typeof({name}) = 'text' AND length({name}) <= {MAX_TEXT_CHARS}"

    def commonest(condition: str, most: int) -> tuple[Row, ...]:
        by_count = f"SELECT {name}, COUNT(*) {source} WHERE {condition} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {most}"
        return sandbox.query(by_count, most).rows

    try:
        present, distinct, numbers, texts, low, high = _first(sandbox, counts)
        survey = replace(
            survey,
            nulls=rows - _int(present),
            distinct=_int(distinct),
            number_cells=_int(numbers),
            text_cells=_int(texts),
            low=low if isinstance(low, int | float) else None,
            high=high if isinstance(high, int | float) else None,
        )
        if survey.text_cells:
            found = commonest(is_short, MAX_TEXTS)
            if len(found) == MAX_TEXTS:
                # What is wrong with numbers is rare among them.
                found = tuple(
                    dict.fromkeys((*found, *commonest(f"{is_short} AND {name} GLOB '*[^-0-9.]*'", MAX_TEXTS)))
                )
            survey = replace(survey, texts=tuple((str(text), _int(count)) for text, count in found))
        if survey.text_cells + survey.number_cells < _int(present):
            few = f"SELECT DISTINCT substr({name}, 1, {MAX_TEXT_CHARS}) {source} WHERE typeof({name}) = 'blob'"
            found = sandbox.query(f"{few} LIMIT {MAX_BLOBS}", MAX_BLOBS).rows
            survey = replace(survey, blobs=tuple(blob for (blob,) in found if isinstance(blob, bytes)))
        if survey.number_cells:
            found = commonest(is_number, COMMON_NUMBERS)
            common = tuple((each, _int(count)) for each, count in found if isinstance(each, int | float))
            survey = replace(survey, numbers=common)
    except SQLError as error:
        return replace(survey, problem=error.message)
    return survey


def _with_duplicates(sandbox: Sandbox, table: TableSurvey) -> TableSurvey:
    names = ", ".join(quote_identifier(column.name) for column in table.columns)
    groups = f"SELECT {names} FROM {_main(table.name)} GROUP BY {names}"
    (distinct,) = _first(sandbox, f"SELECT COUNT(*) FROM ({groups})")
    repeated = sandbox.query(f"{groups} HAVING COUNT(*) > 1 LIMIT 1", 1).rows
    return replace(table, duplicates=table.rows - _int(distinct), duplicate=repeated[0] if repeated else ())


def _with_last(sandbox: Sandbox, table: TableSurvey) -> TableSurvey:
    source = _main(table.name)
    names = [quote_identifier(column.name) for column in table.columns]
    sums = ", ".join(f"SUM(CASE WHEN typeof({name}) IN ('integer', 'real') THEN {name} END)" for name in names)
    end = f"(SELECT MAX(rowid) FROM {source})"
    last = _first(sandbox, f"SELECT {', '.join(names)} FROM {source} WHERE rowid = {end}")
    return replace(table, last=last, totals=_first(sandbox, f"SELECT {sums} FROM {source} WHERE rowid < {end}"))


def _first(sandbox: Sandbox, sql: str) -> Row:
    return sandbox.query(sql, 1).rows[0]


def _main(table: str) -> str:
    return f"main.{quote_identifier(table)}"


def _int(value: SQLValue) -> int:
    return value if isinstance(value, int) else 0
