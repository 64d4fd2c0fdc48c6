"""Values near to others, values for keys, and pools."""

from __future__ import annotations

import random
import sqlite3

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from env_server.dataset import SQLValue
from env_server.test_suites.database_profile import ColumnPlan, Kind
from env_server.test_suites.values import fit, fresh, make_pool, matching, neighbours, rounded, unused

values = st.one_of(st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), st.text(max_size=12), st.none(), st.binary())
kinds = st.sampled_from(list(Kind))


def column(kind: Kind, *held: SQLValue) -> ColumnPlan:
    return ColumnPlan("c", kind, required=False, values=held, has_null=False)


@given(value=values, seed=st.integers(0, 1000))
@example(value="0c", seed=66)
def test_a_neighbour_is_another_value_of_the_same_type(value: SQLValue, seed: int) -> None:
    for neighbour in neighbours(random.Random(seed), value):
        assert neighbour != value or isinstance(value, float)
        assert type(neighbour) is type(value)


def test_the_nearest_numbers_come_first() -> None:
    assert neighbours(random.Random(0), 7)[:2] == [8, 6]
    assert neighbours(random.Random(0), 1.5)[:2] == [1.75, 1.25]


def test_neighbours_of_a_date_are_dates() -> None:
    assert neighbours(random.Random(1), "2020-02-28 10:00")[1] == "2020-02-01 10:00"
    assert {str(each)[4:] for each in neighbours(random.Random(1), "2020-05-06")} == {"-05-06", "-05-07"}


def test_neighbours_of_a_numeral_are_numerals() -> None:
    assert neighbours(random.Random(1), "41")[:2] == ["42", "40"]


@given(pattern=st.text(alphabet="ab%_ ", max_size=8), seed=st.integers(0, 1000))
def test_matching_texts_match_the_pattern(pattern: str, seed: int) -> None:
    connection = sqlite3.connect(":memory:")
    for text in matching(random.Random(seed), pattern):
        assert connection.execute("SELECT ? LIKE ?", (text, pattern)).fetchone() == (1,)
    connection.close()


@given(value=values)
def test_rounded_reals_add_up_exactly_in_any_order(value: SQLValue) -> None:
    again = rounded(value)
    if isinstance(value, float):
        assert isinstance(again, float)
        assert (again * 4).is_integer()
        assert abs(again - value) <= 0.125
    else:
        assert again is value


@given(kind=kinds, seed=st.integers(0, 1000), count=st.integers(1, 60))
def test_keys_are_distinct(kind: Kind, seed: int, count: int) -> None:
    rng = random.Random(seed)
    made = [unused(rng, column(kind, "a", "b", "b1"), number) for number in range(count)]
    if kind in (Kind.INTEGER, Kind.REAL, Kind.DATE):
        assert len(set(made)) == count
    assert len({str(unused(random.Random(seed), column(kind, "7", "12"), number)) for number in range(count)}) == count


@pytest.mark.parametrize(
    ("value", "kind", "fitted"),
    [
        (2010, Kind.DATE, "2010-06-15"),
        ("2010", Kind.DATE, "2010-06-15"),
        ("2010-01-02", Kind.DATE, "2010-01-02"),
        (5, Kind.TEXT, "5"),
        ("5", Kind.INTEGER, 5),
        ("five", Kind.INTEGER, "five"),
        (b"x", Kind.TEXT, b"x"),
        (None, Kind.TEXT, None),
    ],
)
def test_a_constant_is_stored_as_its_column_would(value: SQLValue, kind: Kind, fitted: SQLValue) -> None:
    assert fit(value, kind) == fitted


@given(kind=kinds, held=st.lists(values, max_size=5), size=st.integers(1, 20), seed=st.integers(0, 1000))
def test_a_pool_holds_the_constants_and_more(kind: Kind, held: list[SQLValue], size: int, seed: int) -> None:
    rng = random.Random(seed)
    plan = column(kind, *(value for value in held if value is not None))
    pool = make_pool(rng, plan, [3, "Rex", "%e_"], ["%e_"], size)
    assert set(pool.exact) >= {fit(3, kind), fit("Rex", kind)}
    assert "%e_" not in pool.exact
    assert pool.draw(rng, 1.0) in pool.exact
    assert pool.others
    assert {pool.draw(rng, 0.0) for _ in range(50)} <= set(pool.others)


@given(kind=kinds, seed=st.integers(0, 1000))
def test_a_column_without_values_gets_values_of_its_kind(kind: Kind, seed: int) -> None:
    types = {Kind.INTEGER: int, Kind.REAL: float}
    assert isinstance(fresh(random.Random(seed), column(kind), 1)[0], types.get(kind, str))
