"""What a database holds, counted: each column's texts and numbers, repeated rows, values without their row.

`read_survey` is the one function with I/O. It reads through a sandbox, with limits for a database that its owner looks
at: a column that exceeds them is left unexamined and named. Memory is bounded: of a column's texts the `MAX_TEXTS`
commonest are kept, and as many that are no plain numbers. Views and virtual tables are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from env_server.dataset import Row
from env_server.errors import SQLError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import Column, Schema, Table, quote_identifier, read_schema

SURVEY_LIMITS = SandboxSettings(vm_steps=4_000_000_000, deadline_s=120.0)
"""One statement looks through a whole table."""
MAX_TEXTS = 20_000
MAX_TEXT_CHARS = 200
"""Longer texts are counted, and not looked into."""
COMMON_NUMBERS = 12
SENTINELS = tuple(sign * int(digit * length) for digit in "9" for length in range(3, 10) for sign in (-1, 1))
"""Numbers that people write where there is none."""


@dataclass(frozen=True, slots=True)
class ColumnSurvey:
    """One column of a table with `rows` rows. `texts` and `numbers`: distinct ones and how often, commonest first.

    `low` and `high` bound its numbers, SENTINELS aside. `distinct` counts all values but NULL.
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
    problem: str = ""

    @property
    def unique(self) -> bool:
        """Whether every row has a value of its own."""
        return self.rows > 0 and self.nulls == 0 and self.distinct == self.rows


@dataclass(frozen=True, slots=True)
class TableSurvey:
    """One table. `duplicates`: rows that are there already, one of which is `duplicate`.

    `last`: its last row, and `totals` the sum of each column before it, where rows come in the order of a file.
    """

    schema: Table
    columns: tuple[ColumnSurvey, ...]
    rows: int
    duplicates: int = 0
    duplicate: Row = ()
    last: Row = ()
    totals: Row = ()

    @property
    def name(self) -> str:
        """Its name."""
        return self.schema.name

    def column(self, name: str) -> ColumnSurvey | None:
        """Return a column by its name, in any case."""
        return next((column for column in self.columns if column.name.casefold() == name.casefold()), None)


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
        return next((table for table in self.tables if table.name.casefold() == name.casefold()), None)


def read_survey(sandbox: Sandbox, db_id: str, *, imported: bool) -> DatabaseSurvey:
    """Survey the database that `sandbox` has open. Raises SQLError when the file is damaged, DataError."""
    schema = read_schema(sandbox)
    tables = [table for table in schema.tables if not table.is_view and not table.is_virtual]
    surveys = tuple(_table(sandbox, table, imported) for table in tables)
    return DatabaseSurvey(db_id, schema, surveys, imported=imported)


def read_references(sandbox: Sandbox, references: Iterable[Reference]) -> tuple[Reference, ...]:
    """Count the values of each reference that have no row. One that cannot be counted is left out."""
    found = []
    for each in references:
        child = f"SELECT DISTINCT {quote_identifier(each.column)} AS v FROM {_main(each.table)}"
        parent = f"SELECT {quote_identifier(each.parent_column)} FROM {_main(each.parent)}"
        lost = f"SELECT v FROM ({child}) WHERE v IS NOT NULL AND v NOT IN ({parent} WHERE {_some(each)})"
        try:
            ((count,),) = sandbox.query(f"SELECT COUNT(*) FROM ({lost})", 1).rows
            ((distinct,),) = sandbox.query(f"SELECT COUNT(v) FROM ({child})", 1).rows
            examples = sandbox.query(f"{lost} LIMIT 3", 3).rows
        except SQLError:
            continue
        shown = tuple(str(value) for (value,) in examples)
        found.append(replace(each, distinct=_int(distinct), lost=_int(count), examples=shown))
    return tuple(found)


def _some(reference: Reference) -> str:
    return f"{quote_identifier(reference.parent_column)} IS NOT NULL"


def _table(sandbox: Sandbox, table: Table, imported: bool) -> TableSurvey:
    rows = table.row_count or 0
    columns = tuple(_column(sandbox, table, column, rows) for column in table.columns)
    survey = TableSurvey(table, columns, rows)
    if rows and not any(column.unique or column.primary_key for column in columns):
        survey = _with_duplicates(sandbox, survey)
    return _with_last(sandbox, survey) if imported and rows > 2 else survey


def _column(sandbox: Sandbox, table: Table, column: Column, rows: int) -> ColumnSurvey:
    survey = ColumnSurvey(column.name, column.type, column.primary_key, rows)
    name, source = quote_identifier(column.name), f"FROM {_main(table.name)}"
    is_number = f"typeof({name}) IN ('integer', 'real')"
    usual = f"{is_number} AND {name} NOT IN ({', '.join(map(str, SENTINELS))})"
    counts = (
        f"SELECT COUNT({name}), COUNT(DISTINCT {name}), COALESCE(SUM({is_number}), 0), "
        f"COALESCE(SUM(typeof({name}) = 'text'), 0), MIN(CASE WHEN {usual} THEN {name} END), "
        f"MAX(CASE WHEN {usual} THEN {name} END) {source}"
    )
    short = f"typeof({name}) = 'text' AND length({name}) <= {MAX_TEXT_CHARS}"
    grouped = f"SELECT {name}, COUNT(*) {source} WHERE {{}} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {{}}"
    try:
        ((present, distinct, numbers, texts, low, high),) = sandbox.query(counts, 1).rows
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
            found = sandbox.query(grouped.format(short, MAX_TEXTS), MAX_TEXTS).rows
            if len(found) == MAX_TEXTS:
                # What is wrong with numbers is rare among them: look for it apart.
                odd = f"{short} AND {name} GLOB '*[^-0-9.]*'"
                rare = sandbox.query(grouped.format(odd, MAX_TEXTS), MAX_TEXTS).rows
                found = tuple(dict.fromkeys((*found, *rare)))
            survey = replace(survey, texts=tuple((str(text), _int(count)) for text, count in found))
        if survey.number_cells:
            found = sandbox.query(grouped.format(is_number, COMMON_NUMBERS), COMMON_NUMBERS).rows
            common = tuple((each, _int(count)) for each, count in found if isinstance(each, int | float))
            survey = replace(survey, numbers=common)
    except SQLError as error:
        return replace(survey, problem=error.message)
    return survey


def _with_duplicates(sandbox: Sandbox, table: TableSurvey) -> TableSurvey:
    names = ", ".join(quote_identifier(column.name) for column in table.columns)
    groups = f"SELECT {names} FROM {_main(table.name)} GROUP BY {names}"
    try:
        ((distinct,),) = sandbox.query(f"SELECT COUNT(*) FROM ({groups})", 1).rows
        repeated = sandbox.query(f"{groups} HAVING COUNT(*) > 1 LIMIT 1", 1).rows
    except SQLError:
        return table
    return replace(table, duplicates=table.rows - _int(distinct), duplicate=repeated[0] if repeated else ())


def _with_last(sandbox: Sandbox, table: TableSurvey) -> TableSurvey:
    source = _main(table.name)
    names = [quote_identifier(column.name) for column in table.columns]
    if any(column.name.casefold() == "rowid" for column in table.columns):
        return table
    sums = ", ".join(f"SUM(CASE WHEN typeof({name}) IN ('integer', 'real') THEN {name} END)" for name in names)
    end = f"(SELECT MAX(rowid) FROM {source})"
    try:
        last = sandbox.query(f"SELECT {', '.join(names)} FROM {source} WHERE rowid = {end}", 1).rows
        totals = sandbox.query(f"SELECT {sums} FROM {source} WHERE rowid < {end}", 1).rows
    except SQLError:
        return table
    return replace(table, last=last[0], totals=totals[0])


def _main(table: str) -> str:
    return f"main.{quote_identifier(table)}"


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
