"""A sample of a table's rows, drawn from the whole of it, and which of its columns hold NULL.

Promises:
- Deterministic: the same table gives the same sample.
- Bounded: of a table of up to `SCANNED_ROWS` rows, every n-th row; of a larger one, the first and the last rows, and
  rows at equal distances of rowid between them, found through the tree. Of a large table WITHOUT ROWID, only the ends.
- NULL is looked for in every row of a table of up to `SCANNED_CELLS` cells, else in the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from env_server.dataset import Row
from env_server.errors import SQLError
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import quote_identifier

SAMPLED_ROWS = 2_000
KEPT_ROWS = 60
SCANNED_ROWS = 200_000
SCANNED_CELLS = 5_000_000

_ROWID_NAMES = ("rowid", "_rowid_", "oid")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled rows of one table, and for each column whether it holds NULL."""

    rows: tuple[Row, ...]
    has_null: tuple[bool, ...]


def read_sample(
    sandbox: Sandbox, table: str, columns: Sequence[str], key: Sequence[str], row_count: int | None
) -> Sample:
    """Sample a table. `key`: its primary key; `row_count`: None where counting failed. Raises SQLError, DataError."""
    reader = _Reader(sandbox, table, columns, key)
    try:
        rows = reader.spread(SAMPLED_ROWS, row_count)
    except SQLError as error:
        if not _is_limit(error):
            raise
        rows = reader.ends_and_between(KEPT_ROWS)
    has_null = [any(row[i] is None for row in rows) for i in range(len(columns))]
    if row_count is not None and len(rows) < row_count <= SCANNED_CELLS // max(1, len(columns)):
        has_null = reader.null_columns() or has_null
    return Sample(rows, tuple(has_null))


def spaced(items: Sequence[T], most: int) -> tuple[T, ...]:
    """Return at most `most` (two or more) items at equal distances, the first and the last among them."""
    if len(items) <= most:
        return tuple(items)
    return tuple(items[i * (len(items) - 1) // (most - 1)] for i in range(most))


def _is_limit(error: SQLError) -> bool:
    """Tell whether a statement was too large for the sandbox, so that a smaller one may do."""
    return error.kind in ("size", "budget")


class _Reader:
    """Reads one table, in the order of its rowid, or of its primary key where it has no rowid."""

    def __init__(self, sandbox: Sandbox, table: str, columns: Sequence[str], key: Sequence[str]) -> None:
        self._sandbox = sandbox
        self._table = f"main.{quote_identifier(table)}"
        self._columns = [quote_identifier(column) for column in columns]
        self._rows = f"SELECT {', '.join(self._columns)} FROM {self._table}"
        taken = {column.casefold() for column in columns}
        self._rowid = next((name for name in _ROWID_NAMES if name not in taken and self._has(name)), "")
        self._order = [self._rowid] if self._rowid else [quote_identifier(column) for column in key]
        # A name that none of the table's columns has.
        self._place = quote_identifier("_" + max(columns, key=len, default=""))

    def spread(self, most: int, row_count: int | None) -> tuple[Row, ...]:
        """Return at most `most` rows from the whole table."""
        if row_count is None or row_count > SCANNED_ROWS:
            return self.ends_and_between(most)
        if row_count <= most:
            return self._query(self._rows, most)
        keys = ", ".join(self._order)
        numbered = f"SELECT {keys}, row_number() OVER (ORDER BY {keys}) - 1 AS {self._place} FROM {self._table}"
        step = -(-row_count // most)
        chosen = f"SELECT {keys} FROM ({numbered}) WHERE {self._place} % {step} = 0"
        return self._query(f"{self._rows} WHERE ({keys}) IN ({chosen}) ORDER BY {keys}", most)

    def ends_and_between(self, most: int) -> tuple[Row, ...]:
        """Return at most `most` distinct rows, without passing over the others."""
        end = most // 4
        first = self._query(f"{self._rows} ORDER BY {', '.join(self._order)} LIMIT {end}", end)
        falling = ", ".join(f"{key} DESC" for key in self._order)
        last = self._query(f"{self._rows} ORDER BY {falling} LIMIT {end}", end)[::-1]
        between = self._between(most - 2 * end) if self._rowid else ()
        return tuple(dict.fromkeys((*first, *between, *last)))

    def null_columns(self) -> list[bool] | None:
        """Return for each column whether it holds NULL; None where the sandbox's limits do not allow to look."""
        counted = ", ".join(f"COUNT({column}) < COUNT(*)" for column in self._columns)
        try:
            (row,) = self._query(f"SELECT {counted} FROM {self._table}", 1)
        except SQLError as error:
            if not _is_limit(error):
                raise
            return None
        return [bool(each) for each in row]

    def _between(self, most: int) -> tuple[Row, ...]:
        """Return the rows that follow `most` points at equal distances from the first rowid to the last."""
        ends = [f"(SELECT {end}({self._rowid}) FROM {self._table})" for end in ("MIN", "MAX")]
        ((low, high),) = self._query(f"SELECT {', '.join(ends)}", 1)
        if not isinstance(low, int) or not isinstance(high, int):
            return ()
        step = max(1, (high - low) // most)
        points = f"WITH RECURSIVE points(x) AS (SELECT {low} UNION ALL SELECT x + {step} FROM points LIMIT {most})"
        following = f"SELECT {self._rowid} FROM {self._table} WHERE {self._rowid} >= x ORDER BY 1 LIMIT 1"
        return self._query(
            f"{points} {self._rows} WHERE {self._rowid} IN (SELECT ({following}) FROM points) ORDER BY {self._rowid}",
            most,
        )

    def _has(self, name: str) -> bool:
        try:
            self._query(f"SELECT {name} FROM {self._table} LIMIT 1", 1)
        except SQLError as error:
            if error.kind != "missing":
                raise
            return False
        return True

    def _query(self, sql: str, most: int) -> tuple[Row, ...]:
        return self._sandbox.query(sql, most).rows
