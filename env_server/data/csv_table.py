"""A CSV or TSV file as a table: the delimiter, the types and the rows, in bounded memory however long the file is.

- The first line names the columns. Cells are separated by `,` `;` a tab or `|`, whichever splits the first lines
  into the same number of cells (`delimiter_of`); a `.tsv` file by tabs; by what a first line `sep=;` says. A cell that
  holds the delimiter, a quote or a line break is put in double quotes, a quote inside is doubled. Blanks after a
  delimiter, and blank lines, do not count.
- An empty or blank cell is NULL. A column is INTEGER or REAL when every other cell is a number that reads back
  unchanged in value; otherwise it is TEXT and keeps every cell as it is written. So `007`, `+49 30 1234`, dates
  and numbers of more digits than a REAL can hold stay text, and so do `1.1` and `1.10` in one column (`Twins`).
- The file is UTF-8, with or without byte order marks. Letters are composed (NFC), NUL characters left out. What is not
  UTF-8, and a row with more or fewer cells than the header, is a DataError with the line.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from env_server.data.cells import EXACT_DIGITS, PLAIN_INTEGER, PLAIN_REAL, Twins, is_code_name, normal, read_number
from env_server.data.json_files import HEAD_BYTES, cannot_read, not_utf8, wide_encoding
from env_server.data.source_table import ColumnType, SourceColumn, SourceTable, column_names
from env_server.dataset import Row, SQLValue
from env_server.errors import DataError

CSV_SUFFIXES = (".csv", ".tsv")
DELIMITERS = ("\t", ";", "|", ",")
MAX_CELL_CHARS = 100_000_000
"""Of a longer one, a quote is missing."""
csv.field_size_limit(MAX_CELL_CHARS)
_DIALECT: dict[str, Any] = {"skipinitialspace": True, "strict": True}
_SEP_LINE = re.compile(r'"?sep=(\\t|[,;|\t])"?\s*', re.IGNORECASE)
"""The first line with which spreadsheets state the delimiter."""
_SAMPLE_RECORDS = 200
_INT64 = 2**63


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
    found = [_Inference(is_code_name(each)) for each in headers]
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
    """What the cells of a column have been so far; one that is neither integer nor real is text.

    `is_code`: it is called like a column of versions, whose 1.10 is not 1.1.
    """

    is_code: bool
    integer: bool = True
    real: bool = True
    complete: bool = True
    seen: bool = False
    twins: Twins = field(default_factory=Twins)

    def add(self, cell: str) -> None:
        text = cell.strip()
        if not text:
            self.complete = False
            return
        self.seen = True
        if self.integer or self.real:
            if PLAIN_INTEGER.fullmatch(text):
                self.integer &= -_INT64 <= int(text) < _INT64 if len(text) <= 20 else False
                self.real &= len(text.lstrip("-")) <= EXACT_DIGITS
            else:
                self.integer = False
                self.real &= PLAIN_REAL.fullmatch(text) is not None and math.isfinite(float(text))
            if self.real and not self.twins.ended:
                self.twins.add(text)

    @property
    def type(self) -> ColumnType:
        if self.seen and self.integer:
            return ColumnType.INTEGER
        is_real = self.seen and self.real and not self.is_code and self.twins.pair is None
        return ColumnType.REAL if is_real else ColumnType.TEXT


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
    line = 1
    try:
        with _opened(path) as file:
            lines = map(_clean, file)
            first = next(lines, "")
            skipped = 1 if _SEP_LINE.fullmatch(first) else 0
            reader = csv.reader(lines if skipped else chain([first], lines), **_DIALECT, delimiter=delimiter)
            line += skipped
            for cells in reader:
                if cells:
                    yield line, cells
                line = reader.line_num + 1 + skipped
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: {error}. Check the quotes from here on: a quote that opens a cell must be "
            "closed, and one inside a quoted cell must be doubled"
        ) from error
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def _opened(path: Path) -> TextIO:
    """Open the file. Raises DataError where it is UTF-16, which may pass for UTF-8 with NULs in it, and OSError."""
    with path.open("rb") as file:
        if wide_encoding(file.read(HEAD_BYTES)):
            raise not_utf8(path)
    return path.open(encoding="utf-8-sig", newline="")


def _clean(line: str) -> str:
    """Return a line in composed letters, without NULs and without the marks with which joined files begin."""
    return line if line.isascii() and "\0" not in line else normal(line.lstrip("\ufeff"))


def delimiter_of(path: Path) -> str:
    """Return the delimiter that splits the first records evenly: that of a `sep=` line, else the likeliest.

    A cell that holds another one that would split evenly, and is neither a number like `1,5` nor prose, tells against
    a delimiter; then more cells are better, and the comma, which texts and numbers hold, is the last choice.
    """
    try:
        with _opened(path) as file:
            sample = file.read(HEAD_BYTES)
            cut = bool(file.read(1))
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except OSError as error:
        raise cannot_read(path, error) from error
    lines = [_clean(line) for line in io.StringIO(sample, newline="")]
    if lines and (stated := _SEP_LINE.fullmatch(lines[0])):
        return "\t" if stated[1] == "\\t" else stated[1]
    if path.suffix.lower() == ".tsv":
        return "\t"
    usual: dict[str, tuple[int, int]] = {}
    even: dict[str, Sequence[Sequence[str]]] = {}
    for delimiter in DELIMITERS:
        records, whole = _sample(lines, delimiter, cut)
        widths = Counter(len(cells) for cells in records if len(cells) > 1)
        usual[delimiter] = max(((count, width) for width, count in widths.items()), default=(0, 0))
        if whole and records and usual[delimiter][0] == len(records):
            even[delimiter] = records
    if len(even) < 2:
        return next(iter(even), max(DELIMITERS, key=usual.__getitem__))

    def fitness(delimiter: str) -> tuple[int, int]:
        inner = re.compile(f"[{''.join(even).replace(delimiter, '')}](?! )")
        cells = (cell for record in even[delimiter] for cell in record)
        return -sum(inner.search(cell) is not None and not read_number(cell) for cell in cells), usual[delimiter][1]

    return max(even, key=fitness)


def _sample(lines: Sequence[str], delimiter: str, cut: bool) -> tuple[list[list[str]], bool]:
    """Return the first records, and whether all of them could be read.

    The last record of a text that was cut off does not count.
    """
    left = iter(lines)
    records: list[list[str]] = []
    try:
        reader = csv.reader(left, **_DIALECT, delimiter=delimiter)
        records.extend(cells for cells in islice(reader, _SAMPLE_RECORDS) if cells)
    except csv.Error:
        return records, cut and not next(left, "")
    return (records[:-1] if cut and len(records) > 1 and not next(left, "") else records), True
