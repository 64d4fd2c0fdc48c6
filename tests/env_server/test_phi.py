"""Tests of phi."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Gold, Row, SQLValue
from env_server.reward import ROW_LIMIT, Target


def gold(*rows: Row) -> Gold:
    return Gold(rows=rows, ordered=False)


def phi(rows: list[Row], row_count: int | None, wanted: Gold, row_limit: int = ROW_LIMIT) -> float:
    return Target(wanted, row_limit).phi(rows, row_count)


VALUES: st.SearchStrategy[SQLValue] = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.sampled_from([1.0, 2.0, 1e308, -1e308, math.inf, "a", "b", "1"]),
    st.text(max_size=3),
    st.binary(max_size=2),
)
TABLES: st.SearchStrategy[list[Row]] = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[VALUES] * width), max_size=6)
)


@pytest.mark.parametrize(
    ("rows", "row_count", "wanted", "expected"),
    [
        ([(5,)], 1, [(5,)], 1.0),
        ([(5.0,)], 1, [(5,)], 1.0),
        ([(" Paris ",)], 1, [("paris",)], 1.0),
        ([(0.1 + 0.2,)], 1, [(0.3,)], 1.0),
        # cardinality only: 0.25
        ([("x",)], 1, [("a",)], 0.25),
        ([("5",)], 1, [(5,)], 0.25),
        # cardinality and proximity: 0.25 + 0.25 (1 - 1/100) is below 0.5
        ([(99,)], 1, [(100,)], 0.25),
        ([], 0, [("a",)], 0.0),
        # unknown count: 0 + 0.5 + 0.25
        ([(5,)], None, [(5,)], 0.75),
        # cardinality 1/2, overlap 1/2: 0.125 + 0.375
        ([("a",), ("b",)], 2, [("a",)], 0.5),
        # a superfluous column: 0.25 + 0.75 / 2
        ([("a", "x")], 1, [("a",)], 0.5),
        # two numbers of three: 0.25 * 2/3 + 0.5 * 2/3 + 0.25 * 2/3
        ([(1,), (2,)], 2, [(1,), (2,), (3,)], 0.5),
        # every row of a table where one was asked for
        ([(i,) for i in range(20)], 1000, [(5,)], 0.25),
    ],
)
def test_examples(rows: list[Row], row_count: int | None, wanted: list[Row], expected: float) -> None:
    assert phi(rows, row_count, gold(*wanted)) == expected


def test_exact_numbers_are_paired_before_near_ones() -> None:
    # 2 belongs to 2; the gold's 1 must not take it. 0.25 * 0.5 + 0.5 * 0.5 + 0.25 * 0.5
    assert phi([(2,)], 1, gold((1,), (2,))) == 0.5


def test_only_the_first_rows_are_compared() -> None:
    wanted = gold(*[(f"name {i}",) for i in range(50)])
    seen = list(wanted.rows[:21])
    assert phi(seen, 50, wanted) == 1.0
    assert phi(seen[:5], 50, wanted, row_limit=5) == 1.0
    assert phi(seen[:5], 50, wanted) == 0.25
    assert phi(seen, None, wanted) == 0.75


@given(TABLES, st.one_of(st.none(), st.integers(0, 10**9)), TABLES)
def test_is_always_a_bin(rows: list[Row], row_count: int | None, wanted: list[Row]) -> None:
    assert phi(rows, row_count, gold(*wanted)) in {0.0, 0.25, 0.5, 0.75, 1.0}


@given(TABLES)
def test_the_gold_rows_in_any_order_score_one(rows: list[Row]) -> None:
    assert phi(list(reversed(rows)), len(rows), gold(*rows)) == 1.0


SMALL: st.SearchStrategy[SQLValue] = st.sampled_from([None, 0, 1, 2, 1000, "a", "b", "1"])
SMALL_TABLES: st.SearchStrategy[list[Row]] = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.tuples(*[SMALL] * width), min_size=1, max_size=5)
)


@given(SMALL_TABLES, SMALL_TABLES)
def test_one_needs_the_same_number_of_rows_and_the_same_cells(rows: list[Row], wanted: list[Row]) -> None:
    same = len(rows) == len(wanted) and Counter(c for r in rows for c in r) == Counter(c for r in wanted for c in r)
    assert (phi(rows, len(rows), gold(*wanted)) == 1.0) == same


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_extreme_numbers(predicted: float, wanted: float) -> None:
    assert phi([(predicted,)], 1, gold((wanted,))) in {0.25, 0.5, 1.0}
