"""A Parquet file as a table, through pyarrow, which is imported only here and only where it is needed.

Whole numbers and booleans become INTEGER, floats and decimals REAL, binary BLOB, everything else TEXT: dates and
times as ISO 8601 (in UTC where they carry a time zone), UUIDs and JSON as they are, lists and structures as JSON.
Letters are composed (NFC). Not-a-number is NULL. Unsigned numbers that SQLite cannot hold make their column TEXT. A
file is read in batches, so memory stays bounded.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from env_server.data.cells import normal
from env_server.data.source_table import ColumnType, SourceColumn, SourceTable, column_names
from env_server.dataset import Row, SQLValue
from env_server.errors import DataError

PARQUET_SUFFIXES = (".parquet", ".pq")
_BATCH_ROWS = 8_192
_LARGEST_INT64 = 2**63 - 1
_INTEGER_DIGITS = 18
"""Decimal digits of which every number is an INTEGER."""

Convert = Callable[[Any], list[SQLValue]]
"""Turns a pyarrow array into SQLite's values."""


def read_parquet(path: Path, name: str) -> SourceTable:
    """Look through the file once and return it as a table. Raises DataError."""
    arrow = import_pyarrow(f"{path}: Parquet is read", ", or save the table as CSV")
    with _errors(arrow, path):
        schema = arrow.parquet.read_schema(path)
        nulls, largest = [0] * len(schema), [0] * len(schema)
        unsigned = [i for i, field in enumerate(schema) if field.type == arrow.uint64()]
        for batch in _batches(arrow, path):
            for i, column in enumerate(batch.columns):
                nulls[i] += column.null_count
            for i in unsigned:
                largest[i] = max(largest[i], arrow.compute.max(batch.column(i)).as_py() or 0)
    if not len(schema):
        raise DataError(f"{path} has no column. Remove it, or write it again")
    kinds = [
        (ColumnType.TEXT, _written) if large > _LARGEST_INT64 else _kind(arrow, field.type)
        for field, large in zip(schema, largest, strict=True)
    ]
    columns = tuple(
        SourceColumn(column, kind[0], complete=count == 0)
        for column, kind, count in zip(column_names(schema.names), kinds, nulls, strict=True)
    )

    def rows() -> Iterator[Row]:
        with _errors(arrow, path):
            for batch in _batches(arrow, path):
                yield from zip(
                    *(kind[1](column) for kind, column in zip(kinds, batch.columns, strict=True)), strict=True
                )

    return SourceTable(name, path, columns, rows)


def read_first_rows(path: Path, count: int) -> list[list[str]]:
    """Return the names of the columns, then at most `count` rows as text. Raises DataError."""
    arrow = import_pyarrow(f"{path}: Parquet is read")
    with _errors(arrow, path), arrow.parquet.ParquetFile(path) as file:
        names = [str(name) for name in file.schema_arrow.names]
        batch = next(file.iter_batches(batch_size=count), None)
        columns = [] if batch is None else [_kind(arrow, column.type)[1](column) for column in batch.columns]
        return [names, *(["" if v is None else str(v) for v in row] for row in zip(*columns, strict=True))]


def import_pyarrow(doing: str, otherwise: str = "") -> Any:
    """Return pyarrow. Raises DataError, which says what is done with it and how to have it, or what to do otherwise."""
    try:
        for module in ("pyarrow.parquet", "pyarrow.compute"):
            importlib.import_module(module)
        return importlib.import_module("pyarrow")
    except ImportError as error:
        fix = f"In SQLEnv's folder: pip install -e '.[parquet]'{otherwise}"
        raise DataError(f"{doing} with pyarrow, which is not installed. {fix}") from error


@contextmanager
def _errors(arrow: Any, path: Path) -> Iterator[None]:
    """Raise what pyarrow makes of a broken file as a DataError."""
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise DataError(f"{path} cannot be read as Parquet: {reason}. Write the file again") from error


def _batches(arrow: Any, path: Path) -> Iterator[Any]:
    with arrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH_ROWS)


def _kind(arrow: Any, kind: Any) -> tuple[ColumnType, Convert]:
    """Return the type of the column, and what turns its arrays into values of that type."""
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return ColumnType.TEXT, lambda array: [None if v is None else str(v) for v in array.to_pylist()]
        column_type, convert = _kind(arrow, kind.storage_type)
        return column_type, lambda array: convert(array.storage)
    if types.is_dictionary(kind):
        column_type, convert = _kind(arrow, kind.value_type)
        return column_type, lambda array: convert(array.dictionary_decode())
    if types.is_boolean(kind) or types.is_duration(kind):
        return ColumnType.INTEGER, lambda array: _plain(array.cast(arrow.int64()))
    if types.is_integer(kind):
        return ColumnType.INTEGER, _plain
    if types.is_floating(kind):
        # By way of the shortest text that means the same: a narrow 0.1 becomes 0.1, not 0.10000000149011612.
        narrow = kind != arrow.float64()
        return ColumnType.REAL, lambda array: _plain(
            array.cast(arrow.string()).cast(arrow.float64()) if narrow else array
        )
    if types.is_decimal(kind):
        if kind.scale == 0 and kind.precision <= _INTEGER_DIGITS:
            return ColumnType.INTEGER, lambda array: [None if v is None else int(v) for v in array.to_pylist()]
        return ColumnType.REAL, lambda array: [None if v is None else float(v) for v in array.to_pylist()]
    if types.is_date(kind) or types.is_time(kind):
        return ColumnType.TEXT, lambda array: [_trimmed(v) for v in _texts(arrow, array)]
    if types.is_timestamp(kind):
        utc = arrow.timestamp(kind.unit)
        return ColumnType.TEXT, lambda array: [_trimmed(v) for v in _texts(arrow, array.cast(utc))]
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_null(kind):
        return ColumnType.TEXT, lambda array: [normal(v) if v else v for v in array.to_pylist()]
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return ColumnType.BLOB, _plain
    return ColumnType.TEXT, _written


def _plain(array: Any) -> list[SQLValue]:
    values: list[SQLValue] = array.to_pylist()
    return values


def _texts(arrow: Any, array: Any) -> list[str | None]:
    """Write each value as pyarrow does, which knows years beyond 9999; what it does not know is a number."""
    texts: list[str | None] = array.cast(arrow.string()).to_pylist()
    return [text.partition(": ")[2][:-1] if text and text[0] == "<" else text for text in texts]


def _written(array: Any) -> list[SQLValue]:
    """Write each value as JSON."""
    values = array.to_pylist()
    return [None if value is None else json.dumps(value, ensure_ascii=False, default=str) for value in values]


def _trimmed(text: str | None) -> str | None:
    """Drop the zeros of a fraction of a second: 12:30:00.500000 is 12:30:00.5, and 12:30:00.000 is 12:30:00."""
    return text.rstrip("0").rstrip(".") if text and "." in text else text
