"""A CSV or TSV file as a table: the delimiter, the types and the rows, in bounded memory however long the file is.

- The first line names the columns. Cells are separated by `,` `;` a tab or `|`, whichever splits the first lines
  into the same number of cells; a `.tsv` file by tabs. A cell that holds the delimiter, a quote or a line break is
  put in double quotes, a quote inside is doubled. Blanks after a delimiter, and blank lines, do not count.
- An empty or blank cell is NULL. A column is INTEGER or REAL when every other cell is a number that reads back
  unchanged in value; otherwise it is TEXT and keeps every cell as it is written. So `007`, `+49 30 1234`, dates
  and numbers of more digits than a REAL can hold stay text.
- The file is UTF-8, with or without a byte order mark. What is not, and a row with more or fewer cells than the
  header, is a DataError with the line.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from env_server.data.json_files import cannot_read, not_utf8
from env_server.data.source_table import ColumnType, SourceColumn, SourceTable, column_names
from env_server.dataset import Row, SQLValue
from env_server.errors import DataError

CSV_SUFFIXES = (".csv", ".tsv")
DELIMITERS = (",", ";", "\t", "|")
MAX_CELL_CHARS = 100_000_000
"""Of a longer one, a quote is missing."""
csv.field_size_limit(MAX_CELL_CHARS)
_DIALECT: dict[str, Any] = {"skipinitialspace": True, "strict": True}
_SAMPLE_CHARS = 65_536
_SAMPLE_RECORDS = 200
_EXACT_DIGITS = 15
"""Decimal digits that every REAL keeps."""
_INT64 = 2**63

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
# An exponent without a sign or a point, as in 1E5, is more often a code than a number.
_REAL = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.)(?:[eE][+-]?[0-9]+)?|-?(?:0|[1-9][0-9]*)[eE][+-][0-9]+"
)


def read_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the records as they are written, the header first, each with its first line. Raises DataError.

    One that is not as wide as the header is among them.
    """
    yield from _records(path, delimiter_of(path))


def read_csv(path: Path, name: str) -> SourceTable:
    """Look through the whole file once and return it as a table. Raises DataError."""
    delimiter = delimiter_of(path)
    records = _records(path, delimiter)
    first = next(records, None)
    if first is None:
        raise DataError(f"{path} is empty. Its first line must name the columns")
    headers = first[1]
    found = [_Inference() for _ in headers]
    for _, cells in of_width(path, records, len(headers)):
        for inference, cell in zip(found, cells, strict=True):
            inference.add(cell)
    columns = tuple(
        SourceColumn(column, inference.type, inference.complete)
        for column, inference in zip(column_names(headers), found, strict=True)
    )

    def rows() -> Iterator[Row]:
        convert = [_CONVERTERS[column.type] for column in columns]
        again = islice(_records(path, delimiter), 1, None)
        for line, cells in of_width(path, again, len(columns)):
            try:
                yield tuple(to_value(cell) for to_value, cell in zip(convert, cells, strict=True))
            except ValueError as error:
                raise DataError(f"{path}, line {line}: the file changed while it was read. Try again") from error

    return SourceTable(name, path, columns, rows)


@dataclass(slots=True)
class _Inference:
    """What the cells of a column have been so far; one that is neither integer nor real is text."""

    integer: bool = True
    real: bool = True
    complete: bool = True
    seen: bool = False

    def add(self, cell: str) -> None:
        text = cell.strip()
        if not text:
            self.complete = False
            return
        self.seen = True
        if self.integer or self.real:
            if _INTEGER.fullmatch(text):
                self.integer &= -_INT64 <= int(text) < _INT64 if len(text) <= 20 else False
                self.real &= len(text.lstrip("-")) <= _EXACT_DIGITS
            else:
                self.integer = False
                self.real &= _REAL.fullmatch(text) is not None and math.isfinite(float(text))

    @property
    def type(self) -> ColumnType:
        if self.seen and self.integer:
            return ColumnType.INTEGER
        return ColumnType.REAL if self.seen and self.real else ColumnType.TEXT


def _text(cell: str) -> SQLValue:
    return cell if cell.strip() else None


def _integer(cell: str) -> SQLValue:
    return int(cell) if cell.strip() else None


def _real(cell: str) -> SQLValue:
    return float(cell) if cell.strip() else None


_CONVERTERS: dict[ColumnType, Callable[[str], SQLValue]] = {
    ColumnType.TEXT: _text,
    ColumnType.INTEGER: _integer,
    ColumnType.REAL: _real,
}


def of_width(path: Path, records: Iterator[tuple[int, list[str]]], width: int) -> Iterator[tuple[int, list[str]]]:
    """Pass on the records; raises DataError at one that is not `width` cells wide."""
    for line, cells in records:
        if len(cells) != width:
            raise DataError(
                f"{path}, line {line}: has {len(cells)} cells, but the header has {width}. Add what is missing, or put "
                "a cell that holds the delimiter in double quotes"
            )
        yield line, cells


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the records that are not blank lines, the header first, each with the line on which it begins."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, **_DIALECT, delimiter=delimiter)
            line = 1
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: {error}. Check the quotes from here on: a quote that opens a cell must be "
            "closed, and one inside a quoted cell must be doubled"
        ) from error
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def delimiter_of(path: Path) -> str:
    """Return the delimiter that splits the first records evenly, into as many cells as possible."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            sample = file.read(_SAMPLE_CHARS)
            cut = bool(file.read(1))
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except OSError as error:
        raise cannot_read(path, error) from error
    samples = {delimiter: _sample(sample, delimiter, cut) for delimiter in DELIMITERS}
    even = [d for d, (widths, whole) in samples.items() if whole and len(set(widths)) == 1 and widths[0] > 1]
    # Where none is even, the header decides, and the first record that does not fit will be named.
    return max(even or DELIMITERS, key=lambda delimiter: next(iter(samples[delimiter][0]), 0))


def _sample(text: str, delimiter: str, cut: bool) -> tuple[list[int], bool]:
    """Return the number of cells of each of the first records, and whether all of them could be read.

    The last record of a text that was cut off does not count.
    """
    lines = io.StringIO(text, newline="")
    widths: list[int] = []
    try:
        reader = csv.reader(lines, **_DIALECT, delimiter=delimiter)
        widths.extend(len(cells) for cells in islice(reader, _SAMPLE_RECORDS) if cells)
    except csv.Error:
        return widths, cut and not lines.readline()
    return (widths[:-1] if cut and len(widths) > 1 and not lines.readline() else widths), True
