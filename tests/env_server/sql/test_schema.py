"""Reading a schema, and finding a table by what an agent writes."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.errors import UnknownTableError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import (
    Column,
    ForeignKey,
    Schema,
    Table,
    quote_identifier,
    read_schema,
    schema_codec,
    unquoted,
)

NAMES = st.text(max_size=5)
COLUMNS = st.builds(Column, NAMES, NAMES, st.booleans(), st.booleans())
NAME_LISTS = st.lists(NAMES, max_size=2).map(tuple)
KEYS = st.builds(ForeignKey, NAME_LISTS, NAMES, NAME_LISTS)
TABLES = st.builds(
    Table,
    NAMES,
    st.lists(COLUMNS, max_size=3).map(tuple),
    st.lists(KEYS, max_size=2).map(tuple),
    st.none() | st.integers(0, 2**60),
    st.booleans(),
    st.booleans(),
)


def schema_of(path: Path, script: str, settings: SandboxSettings | None = None) -> Schema:
    connection = apsw.Connection(str(path))
    connection.execute(script).fetchall()
    connection.close()
    sandbox = Sandbox(path, settings or SandboxSettings())
    try:
        return read_schema(sandbox)
    finally:
        sandbox.close()


def table(name: str) -> Table:
    return Table(name, (), (), 0)


def test_columns_keys_and_counts(tmp_path: Path) -> None:
    schema = schema_of(
        tmp_path / "a.db",
        """
        CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT NOT NULL);
        CREATE TABLE pets (
            pet_id INTEGER PRIMARY KEY, owner_id INTEGER REFERENCES owners, vet INTEGER REFERENCES vets (code), kind
        );
        CREATE TABLE pairs (a INT, b INT, c INT, PRIMARY KEY (b, a)) WITHOUT ROWID;
        CREATE TABLE links (x INT, y INT, FOREIGN KEY (x, y) REFERENCES pairs);
        INSERT INTO owners VALUES (1, 'Ann'), (2, 'Bob');
        """,
    )
    assert schema.table_names == ("owners", "pets", "pairs", "links")
    owners, pets, pairs, links = schema.tables
    assert owners.columns == (
        Column("owner_id", "INTEGER", nullable=True, primary_key=True),
        Column("name", "TEXT", nullable=False, primary_key=False),
    )
    assert owners.row_count == 2
    assert pets.row_count == 0
    assert pets.columns[3].type == ""
    assert pets.foreign_keys == (
        ForeignKey(("owner_id",), "owners", ("owner_id",)),
        ForeignKey(("vet",), "vets", ("code",)),
    )
    assert [column.primary_key for column in pairs.columns] == [True, True, False]
    assert links.foreign_keys == (ForeignKey(("x", "y"), "pairs", ("b", "a")),)


def test_views_virtual_tables_generated_columns_and_internals(tmp_path: Path) -> None:
    schema = schema_of(
        tmp_path / "a.db",
        """
        CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT, a INT, b INT AS (a * 2), c INT AS (a + 1) STORED);
        INSERT INTO t (a) VALUES (1), (2);
        ANALYZE;
        CREATE VIEW v AS SELECT a, b FROM t WHERE a > 1;
        CREATE TABLE gone (x);
        CREATE VIEW broken AS SELECT x FROM gone;
        DROP TABLE gone;
        CREATE VIRTUAL TABLE f USING fts5(body);
        INSERT INTO f VALUES ('words');
        CREATE TRIGGER tr AFTER INSERT ON t BEGIN SELECT 1; END;
        """,
    )
    assert schema.table_names == ("t", "v", "broken", "f")
    t, v, broken, f = schema.tables
    assert [column.name for column in t.columns] == ["id", "a", "b", "c"]
    assert (v.is_view, v.row_count, [column.name for column in v.columns]) == (True, 1, ["a", "b"])
    assert (broken.is_view, broken.row_count, broken.columns) == (True, None, ())
    assert (f.is_virtual, f.row_count, [column.name for column in f.columns]) == (True, 1, ["body"])


@pytest.mark.parametrize("name", ["two words", 'quo"te', "it's", "dot.ted", "größe 😀", "select", "a]b", "`tick`", "%"])
def test_odd_names_are_read_and_found(tmp_path: Path, name: str) -> None:
    quoted = quote_identifier(name)
    schema = schema_of(
        tmp_path / "a.db", f"CREATE TABLE {quoted} ({quoted} INTEGER PRIMARY KEY); INSERT INTO {quoted} VALUES (1)"
    )
    found = schema.find(name)
    assert (found.name, found.columns[0].name, found.row_count) == (name, name, 1)
    assert schema.find(quoted) is found


def test_an_empty_database_has_no_tables(tmp_path: Path) -> None:
    schema = schema_of(tmp_path / "a.db", "")
    assert schema.tables == ()
    with pytest.raises(UnknownTableError):
        schema.find("t")


def test_a_view_that_costs_too_much_is_not_counted(tmp_path: Path) -> None:
    schema = schema_of(
        tmp_path / "a.db",
        "CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n;"
        "CREATE TABLE t (a)",
        SandboxSettings(vm_steps=10_000),
    )
    assert [item.row_count for item in schema.tables] == [None, 0]


@pytest.mark.parametrize(
    "argument",
    [
        "Pets",
        "pets",
        " PETS ",
        '"pets"',
        "`pets`",
        "[pets]",
        "'pets'",
        "pets;",
        "main.pets",
        '"main"."pets" ;',
        "pets\n",
    ],
)
def test_a_table_is_found_in_any_case_and_quoting(argument: str) -> None:
    assert Schema((table("owners"), table("Pets"))).find(argument).name == "Pets"


def test_a_literal_name_wins_over_an_unquoted_one() -> None:
    schema = Schema((table("t"), table('"t"'), table("main.t")))
    assert schema.find('"t"').name == '"t"'
    assert schema.find("main.t").name == "main.t"
    assert schema.find("[t]").name == "t"


@pytest.mark.parametrize("argument", ["cats", "pets, owners", "temp.pets", "pets WHERE 1", "", "'", '"', "main."])
def test_an_unknown_name_lists_the_tables(argument: str) -> None:
    with pytest.raises(UnknownTableError) as caught:
        Schema((table("pets"), table("owners"))).find(argument)
    assert caught.value.tables == ("pets", "owners")
    assert "pets, owners" in str(caught.value)


@given(st.text(min_size=1))
def test_quoting_is_undone_by_unquoting(name: str) -> None:
    assert unquoted(quote_identifier(name)) == name


@given(st.text(max_size=40))
def test_any_argument_finds_a_table_or_says_that_there_is_none(argument: str) -> None:
    schema = Schema((table("pets"),))
    try:
        name = schema.find(argument).name
    except UnknownTableError as error:
        name = error.name
    assert len(name) <= 80


@given(st.lists(TABLES, max_size=3).map(tuple).map(Schema))
def test_a_schema_is_the_same_when_it_was_written_and_read(schema: Schema) -> None:
    assert schema_codec().validate_json(schema_codec().dump_json(schema)) == schema
