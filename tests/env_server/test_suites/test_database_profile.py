"""The profile: what it reads of a database, and which databases have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from env_server.dataset import SQLValue
from env_server.errors import NoVariantsError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.database_profile import DatabaseProfile, Kind, Reference, kind_of
from env_server.test_suites.images import ImageBuilder
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
    assert not pets.checked
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
    sandbox = Sandbox(ImageBuilder(profile).empty, SandboxSettings())
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
