"""Names, types and keys of imported tables."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.data.source_table import (
    MAX_COLUMNS,
    ColumnType,
    SourceColumn,
    SourceTable,
    column_names,
    create_statement,
    insert_statement,
    key_column,
    table_names,
)
from env_server.errors import DataError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def table(*columns: SourceColumn, name: str = "orders") -> SourceTable:
    return SourceTable(name, Path(f"{name}.csv"), columns, lambda: iter(()))


def column(name: str, kind: ColumnType = ColumnType.INTEGER, complete: bool = True) -> SourceColumn:
    return SourceColumn(name, kind, complete)


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        (["a", "b"], ["a", "b"]),
        ([" a ", "b\n c"], ["a", "b c"]),
        (["", "a", " "], ["column_1", "a", "column_3"]),
        (["price", "Price", "price"], ["price", "Price_2", "price_3"]),
        (["a", "a", "a_2"], ["a", "a_3", "a_2"]),
        (["", "column_1"], ["column_1", "column_1_2"]),
        (['a "b"', "x.y", "😀", "select"], ['a "b"', "x.y", "😀", "select"]),
    ],
)
def test_columns_are_called_like_their_headers(headers: list[str], names: list[str]) -> None:
    assert column_names(headers) == names


@settings(max_examples=60, deadline=None)
@given(st.lists(NAMES | st.sampled_from(["a", "A", "a_2", "", "column_2"]), min_size=1, max_size=12), NAMES)
def test_sqlite_takes_whatever_names_there_are(headers: list[str], name: str) -> None:
    columns = [column(each, ColumnType.TEXT) for each in column_names(headers)]
    made = table(*columns, name=name or "t")
    if made.name.casefold().startswith("sqlite_"):
        return
    connection = apsw.Connection(":memory:")
    connection.execute(create_statement(made, None))
    connection.execute(insert_statement(made), [str(place) for place in range(len(headers))])
    cursor = connection.execute(f'SELECT * FROM "{made.name.replace(chr(34), chr(34) * 2)}"')
    assert [described[0] for described in cursor.get_description()] == [each.name for each in columns]
    assert cursor.fetchall() == [tuple(str(place) for place in range(len(headers)))]


@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ([column("ID"), column("order_id")], "ID"),
        ([column("name"), column("Order_Id")], "Order_Id"),
        ([column("orders_id"), column("order_id")], "orders_id"),
        ([column("id", ColumnType.TEXT)], "id"),
        ([column("id", ColumnType.REAL)], None),
        ([column("id", complete=False)], None),
        ([column("id", complete=False), column("order_id")], "order_id"),
        ([column("customer_id"), column("idx")], None),
    ],
)
def test_the_key_is_the_column_that_is_called_like_one(columns: list[SourceColumn], key: str | None) -> None:
    assert key_column(table(*columns)) == key


def test_tables_are_called_like_their_files() -> None:
    files = [Path("x/my orders.v2.csv"), Path("x/😀.parquet")]
    assert table_names(files) == {"my orders.v2": files[0], "😀": files[1]}


def test_two_files_cannot_be_one_table() -> None:
    with pytest.raises(DataError, match=r"x/Orders\.csv and orders\.parquet would be the same table\. Rename"):
        table_names([Path("x/Orders.csv"), Path("x/orders.parquet")])


@pytest.mark.parametrize("name", ["sqlite_x.csv", "SQLite_sequence.csv", os.fsdecode(b"caf\xe9.csv")])
def test_names_that_no_table_can_have(name: str) -> None:
    with pytest.raises(DataError, match="Rename the file"):
        table_names([Path(name)])


def test_more_columns_than_sqlite_has() -> None:
    with pytest.raises(DataError, match=r"orders\.csv has 2001 columns; a table can have 2000"):
        create_statement(table(*(column(f"c{i}") for i in range(MAX_COLUMNS + 1))), None)
