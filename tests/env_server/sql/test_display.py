"""The text of tables and results."""

from __future__ import annotations

import math

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Row, SQLValue
from env_server.settings import DisplaySettings
from env_server.sql.display import (
    MAX_COLUMNS,
    MAX_DESCRIBED_COLUMNS,
    describe_table,
    format_cell,
    format_float,
    format_result,
    sql_name,
)
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Column, ForeignKey, Table

SETTINGS = DisplaySettings()


def result(columns: tuple[str, ...], rows: tuple[Row, ...], row_count: int | None = -1) -> QueryResult:
    return QueryResult(columns, rows, len(rows) if row_count == -1 else row_count, 0)


def column(name: str, kind: str = "TEXT", key: bool = False) -> Column:
    return Column(name, kind, nullable=True, primary_key=key)


def test_a_table_is_described_in_a_line_per_column() -> None:
    table = Table(
        "pets",
        (column("pet_id", "INTEGER", key=True), column("name"), column("owner_id", "INTEGER"), column("weight", "")),
        (ForeignKey(("owner_id",), "owners", ("owner_id",)),),
        42,
    )
    assert describe_table(table) == (
        "pets: 42 rows\npet_id INTEGER primary key\nname TEXT\nowner_id INTEGER references owners(owner_id)\nweight"
    )


def test_names_are_written_as_sql_needs_them_and_kinds_are_told() -> None:
    table = Table("order", (column("first name"), column("x")), (ForeignKey(("x",), "a b", ()),), None, is_view=True)
    assert describe_table(table) == '"order" (view): unknown number of rows\n"first name" TEXT\nx TEXT references "a b"'


def test_one_row_is_singular_and_a_wide_table_is_cut() -> None:
    table = Table("t", tuple(column(f"c{i}") for i in range(MAX_DESCRIBED_COLUMNS + 180)), (), 1)
    lines = describe_table(table).split("\n")
    assert lines[0] == "t: 1 row"
    assert lines[-1] == "… and 180 more columns"
    assert len(lines) == MAX_DESCRIBED_COLUMNS + 2


def test_sql_names_are_quoted_exactly_where_sqlite_needs_it() -> None:
    connection = apsw.Connection(":memory:")
    for number, word in enumerate(sorted(apsw.keywords)):
        try:
            connection.execute(f"CREATE TABLE t{number} ({word} TEXT)")
            connection.execute(f"INSERT INTO t{number} VALUES ('the cell')")
            # CURRENT_DATE is accepted, and is the date.
            bare = connection.execute(f"SELECT {word} FROM t{number}").fetchall() == [("the cell",)]
        except apsw.SQLError:
            bare = False
        assert (sql_name(word) == word) is bare, word
    connection.close()


def test_rows_are_lines_under_a_header() -> None:
    shown = format_result(result(("name", "weight"), (("Rex", 3.0), (None, 2), ("", b"\x01\xff"))), SETTINGS)
    assert shown == "name | weight\nRex | 3.0\nNULL | 2\n'' | x'01ff'"


def test_an_empty_result_says_so() -> None:
    assert format_result(result(("a", "b"), ()), SETTINGS) == "a | b\nno rows"


@pytest.mark.parametrize(
    ("row_count", "notice"), [(2, ""), (3, "\n(1 more row)"), (39, "\n(37 more rows)"), (None, "\n(more rows)")]
)
def test_what_is_left_out_is_counted(row_count: int | None, notice: str) -> None:
    assert format_result(result(("a",), ((1,), (2,)), row_count), SETTINGS) == "a\n1\n2" + notice


def test_rows_that_do_not_fit_are_left_out_whole_and_counted() -> None:
    rows = tuple((f"row {i}",) for i in range(20))
    shown = format_result(result(("a",), rows, 500), DisplaySettings(max_chars=40))
    assert shown == "a\nrow 0\nrow 1\nrow 2\n(497 more rows)"


def test_more_rows_than_the_setting_are_not_shown() -> None:
    shown = format_result(result(("a",), ((1,), (2,), (3,))), DisplaySettings(max_rows=2))
    assert shown == "a\n1\n2\n(1 more row)"


def test_a_first_row_that_does_not_fit_is_cut() -> None:
    shown = format_result(result(("a",), (("x" * 70,), ("y",))), DisplaySettings(max_chars=30))
    assert shown == "a\n" + "x" * 14 + "…\n(1 more row)"


def test_a_wide_result_shows_its_first_columns_and_counts_the_rest() -> None:
    columns = tuple(f"c{i}" for i in range(MAX_COLUMNS + 180))
    header, row = format_result(result(columns, (tuple(range(len(columns))),)), SETTINGS).split("\n")
    assert header.endswith("c39 | … and 180 more columns")
    assert row.endswith("| 39")
    long_names = tuple("n" * 70 + str(i) for i in range(30))
    header, row = format_result(result(long_names, ((0,) * 30,)), SETTINGS).split("\n")
    assert len(header) < SETTINGS.max_chars / 2
    assert header.count("|") == row.count("|") + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        ("NULL", "'NULL'"),
        ("", "''"),
        (" x ", "' x '"),
        ("a | b", "'a | b'"),
        ("a|b", "a|b"),
        ("two\nlines\tand\r\0\x7f\u2028", "two\\nlines\\tand\\r\\x00\\x7f\\u2028"),
        ("né😀", "né😀"),
        ("x" * 81, "x" * 79 + "…"),
        ("x" * 80, "x" * 80),
        (b"", "x''"),
        (b"ab" * 100, "x'" + "6162" * 19 + "6…"),
        (-5, "-5"),
        (2**63 - 1, "9223372036854775807"),
    ],
)
def test_cells(value: SQLValue, text: str) -> None:
    assert format_cell(value, 80) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3.0"),
        (0.1, "0.1"),
        (1 / 3, "0.3333333333"),
        (2 / 3 * 100, "66.66666667"),
        (1e20, "1e+20"),
        (1.5e-7, "1.5e-07"),
        (12345678901.25, "12345678901.2"),
        (123456789012345.0, "123456789012345.0"),
        (0.1 + 0.2, "0.3"),
        (1234.5678, "1234.5678"),
        (-0.0, "0.0"),
        (-2.5, "-2.5"),
        (99999.99999999, "100000.0"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
        (1 / 3 * 1e-9, "3.333333333e-10"),
    ],
)
def test_floats_are_short(value: float, text: str) -> None:
    assert format_float(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_float_reads_back_to_nine_digits_and_looks_like_one(value: float) -> None:
    text = format_float(value)
    assert math.isclose(float(text), value, rel_tol=1e-9)
    assert "." in text or "e" in text


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=120),
    st.binary(max_size=99),
)


@given(st.data())
def test_a_result_is_bounded_and_no_data_breaks_a_line(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 60))
    columns = tuple(data.draw(st.lists(st.text(max_size=100), min_size=width, max_size=width)))
    cells = st.lists(VALUES, min_size=width, max_size=width).map(tuple)
    rows = tuple(data.draw(st.lists(cells, max_size=4)))
    count = data.draw(st.one_of(st.none(), st.integers(len(rows), 10**9)))
    settings = DisplaySettings(
        max_rows=data.draw(st.integers(1, 5)),
        max_chars=data.draw(st.integers(30, 3_000)),
        max_cell_chars=data.draw(st.integers(1, 90)),
    )
    shown = format_result(result(columns, rows, count), settings)
    assert len(shown) <= settings.max_chars
    assert len(shown.splitlines()) <= 1 + min(len(rows), settings.max_rows) + 1
    if not rows and count == 0:
        assert shown.endswith("no rows")
    if count is None:
        assert shown.endswith("(more rows)")
    shown.encode()


@given(VALUES, st.integers(1, 90))
def test_a_cell_is_bounded(value: SQLValue, max_chars: int) -> None:
    if isinstance(value, str | bytes):
        assert len(format_cell(value, max_chars)) <= max_chars
