"""The profile: what it reads of a database, and which have none; a sample reaches every part and costs little."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Row, SQLValue
from env_server.errors import NoVariantsError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.test_suites import profile as profiles
from env_server.test_suites.profile import (
    FEW_ROWS,
    SAMPLED_ROWS,
    DatabaseProfile,
    Kind,
    Reference,
    kind_of,
    read_sample,
    spaced,
)
from env_server.test_suites.suite import SuiteMaker
from tests.env_server.test_suites import databases

SCHEMA = """
CREATE TABLE visits (
    visit_id INTEGER PRIMARY KEY, pet INTEGER NOT NULL REFERENCES pets(pet_id), day TEXT, cost REAL, note TEXT);
CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, tag TEXT UNIQUE, name TEXT, mother INTEGER REFERENCES pets, kg REAL,
    doubled REAL GENERATED ALWAYS AS (kg * 2), born DATE);
CREATE TABLE "odd 'one'" (a INTEGER CHECK (a > 0), b TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID;
CREATE VIEW heavy AS SELECT * FROM pets WHERE kg > 10;
CREATE UNIQUE INDEX by_day ON visits(pet, day);
CREATE TRIGGER watch AFTER INSERT ON pets BEGIN DELETE FROM visits; END;
INSERT INTO pets(pet_id, tag, name, mother, kg, born) VALUES (1, 'a1', 'Rex', NULL, 3.5, '2019-02-03'),
    (2, 'a2', 'Tom', 1, 4, '2020-12-31');
INSERT INTO visits VALUES (1, 1, '2021-01-01', 10, NULL), (2, 2, '2021-01-02', 12.5, 'ok');
INSERT INTO "odd 'one'" VALUES (1, 'x');
"""
NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {count})"
LATE = "iif(i > {count} - 100, NULL, i)"


def profile_of(tmp_path: Path, script: str) -> DatabaseProfile:
    return databases.profile_of(databases.database(tmp_path, script))


def test_tables_come_parents_first_and_views_are_no_tables(tmp_path: Path) -> None:
    assert [table.name for table in profile_of(tmp_path, SCHEMA).tables] == ["pets", "odd 'one'", "visits"]


def test_keys_and_references(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, SCHEMA)
    pets, odd, visits = profile.tables
    assert [column.name for column in pets.columns] == ["pet_id", "tag", "name", "mother", "kg", "born"]
    assert set(pets.unique) == {frozenset({0}), frozenset({1})}
    assert set(visits.unique) == {frozenset({0}), frozenset({1, 2})}
    assert set(odd.unique) == {frozenset({0, 1})}
    assert odd.checked
    assert pets.checked, "it has a generated column"
    assert not visits.checked
    assert visits.references == (Reference((1,), "pets", ("pet_id",)),)
    assert pets.references == (Reference((3,), "pets", ("pet_id",)),)
    assert visits.columns[1].required
    assert not visits.columns[2].required


def test_what_a_column_holds(tmp_path: Path) -> None:
    pets, _, visits = profile_of(tmp_path, SCHEMA).tables
    kinds = {column.name: column.kind for column in pets.columns}
    assert kinds == {
        "pet_id": Kind.INTEGER,
        "tag": Kind.TEXT,
        "name": Kind.TEXT,
        "mother": Kind.INTEGER,
        "kg": Kind.REAL,
        "born": Kind.DATE,
    }
    assert {column.name for column in (*pets.columns, *visits.columns) if column.has_null} == {"mother", "note"}
    assert pets.columns[2].values == ("Rex", "Tom")


@pytest.mark.parametrize(
    ("values", "declared", "kind"),
    [
        ([1, 2, "x"], "TEXT", Kind.INTEGER),
        ([], "varchar(20)", Kind.TEXT),
        ([], "DATETIME", Kind.DATE),
        ([], "bigint", Kind.INTEGER),
        ([], "decimal(4,2)", Kind.REAL),
        ([], "", Kind.TEXT),
        ([], "BLOB", Kind.OTHER),
        ([b"x"], "TEXT", Kind.OTHER),
        (["2020-01-02 10:11:12"], "TEXT", Kind.DATE),
        (["2020"], "TEXT", Kind.TEXT),
    ],
)
def test_the_values_decide_what_a_column_is(values: list[SQLValue], declared: str, kind: Kind) -> None:
    assert kind_of(values, declared) is kind


def test_a_cycle_of_references_is_cut(tmp_path: Path) -> None:
    cycle = """CREATE TABLE a (id INTEGER PRIMARY KEY, b INTEGER REFERENCES b(id));
    CREATE TABLE b (id INTEGER PRIMARY KEY, a INTEGER REFERENCES a(id));"""
    first, second = profile_of(tmp_path, cycle).tables
    assert first.references == ()
    assert [reference.parent for reference in second.references] == [first.name]


def test_a_reference_to_what_is_not_there_is_none(tmp_path: Path) -> None:
    script = "CREATE TABLE a (x INTEGER REFERENCES gone(id), y INTEGER REFERENCES a(no_such_column))"
    (table,) = profile_of(tmp_path, script).tables
    assert table.references == ()


def test_the_schema_can_be_rebuilt_with_views_and_without_triggers(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, SCHEMA)
    sandbox = Sandbox(SuiteMaker(profile, SandboxSettings()).empty, SandboxSettings())
    rows = sandbox.query("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY 1, 2", 20).rows
    sandbox.close()
    assert rows == (
        ("index", "by_day"),
        ("table", "odd 'one'"),
        ("table", "pets"),
        ("table", "visits"),
        ("view", "heavy"),
    )


def test_a_virtual_table_means_no_profile(tmp_path: Path) -> None:
    with pytest.raises(NoVariantsError, match="virtual tables: notes"):
        profile_of(tmp_path, "CREATE VIRTUAL TABLE notes USING fts5(body)")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[Sandbox]]:
    sandboxes: list[Sandbox] = []
    yield sandboxes
    for sandbox in sandboxes:
        sandbox.close()


def table(opened: list[Sandbox], path: Path, definition: str, count: int, values: str) -> Sandbox:
    """A sandbox on a table `t` whose rows are `values` of the numbers from 1 to `count`."""
    connection = sqlite3.connect(path / "db.sqlite")
    connection.execute(f"CREATE TABLE t {definition}")
    connection.execute(f"INSERT INTO t {NUMBERS} SELECT {values} FROM n".format(count=count))
    connection.commit()
    connection.close()
    sandbox = Sandbox(path / "db.sqlite", SandboxSettings())
    opened.append(sandbox)
    return sandbox


def reaches_every_part(sample: Sequence[Row], count: int) -> bool:
    """Whether each tenth of the numbers from 1 to `count` is sampled, and no number twice."""
    numbers = [int(str(row[0])) for row in sample]
    return len(set(numbers)) == len(numbers) and {10 * (n - 1) // count for n in numbers} == set(range(10))


@pytest.mark.parametrize("count", [1_999, 2_001, 3_999, 10_000])
@pytest.mark.parametrize(
    "definition", ["(id INTEGER PRIMARY KEY, ended TEXT)", "(id INTEGER PRIMARY KEY, ended TEXT) WITHOUT ROWID"]
)
def test_every_part_of_a_table_is_sampled(opened: list[Sandbox], tmp_path: Path, definition: str, count: int) -> None:
    sandbox = table(opened, tmp_path, definition, count, f"i, {LATE}")
    sample = read_sample(sandbox, "t", ["id", "ended"], count)
    assert len(sample) <= SAMPLED_ROWS
    assert reaches_every_part(sample, count)
    assert any(row[1] is None for row in sample)
    assert read_sample(sandbox, "t", ["id", "ended"], count) == sample


@pytest.mark.parametrize("key", ["a, b", "b"])
def test_a_composite_key_and_names_that_hide_the_rowid(opened: list[Sandbox], tmp_path: Path, key: str) -> None:
    definition = f"(rowid INTEGER, a TEXT, b INTEGER, _rowid_, oid, PRIMARY KEY ({key})) WITHOUT ROWID"
    sandbox = table(opened, tmp_path, definition, 5_000, f"i, i % 7, i, 0, {LATE}")
    sample = read_sample(sandbox, "t", ["rowid", "a", "b", "_rowid_", "oid"], 5_000)
    assert {row[1] for row in sample} == set("0123456")
    assert {10 * (int(str(row[2])) - 1) // 5_000 for row in sample} == set(range(10))
    assert {bool(row[4]) for row in sample} == {True, False}


def test_no_more_of_a_large_table_is_read_than_is_allowed(
    opened: list[Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, ended TEXT)", 10_000, f"i, {LATE}")
    monkeypatch.setattr(profiles, "SCANNED_ROWS", 4_000)
    for count in (10_000, None):
        assert reaches_every_part(read_sample(sandbox, "t", ["id", "ended"], count), 4_000)


def test_of_rows_too_large_to_read_at_once_the_first_are_read(opened: list[Sandbox], tmp_path: Path) -> None:
    sandbox = table(opened, tmp_path, "(id INTEGER PRIMARY KEY, a)", 100, "i, zeroblob(900000)")
    assert [row[0] for row in read_sample(sandbox, "t", ["id", "a"], 100)] == list(range(1, FEW_ROWS + 1))


@given(count=st.integers(0, 500), most=st.integers(2, 100))
def test_spaced_items_begin_with_the_first_and_end_with_the_last(count: int, most: int) -> None:
    items = list(range(count))
    chosen = spaced(items, most)
    assert len(chosen) == min(count, most)
    assert chosen[:1] + chosen[-1:] == tuple(items[:1] + items[-1:])
    gaps = {after - before for before, after in pairwise(chosen)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
