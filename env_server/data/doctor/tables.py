"""What is wrong with the tables and columns of a database, told from its survey. Pure.

Keys within and between tables: `env_server.data.doctor.references`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from env_server.data.doctor.cells import written_date, written_number
from env_server.data.doctor.columns import check_column
from env_server.data.doctor.findings import (
    DropDuplicates,
    DropLastRow,
    Finding,
    Kind,
    Place,
)
from env_server.data.doctor.references import likely_references, table_keys
from env_server.data.doctor.survey import DatabaseSurvey, TableSurvey
from env_server.dataset import SQLValue

_TOTALS = frozenset(("total", "totals", "sum", "grand total", "overall", "all", "summe", "gesamt", "subtotal"))
_SAME = 1e-6
_YEAR = re.compile(r"(?:19|20)\d\d")


def check_database(survey: DatabaseSurvey, order: bool | None = None) -> Iterator[Finding]:
    """Yield what is wrong with the tables and columns of a database.

    `order`: whether the day comes first in dates that do not say it.
    """
    keys = {(each.table, each.column) for each in likely_references(survey)}
    keys |= {(table, column.name) for table, column in table_keys(survey).items()}
    for table in survey.tables:
        yield from _rows(table, Place(survey.db_id, table.name))
        for column in table.columns:
            place = Place(survey.db_id, table.name, column.name)
            is_key = (table.name, column.name) in keys
            yield from check_column(column, place, imported=survey.imported, is_key=is_key, order=order)


def check_header(cells: Sequence[str], rows: int, place: Place) -> Iterator[Finding]:
    """Yield what is wrong with the first line of a file of tables, as it is written."""
    named = [" ".join(cell.split()) for cell in cells]
    data = [cell for cell in named if written_number(cell) or written_date(cell)]
    years = all(_YEAR.fullmatch(cell) for cell in data) and len(set(data)) == len(data) > 1  # a column for each
    if rows and data and not years and len(data) * 2 >= len(named):
        advice = "Put a line with the names of the columns above it"
        yield Finding(Kind.NO_HEADER, place, f"the first line has {', '.join(map(repr, data[:3]))}", advice)
        return
    blank = [i for i, cell in enumerate(named, start=1) if not cell]
    if blank:
        said = f"column {blank[0]} has no name, and was called column_{blank[0]}"
        yield Finding(Kind.RENAMED_COLUMN, place, said, "Give it a name, or leave it out")
    folded = [cell.casefold() for cell in named]
    twice = [cell for i, cell in enumerate(named) if cell and folded[i] in folded[:i]]
    if twice:
        said = f"two columns are called {twice[0]!r}; the second was called {twice[0]}_2"
        yield Finding(Kind.RENAMED_COLUMN, place, said, "Give each a name of its own")


def _rows(table: TableSurvey, place: Place) -> Iterator[Finding]:
    if not table.rows:
        yield Finding(Kind.EMPTY_TABLE, place, "it has no rows", "Leave it out, or check that it was exported whole")
    if table.duplicates:
        row = ", ".join(_short(value) for value in table.duplicate[:6])
        again = "row is" if table.duplicates == 1 else "rows are"
        said = f"{table.duplicates:,} {again} there already, such as ({row}): counts and sums count them again"
        yield Finding(Kind.DUPLICATE_ROWS, place, said, "Keep each row once", DropDuplicates())
    label = next((str(v) for v in table.last if isinstance(v, str) and v.strip(" :").casefold() in _TOTALS), "")
    sums = [value for value, total in zip(table.last, table.totals, strict=True) if _is_sum(value, total)]
    if label and sums:
        said = f"the last row is called {label!r} and has the sum of the others, {sums[0]!r}: sums are twice as high"
        yield Finding(Kind.TOTAL_ROW, place, said, "Leave the row out", DropLastRow(), (label,))


def _is_sum(value: SQLValue, total: SQLValue) -> bool:
    if not isinstance(value, int | float) or not isinstance(total, int | float) or not total:
        return False
    return abs(value - total) <= _SAME * abs(total)


def _short(value: SQLValue) -> str:
    text = "NULL" if value is None else repr(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 30 else text[:30] + "..."
