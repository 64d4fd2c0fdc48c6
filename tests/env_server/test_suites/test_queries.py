"""What is read from a gold query, its mutants, and its clauses with their probes."""

from __future__ import annotations

import json
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import Column, Schema, Table
from env_server.test_suites.queries import (
    MAX_MUTANTS,
    Clause,
    QueryConstants,
    mutants,
    parse,
    read_clauses,
    read_constants,
)


def _table(name: str, *columns: str) -> Table:
    return Table(name, tuple(Column(each, "", nullable=True, primary_key=False) for each in columns), (), 0)


SCHEMA = Schema((_table("Pets", "id", "name", "age", "owner"), _table("owners", "id", "city", "name")))


def said(sql: str) -> QueryConstants:
    tree = parse(sql, SCHEMA)
    assert tree is not None
    return read_constants(tree, SCHEMA)


@pytest.mark.parametrize(
    ("where", "constants"),
    [
        ("age > 3", {("pets", "age"): [3]}),
        ("-2.5 <= age", {("pets", "age"): [-2.5]}),
        ("name = 'Rex' OR name = \"Tom\"", {("pets", "name"): ["Rex", "Tom"]}),
        ("age BETWEEN 2 AND 4", {("pets", "age"): [2, 4]}),
        ("age IN (1, 2) AND name NOT IN ('x')", {("pets", "age"): [1, 2], ("pets", "name"): ["x"]}),
        ("lower(name) = 'rex'", {("pets", "name"): ["rex"]}),
        ("age * 2 > 10", {("pets", "age"): [2, 10]}),
        ("\"name\" = 'x'", {("pets", "name"): ["x"]}),
    ],
)
def test_a_constant_belongs_to_the_column_it_is_compared_with(where: str, constants: dict[object, object]) -> None:
    found = said(f"SELECT id FROM pets WHERE {where}").values
    assert {place: sorted(values, key=str) for place, values in found.items()} == {
        place: sorted(values, key=str)  # type: ignore[call-overload]
        for place, values in constants.items()
    }


def test_aliases_are_those_of_the_nearest_select() -> None:
    found = said(
        "SELECT T1.name FROM pets AS T1 WHERE T1.age = 1 AND T1.owner IN "
        "(SELECT T1.id FROM owners AS T1 WHERE T1.city = 'Oslo')"
    )
    assert found.values == {("pets", "age"): [1], ("owners", "city"): ["Oslo"], ("pets", "owner"): []}
    assert found.links == [(("pets", "owner"), ("owners", "id"))]
    assert found.tables == {"pets", "owners"}


def test_an_equation_of_columns_links_them() -> None:
    found = said("SELECT 1 FROM pets JOIN owners ON pets.name = owners.name")
    assert found.links == [(("pets", "name"), ("owners", "name"))]


def test_patterns_are_constants_too() -> None:
    found = said("SELECT id FROM pets WHERE name LIKE '%ex%'")
    assert found.patterns == {("pets", "name"): ["%ex%"]}
    assert found.values == {("pets", "name"): ["%ex%"]}


@pytest.mark.parametrize(
    ("tail", "sizes"),
    [
        ("GROUP BY name HAVING COUNT(*) >= 3", [3]),
        ("ORDER BY age LIMIT 2", [2]),
        ("ORDER BY age LIMIT 2 OFFSET 5", [2, 5]),
        ("GROUP BY name HAVING AVG(age) > 1000", []),
        ("WHERE age = 7", []),
    ],
)
def test_numbers_that_count_rows_are_sizes(tail: str, sizes: list[int]) -> None:
    assert said(f"SELECT name FROM pets {tail}").sizes == sizes


def test_a_double_quoted_word_that_names_no_column_is_a_text() -> None:
    tree = parse('SELECT "name", "nobody" FROM pets ORDER BY "n"', SCHEMA)
    assert tree is not None
    assert tree.sql(dialect="sqlite") == "SELECT \"name\", 'nobody' FROM pets ORDER BY 'n'"


@pytest.mark.parametrize("sql", ["", "SELECT a FROM (", "SELECT 1; SELECT 2", "DROP TABLE pets", "(" * 5_000])
def test_what_is_no_query_has_no_tree(sql: str) -> None:
    assert parse(sql, SCHEMA) is None


def _typed(title: str, **columns: str) -> Table:
    return Table(title, tuple(Column(each, kind, True, False) for each, kind in columns.items()), (), row_count=0)


PETS = Schema(
    (
        _typed("owners", owner_id="INTEGER", name="TEXT", city="TEXT"),
        _typed("pets", pet_id="INTEGER", name="TEXT", species="TEXT", age="INTEGER", owner_id="INTEGER"),
    )
)
JOINED = "FROM owners AS T1 JOIN pets AS T2 ON T1.owner_id = T2.owner_id"
GOLDS = (
    f"SELECT T1.city {JOINED} WHERE T2.species = 'cat' AND T2.age > 3 ORDER BY T2.age DESC LIMIT 3",
    f"SELECT T1.name, COUNT(*) {JOINED} GROUP BY T1.owner_id HAVING COUNT(*) > 2",
    "SELECT name FROM pets WHERE owner_id IN (SELECT owner_id FROM owners WHERE city LIKE '%os%')",
    "SELECT name FROM owners WHERE city = 'Oslo' UNION SELECT name FROM pets WHERE age BETWEEN 2 AND 5 ORDER BY 1",
    "WITH old AS (SELECT * FROM pets WHERE age > 9) SELECT AVG(age) FROM old WHERE NOT species = 'cat'",
)


def of(sql: str) -> tuple[str, ...]:
    tree = parse(sql, PETS)
    return () if tree is None else mutants(tree, PETS)


def clauses_of(sql: str) -> tuple[Clause, ...]:
    tree = parse(sql, PETS)
    return () if tree is None else read_clauses(tree)


@pytest.mark.parametrize(
    ("gold", "old", "new"),
    [
        ("SELECT name FROM pets WHERE age = 3 AND pet_id > 1", "age = 3 AND pet_id > 1", ["age = 3", "pet_id > 1"]),
        ("SELECT name FROM pets WHERE age = 3", " WHERE age = 3", [""]),
        ("SELECT species FROM pets GROUP BY 1 HAVING COUNT(*) > 1", " HAVING COUNT(*) > 1", [""]),
        ("SELECT name FROM pets WHERE age = 3", "= 3", ["= 4", "= 2", "= 0", "= 30"]),
        ("SELECT name FROM pets WHERE age > 2.5", "2.5", ["2.6", "2.4", "0", "25"]),
        ("SELECT 1 FROM owners WHERE city = 'New York'", "New York", ["nEW yORK", "New Yor", "ew York", "New"]),
        ("SELECT 1 FROM owners WHERE city LIKE '%os%'", "'%os%'", ["'os'", "'os%'", "'%os'"]),
        ("SELECT name FROM pets WHERE age > 3", "age >", ['"pet_id" >', '"owner_id" >']),
        (f"SELECT T1.name {JOINED}", "SELECT T1.name", ['SELECT T1."city"']),
        ("SELECT name FROM pets ORDER BY age", " ORDER BY age", ["", " ORDER BY age DESC"]),
        ("SELECT name FROM pets LIMIT 2", " LIMIT 2", ["", " LIMIT 3", " LIMIT 1", " LIMIT 2 OFFSET 1"]),
        ("SELECT name FROM pets", "pets", ['"owners" AS "pets"']),
    ],
)
def test_a_piece_is_changed(gold: str, old: str, new: list[str]) -> None:
    assert {gold.replace(old, each) for each in new} <= set(of(gold))


@pytest.mark.parametrize("gold", GOLDS)
def test_every_mutant_is_another_query_and_the_tree_stays_as_it_was(gold: str) -> None:
    tree = parse(gold, PETS)
    assert tree is not None
    before = tree.sql(dialect="sqlite")
    found = mutants(tree, PETS)
    read_clauses(tree)
    assert tree.sql(dialect="sqlite") == before
    assert before not in found
    assert len(found) == len(set(found)) > 5
    with apsw.Connection(":memory:") as connection:
        for table in PETS.tables:
            connection.execute(f"CREATE TABLE {table.name} ({', '.join(c.name for c in table.columns)})")
        for text in found:
            connection.execute(f"EXPLAIN {text}")


def test_many_are_bounded_and_every_kind_has_its_share() -> None:
    numbers = " OR ".join(f"T2.age = {number}" for number in range(60))
    gold = f"SELECT T1.name {JOINED} WHERE {numbers} ORDER BY T1.city LIMIT 3"
    found = of(gold)
    assert len(found) == MAX_MUTANTS
    assert any(text.endswith("LIMIT 4") for text in found)
    assert any("DESC" in text for text in found)


def test_the_clauses_of_every_query_and_their_probes() -> None:
    first, second = "age > 1", "name IN (SELECT city FROM owners WHERE name = 2 LIMIT 3)"
    sql = f"SELECT age FROM pets WHERE {first} AND {second} EXCEPT SELECT 1"
    inner = "SELECT age FROM pets WHERE age > 1 AND name IN (SELECT city FROM owners{}) EXCEPT SELECT 1"
    assert set(clauses_of(sql)) == {
        Clause("EXCEPT SELECT 1", (f"SELECT age FROM pets WHERE {first} AND {second}",)),
        Clause(f"WHERE {first} AND {second}", ("SELECT age FROM pets WHERE 0 EXCEPT SELECT 1",)),
        Clause(f"WHERE {first}", (f"SELECT age FROM pets WHERE {second} EXCEPT SELECT 1",)),
        Clause(f"WHERE {second}", (f"SELECT age FROM pets WHERE {first} EXCEPT SELECT 1",)),
        Clause("WHERE name = 2", (inner.format(" WHERE 0 LIMIT 3"), inner.format(" LIMIT 3"))),
        Clause("LIMIT 3", (inner.format(" WHERE name = 2"),)),
    }


def test_a_side_of_a_set_operation_keeps_what_stands_around_both() -> None:
    (left, right) = clauses_of("SELECT name FROM pets UNION SELECT name FROM owners ORDER BY 1 LIMIT 2")[:2]
    assert left == Clause("UNION SELECT name FROM owners", ("SELECT name FROM pets ORDER BY 1 LIMIT 2",))
    assert right == Clause("SELECT name FROM pets UNION", ("SELECT name FROM owners ORDER BY 1 LIMIT 2",))


@pytest.mark.parametrize("sql", ["SELECT name FROM pets", "SELECT age = (SELECT age FROM pets LIMIT 1) FROM pets"])
def test_what_has_no_clause_that_counts_has_none(sql: str) -> None:
    assert clauses_of(sql) == ()


_WORDS = sorted({word for gold in GOLDS for word in gold.replace("(", " ( ").replace(")", " ) ").split()})


@settings(deadline=None)
@given(st.sampled_from(GOLDS), st.data())
def test_a_damaged_query_has_mutants_or_is_no_query(gold: str, data: st.DataObject) -> None:
    words = gold.replace("(", " ( ").replace(")", " ) ").split()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(words)))
        words[place : place + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.sampled_from(_WORDS), max_size=2))
    sql = " ".join(words)
    assert sql not in of(sql)
    assert all(clause.probes for clause in clauses_of(sql))


def test_on_spider_mutants_run(spider_dir: Path) -> None:
    questions = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))[::40]
    files = {each["db_id"]: spider_dir / "database" / each["db_id"] / f"{each['db_id']}.sqlite" for each in questions}
    pool = DatabasePool(files, EnvSettings().sandbox)
    failed, total = [], 0
    for each in questions:
        schema = pool.schema(each["db_id"])
        tree = parse(each["query"], schema)
        assert tree is not None
        found = mutants(tree, schema)
        connection = apsw.Connection(str(files[each["db_id"]]), flags=apsw.SQLITE_OPEN_READONLY)
        for text in found:
            total += 1
            try:
                connection.execute(f"EXPLAIN {text}")
            except apsw.SQLError:
                failed.append(text)
        connection.close()
    pool.close()
    assert len(failed) <= total / 100, failed
