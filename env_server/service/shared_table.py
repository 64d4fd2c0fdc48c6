"""Numbers in memory that a parent and its forked workers share: one row per worker.

A row is written by its worker alone, while that worker lives; anyone may read. A cell is eight aligned bytes, so a
reader sees the old value or the new one. Nothing is left behind on disk, and what a killed worker had written stays,
for the parent to account for.
"""

from __future__ import annotations

import mmap

_CELL_BYTES = 8


class SharedTable:
    """`rows` x `columns` floats, 0 at first. Made before the workers are forked."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows = rows
        self.columns = columns
        self._cells = memoryview(mmap.mmap(-1, rows * columns * _CELL_BYTES)).cast("d")

    def row(self, row: int) -> memoryview[float]:
        """Return the row; what is written to it is written to the table."""
        return self._cells[row * self.columns : (row + 1) * self.columns]

    def total(self, column: int) -> float:
        """Return the sum of the column over all rows."""
        return sum(self._cells[column :: self.columns])

    def totals(self) -> list[float]:
        """Return the sum of each column over all rows."""
        return [self.total(column) for column in range(self.columns)]
