"""Candidates keep the schema's promises, whatever the seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.dataset import Row
from env_server.test_suites.constants import Hints, parse, read_hints
from env_server.test_suites.database_profile import DatabaseProfile, TablePlan
from env_server.test_suites.generation import STYLES, generate
from env_server.test_suites.images import ImageBuilder, opened
from tests.env_server.test_suites.databases import database, profile_of

SQL = (
    "SELECT T2.city, COUNT(*) FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id "
    "WHERE T1.species = 'cat' AND T1.age > 3 GROUP BY T2.city HAVING COUNT(*) > 2"
)


def plan(path: Path) -> tuple[DatabaseProfile, Hints]:
    profile = profile_of(path)
    tree = parse(SQL, profile.schema)
    assert tree is not None
    return profile, read_hints(tree, profile.schema)


def rows_of(profile: DatabaseProfile, hints: Hints, seed: str, style: int) -> dict[str, Sequence[Row]]:
    tables: dict[str, Sequence[Row]] = {}

    def insert(table: TablePlan, rows: Sequence[Row]) -> Sequence[Row]:
        tables[table.name] = rows
        return rows

    generate(profile, hints, seed, STYLES[style], insert)
    return tables


@pytest.fixture(scope="module")
def planned(pets_file: Path) -> tuple[DatabaseProfile, Hints]:
    return plan(pets_file)


@settings(max_examples=60, deadline=None)
@given(seed=st.text(max_size=5), style=st.integers(0, len(STYLES) - 1))
def test_keys_hold_and_null_stands_only_where_the_original_has_it(
    planned: tuple[DatabaseProfile, Hints], seed: str, style: int
) -> None:
    profile, hints = planned
    tables = rows_of(profile, hints, seed, style)
    builder = ImageBuilder(profile)
    with builder.building() as building:
        for name in ("owners", "pets"):
            table = profile.table(name)
            assert table is not None
            assert building.insert(table, tables[name]) is tables[name], "every row is taken"
            for i, column in enumerate(table.columns):
                assert column.has_null or all(row[i] is not None for row in tables[name])
        image = building.image()
    with opened(image) as connection:
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_the_constants_of_the_query_are_met_and_missed(planned: tuple[DatabaseProfile, Hints]) -> None:
    profile, hints = planned
    seen = {name: set[object]() for name in ("species", "age")}
    for number in range(len(STYLES)):
        for row in rows_of(profile, hints, str(number), number)["pets"]:
            seen["species"].add(row[2])
            seen["age"].add(row[3])
    assert {"cat", "cats"} & seen["species"] >= {"cat"}
    assert len(seen["species"]) > 2
    assert {2, 3, 4} <= seen["age"]


def test_another_seed_gives_other_rows(planned: tuple[DatabaseProfile, Hints]) -> None:
    assert rows_of(*planned, "a", 0) != rows_of(*planned, "b", 0)


def test_a_table_whose_key_refers_to_another_table_grows_with_it(tmp_path: Path) -> None:
    script = """CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT);
        CREATE TABLE students (person INTEGER PRIMARY KEY REFERENCES people, year INTEGER);
        CREATE TABLE tutors (student INTEGER NOT NULL UNIQUE REFERENCES students, name TEXT);"""
    profile = profile_of(database(tmp_path, script))
    hints = Hints(tables={"people", "students", "tutors"})
    sizes: dict[str, list[int]] = {name: [] for name in ("people", "students", "tutors")}
    for number in range(8 * len(STYLES)):
        tables = rows_of(profile, hints, str(number), number % len(STYLES))
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
