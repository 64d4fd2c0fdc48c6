"""Images: what a table takes, and how queries run on them."""

from __future__ import annotations

import pytest

from env_server.errors import DataError
from env_server.sql.schema import Schema
from env_server.test_suites.database_profile import ColumnPlan, DatabaseProfile, Kind, TablePlan
from env_server.test_suites.images import MAX_RESULT_ROWS, ImageBuilder, opened, run

COLUMNS = tuple(ColumnPlan(name, Kind.INTEGER, required=False, values=(), has_null=False) for name in ("a", "b"))
TABLE = TablePlan("t", COLUMNS, (), (), (), checked=True)


def builder(*statements: str) -> ImageBuilder:
    return ImageBuilder(DatabaseProfile(Schema(()), (TABLE,), statements))


def image(rows: list[tuple[int, int]]) -> bytes:
    with builder("CREATE TABLE t (a INTEGER, b INTEGER)").building() as building:
        building.insert(TABLE, rows)
        return building.image()


def test_rows_that_a_constraint_refuses_are_not_returned() -> None:
    with builder("CREATE TABLE t (a INTEGER PRIMARY KEY, b INTEGER CHECK (b > 0))").building() as building:
        assert building.insert(TABLE, [(1, 1), (2, 0), (1, 3), (4, 4)]) == [(1, 1), (4, 4)]


def test_images_are_apart_from_each_other() -> None:
    both = builder("CREATE TABLE t (a INTEGER, b INTEGER)")
    with both.building() as first, both.building() as second:
        first.insert(TABLE, [(1, 1)])
        images = first.image(), second.image()
    counts = []
    for each in images:
        with opened(each) as connection:
            counts.append(run(connection, "SELECT COUNT(*) FROM t"))
    assert counts == [((1,),), ((0,),)]


def test_reverse_turns_what_no_order_by_fixes() -> None:
    with opened(image([(1, 1), (2, 2)]), reverse=True) as connection:
        assert run(connection, "SELECT a FROM t") == ((2,), (1,))
        assert run(connection, "SELECT a FROM t ORDER BY a") == ((1,), (2,))


def test_a_query_that_fails_or_never_ends_has_no_result() -> None:
    with opened(image([(1, 1)])) as connection:
        assert run(connection, "SELECT nothing FROM t") is None
        assert (
            run(connection, "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT MAX(x) FROM r") is None
        )
        assert run(connection, "SELECT 1") == ((1,),)


def test_one_row_too_many_is_enough() -> None:
    with opened(image([(n, n) for n in range(2 * MAX_RESULT_ROWS)])) as connection:
        rows = run(connection, "SELECT a FROM t")
    assert rows is not None
    assert len(rows) == MAX_RESULT_ROWS + 1


def test_a_schema_that_cannot_be_rebuilt_says_which_statement() -> None:
    with pytest.raises(DataError, match="CREATE TABLE broken"):
        builder("CREATE TABLE broken (")
