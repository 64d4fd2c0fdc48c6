"""Parquet files: every kind of column, broken files, and pyarrow that is not installed."""

from __future__ import annotations

import datetime
import decimal
import math
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from env_server.data.parquet_table import read_parquet
from env_server.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

DAY = datetime.date(2024, 1, 31)
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
MOMENT = datetime.datetime(2024, 1, 31, 3, 4, 5)


def read_column(folder: Path, array: Any) -> tuple[str, bool, list[Any]]:
    """The type that a column of these values gets, whether it is complete, and its values."""
    file = folder / "t.parquet"
    pq.write_table(pa.table({"x": array}), file)
    table = read_parquet(file, "t")
    (column,) = table.columns
    assert column.name == "x"
    return column.type.value, column.complete, [row[0] for row in table.rows()]


def kinds() -> dict[str, tuple[Any, str, list[Any]]]:
    """Arrays of pyarrow, each with the type and the values that it should become."""
    return {
        "int8": (pa.array([1, None, -3], pa.int8()), "INTEGER", [1, None, -3]),
        "uint64": (pa.array([1, 2**63 - 1], pa.uint64()), "INTEGER", [1, 2**63 - 1]),
        "uint64 beyond": (pa.array([2**64 - 1, None, 9], pa.uint64()), "TEXT", ["18446744073709551615", None, "9"]),
        "bool": (pa.array([True, None, False]), "INTEGER", [1, None, 0]),
        "float16": (pa.array([1.5, None], pa.float16()), "REAL", [1.5, None]),
        "float32": (pa.array([0.1, 1e30, math.inf], pa.float32()), "REAL", [0.1, 1e30, math.inf]),
        "float64": (pa.array([0.1, None]), "REAL", [0.1, None]),
        "decimal": (pa.array([decimal.Decimal("1.50"), None]), "REAL", [1.5, None]),
        "whole decimal": (pa.array([decimal.Decimal("15"), None], pa.decimal128(18, 0)), "INTEGER", [15, None]),
        "string": (pa.array(["é😀", "", None]), "TEXT", ["é😀", "", None]),
        "large_string": (pa.array(["a", None], pa.large_string()), "TEXT", ["a", None]),
        "dictionary": (pa.array(["a", "b", "a", None]).dictionary_encode(), "TEXT", ["a", "b", "a", None]),
        "numbers by dictionary": (pa.array([7, 7, None]).dictionary_encode(), "INTEGER", [7, 7, None]),
        "date32": (pa.array([DAY, None]), "TEXT", ["2024-01-31", None]),
        "date64": (pa.array([DAY], pa.date64()), "TEXT", ["2024-01-31"]),
        "timestamp": (pa.array([MOMENT, None], pa.timestamp("us")), "TEXT", ["2024-01-31 03:04:05", None]),
        "fraction": (pa.array([1_500_000_010], pa.timestamp("ns")), "TEXT", ["1970-01-01 00:00:01.50000001"]),
        "zone": (pa.array([MOMENT], pa.timestamp("s", "America/New_York")), "TEXT", ["2024-01-31 03:04:05"]),
        "time": (pa.array([datetime.time(1, 2, 3, 400)]), "TEXT", ["01:02:03.0004"]),
        "duration": (pa.array([datetime.timedelta(seconds=2)], pa.duration("s")), "INTEGER", [2]),
        "binary": (pa.array([b"\x00a", None]), "BLOB", [b"\x00a", None]),
        "fixed binary": (pa.array([b"ab"], pa.binary(2)), "BLOB", [b"ab"]),
        "list": (pa.array([[1, None], None, []]), "TEXT", ["[1, null]", None, "[]"]),
        "structure": (pa.array([{"a": DAY, "b": "ü"}]), "TEXT", ['{"a": "2024-01-31", "b": "ü"}']),
        "nothing": (pa.nulls(2), "TEXT", [None, None]),
        "uuid": (pa.array([ID.bytes, None], pa.uuid()), "TEXT", [str(ID), None]),
        "json": (pa.array(['{"a": 1}', None], pa.json_()), "TEXT", ['{"a": 1}', None]),
        "truth of 8 bits": (pa.array([1, None], pa.bool8()), "INTEGER", [1, None]),
        "letters in parts": (pa.array(["Zu\u0308rich"]), "TEXT", ["Z\u00fcrich"]),
        "date beyond 9999": (pa.array([2_933_296], pa.int32()).cast(pa.date32()), "TEXT", ["10001-02-03"]),
        "date before 1": (pa.array([-800_000], pa.int32()).cast(pa.date32()), "TEXT", ["-0221-09-04"]),
        "time beyond all": (pa.array([10**18], pa.timestamp("ms")), "TEXT", ["1000000000000000000"]),
        "time beyond a day": (pa.array([90_000_000_000], pa.time64("us")), "TEXT", ["90000000000"]),
    }


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_of_column(tmp_path: Path, kind: str) -> None:
    array, expected, values = kinds()[kind]
    column_type, complete, read = read_column(tmp_path, array)
    assert column_type == expected
    assert read == values
    assert [type(value) for value in read] == [type(value) for value in values]
    assert complete == (None not in values)


def test_many_rows_in_several_row_groups(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": range(20_000), "": ["a"] * 20_000}), file, row_group_size=3_000)
    table = read_parquet(file, "t")
    assert [column.name for column in table.columns] == ["x", "column_2"]
    assert list(table.rows()) == [(i, "a") for i in range(20_000)]
    assert next(iter(table.rows())) == (0, "a")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"a,b\n1,2\n", b"PAR1" + bytes(40) + b"PAR1"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t.parquet"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_parquet(file, "t")
    assert str(raised.value).startswith(f"{file} cannot be read as Parquet: ")
    assert str(raised.value).endswith(". Write the file again")


def test_dates_that_python_does_not_know_within_a_list(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    pq.write_table(pa.table({"x": pa.array([[10**18]], pa.list_(pa.timestamp("ms")))}), file)
    with pytest.raises(DataError, match=r"t\.parquet cannot be read as Parquet"):
        list(read_parquet(file, "t").rows())


def test_a_file_without_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet has no column"):
        read_parquet(tmp_path / "t.parquet", "t")


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        DataError, match=r"pyarrow, which is not installed\. In SQLEnv's folder: pip install -e '\.\[parquet\]'"
    ):
        read_parquet(tmp_path / "t.parquet", "t")
