"""Test databases keep the schema's keys, whatever the seed; values near to others, values for keys, and pools."""

from __future__ import annotations

import random
import sqlite3
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from env_server.dataset import Row, SQLValue
from env_server.settings import SandboxSettings
from env_server.test_suites.generation import (
    CONFIGS,
    fit,
    generate,
    make_pool,
    neighbours,
    rounded,
    unused,
    usual_value,
)
from env_server.test_suites.profile import ColumnProfile, DatabaseProfile, Kind, TableProfile
from env_server.test_suites.queries import QueryConstants, parse, read_constants
from env_server.test_suites.suite import SuiteMaker, insert, opened
from tests.env_server.test_suites.databases import database, profile_of

SQL = (
    "SELECT T2.city, COUNT(*) FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id "
    "WHERE T1.species = 'cat' AND T1.age > 3 GROUP BY T2.city HAVING COUNT(*) > 2"
)
values = st.one_of(st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), st.text(max_size=12), st.none(), st.binary())
kinds = st.sampled_from([kind for kind in Kind if kind is not Kind.JSON])


def plan(path: Path) -> tuple[DatabaseProfile, QueryConstants]:
    profile = profile_of(path)
    tree = parse(SQL, profile.schema)
    assert tree is not None
    return profile, read_constants(tree, profile.schema)


def rows_of(profile: DatabaseProfile, constants: QueryConstants, seed: str, config: int) -> dict[str, Sequence[Row]]:
    tables: dict[str, Sequence[Row]] = {}

    def insert(table: TableProfile, rows: Sequence[Row]) -> Sequence[Row]:
        tables[table.name] = rows
        return rows

    generate(profile, constants, random.Random(seed), CONFIGS[config], insert)
    return tables


@pytest.fixture(scope="module")
def planned(pets_file: Path) -> tuple[DatabaseProfile, QueryConstants]:
    return plan(pets_file)


@settings(max_examples=60, deadline=None)
@given(seed=st.text(max_size=5), config=st.integers(0, len(CONFIGS) - 1))
def test_keys_hold_and_null_stands_only_where_the_original_has_it(
    planned: tuple[DatabaseProfile, QueryConstants], seed: str, config: int
) -> None:
    profile, constants = planned
    tables = rows_of(profile, constants, seed, config)
    with opened(SuiteMaker(profile, SandboxSettings()).empty) as connection:
        for name in ("owners", "pets"):
            table = profile.table(name)
            assert table is not None
            assert len(insert(connection, table, tables[name])) == len(tables[name]), "every row is taken"
            for i, column in enumerate(table.columns):
                assert column.has_null or all(row[i] is not None for row in tables[name])
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_the_constants_of_the_query_are_met_and_missed(planned: tuple[DatabaseProfile, QueryConstants]) -> None:
    profile, constants = planned
    seen = {name: set[object]() for name in ("species", "age")}
    for number in range(len(CONFIGS)):
        for row in rows_of(profile, constants, str(number), number)["pets"]:
            seen["species"].add(row[2])
            seen["age"].add(row[3])
    assert {"cat", "cats"} & seen["species"] >= {"cat"}
    assert len(seen["species"]) > 2
    assert {2, 3, 4} <= seen["age"]


def test_another_seed_gives_other_rows(planned: tuple[DatabaseProfile, QueryConstants]) -> None:
    assert rows_of(*planned, "a", 0) != rows_of(*planned, "b", 0)


def test_a_table_whose_key_refers_to_another_table_grows_with_it(tmp_path: Path) -> None:
    script = """CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT);
        CREATE TABLE students (person INTEGER PRIMARY KEY REFERENCES people, year INTEGER);
        CREATE TABLE tutors (student INTEGER NOT NULL UNIQUE REFERENCES students, name TEXT);"""
    profile = profile_of(database(tmp_path, script))
    constants = QueryConstants(tables={"people", "students", "tutors"})
    sizes: dict[str, list[int]] = {name: [] for name in ("people", "students", "tutors")}
    for number in range(8 * len(CONFIGS)):
        tables = rows_of(profile, constants, str(number), number % len(CONFIGS))
        people, students, tutors = ([row[0] for row in tables[name]] for name in sizes)
        assert len(set(students)) == len(students)
        assert set(students) <= set(people)
        assert set(tutors) <= set(students)
        for name, rows in tables.items():
            sizes[name].append(len(rows))
    assert statistics.median(sizes["students"]) > 6
    assert statistics.median(sizes["tutors"]) > 4
    assert max(sizes["tutors"]) > 15
    assert any(few < many for few, many in zip(sizes["students"], sizes["people"], strict=True))


def column(kind: Kind, *held: SQLValue) -> ColumnProfile:
    return ColumnProfile("c", kind, required=False, values=held, has_null=False)


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
def test_a_pool_has_texts_that_match_the_pattern(pattern: str, seed: int) -> None:
    connection = sqlite3.connect(":memory:")
    for text in make_pool(random.Random(seed), column(Kind.TEXT), [pattern], [pattern], 3).exact:
        assert connection.execute("SELECT ? LIKE ?", (text, pattern)).fetchone() == (1,)
    connection.close()


@given(text=st.text(alphabet="aBc zZ", min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_no_neighbour_differs_in_case_alone(text: str, seed: int) -> None:
    assert text.casefold() not in {str(each).casefold() for each in neighbours(random.Random(seed), text)}


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
    if kind in (Kind.INTEGER, Kind.REAL):
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
    assert isinstance(usual_value(random.Random(seed), column(kind)), types.get(kind, str))
