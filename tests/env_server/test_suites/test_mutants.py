"""Neighbour queries of a gold query: which there are of each kind, and what holds for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
import sqlglot
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import Column, ForeignKey, Schema, Table
from env_server.test_suites.mutants import MAX_MUTANTS, MutantKind, mutants
from env_server.test_suites.mutants_clauses import extremes
from env_server.test_suites.mutants_joins import joins
from env_server.test_suites.mutants_tree import QueryTree
from env_server.test_suites.mutants_values import operators

PETS_SQL = """
CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE pets (pet_id INTEGER PRIMARY KEY, name TEXT, species TEXT, age INTEGER, weight REAL, owner_id INTEGER,
    FOREIGN KEY (owner_id) REFERENCES owners (owner_id));
CREATE TABLE visits (visit_id INTEGER PRIMARY KEY, pet_id INTEGER, "visit date" DATE, cost REAL,
    FOREIGN KEY (pet_id) REFERENCES pets (pet_id));
"""


def _table(name: str, columns: dict[str, str], *keys: ForeignKey) -> Table:
    made = (Column(each, kind, nullable=True, primary_key=i == 0) for i, (each, kind) in enumerate(columns.items()))
    return Table(name, tuple(made), keys, row_count=0)


PETS = Schema(
    (
        _table("owners", {"owner_id": "INTEGER", "name": "TEXT", "city": "TEXT"}),
        _table(
            "pets",
            {
                "pet_id": "INTEGER",
                "name": "TEXT",
                "species": "TEXT",
                "age": "INTEGER",
                "weight": "REAL",
                "owner_id": "INTEGER",
            },
            ForeignKey(("owner_id",), "owners", ("owner_id",)),
        ),
        _table(
            "visits",
            {"visit_id": "INTEGER", "pet_id": "INTEGER", "visit date": "DATE", "cost": "REAL"},
            ForeignKey(("pet_id",), "pets", ()),
        ),
    )
)

JOINED = "FROM owners AS T1 JOIN pets AS T2 ON T1.owner_id = T2.owner_id"
CATS = f"SELECT T1.city {JOINED} WHERE T2.species = 'cat'"

# (kind, gold, what is put in the place of `old`): the mutants are the gold with that piece exchanged.
EXCHANGED: list[tuple[MutantKind, str, str, list[str]]] = [
    (MutantKind.CONSTANT, "SELECT name FROM pets WHERE age = 3", "3", ["4", "2", "0", "-3", "30"]),
    (MutantKind.CONSTANT, "SELECT name FROM pets WHERE age = -3", "-3", ["-2", "-4", "0", "3"]),
    (MutantKind.CONSTANT, "SELECT name FROM pets WHERE weight > 2.5", "2.5", ["2.6", "2.4", "3.0", "2.0", "0", "-2.5"]),
    (
        MutantKind.CONSTANT,
        "SELECT name FROM owners WHERE city = 'New York'",
        "New York",
        ["new york", "New Yorl", "New Yor", "ew York", "New", "NEW YORK"],
    ),
    (MutantKind.CONSTANT, "SELECT name FROM owners WHERE city LIKE '%os%'", "%os%", ["os%", "%os", "os", "%ot%"]),
    (
        MutantKind.CONSTANT,
        "SELECT name FROM pets WHERE age BETWEEN 2 AND 5",
        "2 AND 5",
        ["5 AND 2", "3 AND 5", "2 AND 6"],
    ),
    (MutantKind.OPERATOR, "SELECT name FROM pets WHERE age > 3", ">", [">=", "<", "<=", "=", "<>"]),
    (
        MutantKind.OPERATOR,
        "SELECT name FROM pets WHERE species = 'cat'",
        "= 'cat'",
        ["LIKE '%cat%'", "LIKE 'cat%'", "<> 'cat'", ">= 'cat'"],
    ),
    (
        MutantKind.OPERATOR,
        "SELECT name FROM pets WHERE species LIKE '%cat%'",
        "species LIKE '%cat%'",
        ["NOT species LIKE '%cat%'", "species = '%cat%'", "species = 'cat'"],
    ),
    (
        MutantKind.OPERATOR,
        "SELECT name FROM pets WHERE age IN (1, 2)",
        "age IN (1, 2)",
        ["NOT age IN (1, 2)", "age IN (1)", "age IN (2)", "age = 1", "age = 2"],
    ),
    (
        MutantKind.OPERATOR,
        "SELECT name FROM pets WHERE age BETWEEN 2 AND 5",
        "age BETWEEN 2 AND 5",
        ["NOT age BETWEEN 2 AND 5", "(age > 2 AND age < 5)", "(age > 2 AND age <= 5)", "age >= 2", "age <= 5"],
    ),
    (
        MutantKind.OPERATOR,
        "SELECT name FROM pets WHERE NOT weight IS NULL",
        "NOT weight IS NULL",
        ["weight IS NULL", "NOT weight = ''"],
    ),
    (
        MutantKind.CONDITION,
        "SELECT name FROM pets WHERE age > 3 AND species = 'cat' AND weight <> 2",
        "age > 3 AND species = 'cat' AND weight <> 2",
        [
            *("species = 'cat' AND weight <> 2", "age > 3 AND weight <> 2", "age > 3 AND species = 'cat'"),
            "age > 3 AND species = 'cat' AND (weight <> 2 OR weight IS NULL)",
        ],
    ),
    (MutantKind.CONDITION, "SELECT name FROM pets WHERE age > 3", " WHERE age > 3", [""]),
    (
        MutantKind.CONDITION,
        "SELECT species FROM pets GROUP BY species HAVING COUNT(*) > 1",
        " HAVING COUNT(*) > 1",
        [""],
    ),
    (
        MutantKind.CONDITION,
        "SELECT name FROM pets WHERE owner_id IN (SELECT owner_id FROM owners WHERE city = 'Oslo')",
        " WHERE city = 'Oslo'",
        [""],
    ),
    (MutantKind.CONDITION, "SELECT name FROM pets ORDER BY age LIMIT 1", "pets", ["pets WHERE NOT age IS NULL"]),
    (
        MutantKind.LOGIC,
        "SELECT name FROM pets WHERE age = 1 AND weight = 2 OR owner_id = 3",
        "age = 1 AND weight = 2 OR owner_id = 3",
        [
            "age = 1 AND weight = 2 AND owner_id = 3",
            "age = 1 AND (weight = 2 OR owner_id = 3)",
            "age = 1 OR weight = 2 OR owner_id = 3",
        ],
    ),
    (
        MutantKind.LOGIC,
        "SELECT name FROM pets WHERE age = 1 AND (weight = 2 OR owner_id = 3)",
        "(weight = 2 OR owner_id = 3)",
        ["weight = 2 OR owner_id = 3", "(weight = 2 AND owner_id = 3)"],
    ),
    (
        MutantKind.ARITHMETIC,
        "SELECT age / weight FROM pets",
        "age / weight",
        ["CAST(age AS REAL) / weight", "age * weight", "weight / age", "age", "weight"],
    ),
    (
        MutantKind.ARITHMETIC,
        "SELECT CAST(age AS REAL) / weight FROM pets",
        "CAST(age AS REAL)",
        ["age"],
    ),
    (MutantKind.DISTINCT, "SELECT city FROM owners", "SELECT", ["SELECT DISTINCT"]),
    (MutantKind.DISTINCT, "SELECT DISTINCT city FROM owners", " DISTINCT", [""]),
    (MutantKind.DISTINCT, "SELECT COUNT(city) FROM owners", "city", ["DISTINCT city"]),
    (MutantKind.DISTINCT, "SELECT COUNT(DISTINCT city) FROM owners", "DISTINCT ", [""]),
    (
        MutantKind.AGGREGATE,
        "SELECT MAX(age) FROM pets",
        "MAX(age)",
        ["MIN(age)", "AVG(age)", "SUM(age)", "COUNT(age)", "age"],
    ),
    (
        MutantKind.AGGREGATE,
        "SELECT AVG(age) FROM pets",
        "AVG(age)",
        ["SUM(age)", "SUM(age) / COUNT(*)", "AVG(COALESCE(age, 0))", "age"],
    ),
    (
        MutantKind.AGGREGATE,
        f"SELECT T1.city, COUNT(*) {JOINED} GROUP BY T1.city",
        "COUNT(*)",
        ["COUNT(DISTINCT T1.city)", "COUNT(T1.city)", "SUM(T2.age)", "COUNT(DISTINCT T1.owner_id)"],
    ),
    (MutantKind.AGGREGATE, "SELECT COUNT(DISTINCT city) FROM owners", "COUNT(DISTINCT city)", ["COUNT(*)", "city"]),
    (
        MutantKind.COLUMN,
        f"SELECT T1.name {JOINED} WHERE T2.age > 3",
        "SELECT T1.name",
        ["SELECT T2.name", "SELECT T1.city"],
    ),
    (MutantKind.COLUMN, f"SELECT T1.name {JOINED} WHERE T2.age > 3", "T2.age >", ["T2.weight >"]),
    (MutantKind.COLUMN, "SELECT name FROM pets ORDER BY age", "BY age", ["BY weight"]),
    (
        MutantKind.GROUP,
        f"SELECT T1.name, COUNT(*) {JOINED} GROUP BY T1.owner_id",
        " GROUP BY T1.owner_id",
        [" GROUP BY T1.name", " GROUP BY T2.pet_id", " GROUP BY T1.owner_id, T2.pet_id", ""],
    ),
    (
        MutantKind.GROUP,
        "SELECT species, age FROM pets GROUP BY species, age",
        "GROUP BY species, age",
        ["GROUP BY age", "GROUP BY species", "GROUP BY species, age, pet_id"],
    ),
    (MutantKind.GROUP, "SELECT species, MAX(age) FROM pets", "pets", ["pets GROUP BY species"]),
    (
        MutantKind.ORDER,
        "SELECT name FROM pets ORDER BY age DESC, weight",
        " ORDER BY age DESC, weight",
        [
            *(" ORDER BY age ASC, weight", " ORDER BY age DESC, weight DESC", " ORDER BY age ASC, weight DESC"),
            *(" ORDER BY weight, age DESC", " ORDER BY weight", " ORDER BY age DESC", ""),
            " ORDER BY age DESC, weight, name",
        ],
    ),
    (
        MutantKind.LIMIT,
        "SELECT name FROM pets ORDER BY age LIMIT 2",
        " LIMIT 2",
        [" LIMIT 3", " LIMIT 1", "", " LIMIT 2 OFFSET 1"],
    ),
    (
        MutantKind.EXTREME,
        "SELECT name FROM pets WHERE species = 'cat' ORDER BY age DESC LIMIT 1",
        "species = 'cat' ORDER BY age DESC LIMIT 1",
        [
            "species = 'cat' AND age = (SELECT MAX(age) FROM pets WHERE species = 'cat')",
            "species = 'cat' AND age = (SELECT MAX(age) FROM pets)",
        ],
    ),
    (
        MutantKind.EXTREME,
        "SELECT species FROM pets GROUP BY species ORDER BY COUNT(*) LIMIT 1",
        "ORDER BY COUNT(*) LIMIT 1",
        ["HAVING COUNT(*) = (SELECT MIN(value) FROM (SELECT COUNT(*) AS value FROM pets GROUP BY species))"],
    ),
    (
        MutantKind.EXTREME,
        "SELECT name FROM pets WHERE age = (SELECT MAX(age) FROM pets)",
        "WHERE age = (SELECT MAX(age) FROM pets)",
        ["ORDER BY age DESC LIMIT 1"],
    ),
    (MutantKind.EXTREME, "SELECT MIN(age) FROM pets", "MIN(age) FROM pets", ["age FROM pets ORDER BY age ASC LIMIT 1"]),
    (
        MutantKind.JOIN,
        f"SELECT T1.name {JOINED}",
        JOINED,
        [
            "FROM owners AS T1",
            "FROM owners AS T1 LEFT JOIN pets AS T2 ON T1.owner_id = T2.owner_id",
            "FROM owners AS T1 RIGHT JOIN pets AS T2 ON T1.owner_id = T2.owner_id",
            "FROM owners AS T1, pets AS T2",
            "FROM owners AS T1 JOIN pets AS T2 ON T1.owner_id = T2.pet_id",
            f"{JOINED} JOIN visits ON T2.pet_id = visits.pet_id",
        ],
    ),
    (MutantKind.JOIN, CATS, " JOIN pets AS T2 ON T1.owner_id = T2.owner_id WHERE T2.species = 'cat'", [""]),
    (
        MutantKind.JOIN,
        "SELECT name FROM pets WHERE pet_id = 3",
        "SELECT name FROM pets WHERE pet_id",
        [
            "SELECT name FROM pets JOIN visits ON pets.pet_id = visits.pet_id WHERE pets.pet_id",
            "SELECT pets.name FROM pets JOIN owners ON pets.owner_id = owners.owner_id WHERE pet_id",
        ],
    ),
    (
        MutantKind.JOIN,
        f"SELECT T3.cost {JOINED} JOIN visits AS T3 ON T2.pet_id = T3.pet_id WHERE T1.city = 'Oslo'",
        f"{JOINED} JOIN visits AS T3 ON T2.pet_id = T3.pet_id WHERE T1.city = 'Oslo'",
        ["FROM pets AS T2 JOIN visits AS T3 ON T2.pet_id = T3.pet_id"],
    ),
    (MutantKind.TABLE, "SELECT name FROM owners", "owners", ["pets AS owners"]),
    (
        MutantKind.SUBQUERY,
        CATS,
        "JOIN pets AS T2 ON T1.owner_id = T2.owner_id WHERE T2.species = 'cat'",
        ["WHERE T1.owner_id IN (SELECT T2.owner_id FROM pets AS T2 WHERE T2.species = 'cat')"],
    ),
    (
        MutantKind.SUBQUERY,
        "SELECT city FROM owners WHERE owner_id IN (SELECT owner_id FROM pets WHERE age > 3)",
        "FROM owners WHERE owner_id IN (SELECT owner_id FROM pets WHERE age > 3)",
        ["FROM owners, pets WHERE (owners.owner_id = pets.owner_id AND pets.age > 3)"],
    ),
    (
        MutantKind.SUBQUERY,
        "SELECT name FROM pets WHERE species = 'cat' AND age = (SELECT MAX(age) FROM pets)",
        "MAX(age) FROM pets",
        ["MAX(age) FROM pets WHERE species = 'cat'"],
    ),
]

LEFT, RIGHT = "SELECT name FROM owners WHERE city = 'Oslo'", "SELECT name FROM owners WHERE city = 'Lima'"
NO_CATS = f"SELECT name FROM owners EXCEPT SELECT T1.name {JOINED} WHERE T2.species = 'cat'"

# (kind, gold, mutants): neighbour queries that are more than one piece away from the gold.
REBUILT: list[tuple[MutantKind, str, list[str]]] = [
    (
        MutantKind.SET_OPERATION,
        f"{LEFT} INTERSECT {RIGHT}",
        [
            "SELECT name FROM owners WHERE city = 'Oslo' AND city = 'Lima'",
            "SELECT name FROM owners WHERE city = 'Oslo' OR city = 'Lima'",
            "SELECT name FROM owners WHERE city = 'Oslo' OR city = 'Lima' GROUP BY name HAVING COUNT(*) >= 2",
            f"SELECT name FROM owners WHERE city = 'Oslo' AND owner_id IN ({RIGHT.replace('name', 'owner_id')})",
            f"SELECT name FROM owners WHERE city = 'Oslo' AND name IN ({RIGHT})",
            *(f"{LEFT} UNION {RIGHT}", f"{LEFT} UNION ALL {RIGHT}", f"{LEFT} EXCEPT {RIGHT}", LEFT, RIGHT),
        ],
    ),
    (
        MutantKind.SET_OPERATION,
        f"{LEFT} UNION {RIGHT} ORDER BY name",
        [
            "SELECT name FROM owners WHERE city = 'Oslo' OR city = 'Lima' ORDER BY name",
            f"{LEFT} UNION ALL {RIGHT} ORDER BY name",
            f"{LEFT} ORDER BY name",
        ],
    ),
    (
        MutantKind.SET_OPERATION,
        f"SELECT name FROM owners EXCEPT {RIGHT}",
        [
            "SELECT name FROM owners WHERE city <> 'Lima'",
            "SELECT DISTINCT name FROM owners WHERE city <> 'Lima'",
            f"{RIGHT} EXCEPT SELECT name FROM owners",
        ],
    ),
    (
        MutantKind.SET_OPERATION,
        NO_CATS,
        [
            f"SELECT DISTINCT T1.name {JOINED} WHERE T2.species <> 'cat'",
            f"SELECT name FROM owners WHERE NOT owner_id IN (SELECT T1.owner_id {JOINED} WHERE T2.species = 'cat')",
        ],
    ),
    (
        MutantKind.SET_OPERATION,
        "SELECT name FROM pets WHERE species = 'cat' AND age <> 3",
        ["SELECT name FROM pets WHERE species = 'cat' EXCEPT SELECT name FROM pets WHERE age = 3"],
    ),
    (
        MutantKind.SUBQUERY,
        "SELECT city FROM owners WHERE owner_id NOT IN (SELECT owner_id FROM pets WHERE age > 3)",
        [
            "SELECT city FROM owners, pets WHERE (owners.owner_id <> pets.owner_id AND pets.age > 3)",
            "SELECT DISTINCT city FROM owners, pets WHERE (owners.owner_id = pets.owner_id AND NOT pets.age > 3)",
        ],
    ),
    (
        MutantKind.SUBQUERY,
        "SELECT name FROM pets AS T1 WHERE age IN (SELECT T1.age FROM pets AS T1 JOIN visits AS T2 ON T1.pet_id = "
        "T2.pet_id)",
        ["SELECT T1.name FROM pets AS T1, pets AS U1 JOIN visits AS T2 ON U1.pet_id = T2.pet_id WHERE T1.age = U1.age"],
    ),
]

# Constructs beyond Spider's: the mutants need not be listed, but each must be valid.
UNUSUAL = [
    "WITH t AS (SELECT owner_id, COUNT(*) AS n FROM pets GROUP BY owner_id) "
    "SELECT o.name, t.n FROM owners AS o JOIN t ON t.owner_id = o.owner_id WHERE t.n > 1 ORDER BY t.n DESC LIMIT 2",
    "WITH a(x, y) AS (SELECT pet_id, age FROM pets), b AS (SELECT x FROM a WHERE y > 2) SELECT COUNT(*) FROM b",
    "SELECT CAST(SUM(CASE WHEN species = 'cat' THEN 1 ELSE 0 END) AS REAL) * 100 / COUNT(*) FROM pets",
    "SELECT SUM(IIF(p.species = 'dog', 1, 0)) - 1.5 FROM owners AS o INNER JOIN pets AS p ON o.owner_id = p.owner_id",
    "SELECT name, RANK() OVER (PARTITION BY species ORDER BY age DESC) AS r FROM pets WHERE name IS NOT NULL",
    "SELECT name FROM (SELECT name, ROW_NUMBER() OVER (ORDER BY age) AS n FROM pets) WHERE n = 1",
    "SELECT name FROM owners AS o WHERE EXISTS (SELECT 1 FROM pets AS p WHERE p.owner_id = o.owner_id AND p.age > 3)",
    "SELECT `visit date`, [cost] FROM visits WHERE `visit date` >= '2012-01-01' AND cost <> -1.5",
    "SELECT GROUP_CONCAT(name, ', ') FROM pets GROUP BY species HAVING COUNT(DISTINCT owner_id) > 1 OR MAX(age) > 3",
    "SELECT * FROM pets NATURAL JOIN owners CROSS JOIN visits",
    "SELECT COUNT(*), species FROM pets GROUP BY 2 ORDER BY COUNT(*) DESC, 2",
    "SELECT MAX(age, 2), AVG(age) FILTER (WHERE age > 2) FROM pets WHERE (name, age) IN (SELECT name, 3 FROM owners)",
    "SELECT species, COUNT(*) AS n FROM pets GROUP BY species ORDER BY n DESC LIMIT 1",
    "SELECT name FROM pets WHERE age = 3 UNION SELECT name FROM pets WHERE age = 5 EXCEPT SELECT name FROM owners",
    "SELECT name FROM pets WHERE name GLOB 'R*' AND NOT name LIKE '%x_%' ESCAPE '#' AND age % 2 = -age AND age IS 3",
    "SELECT p.name FROM (pets AS p JOIN owners AS o ON p.owner_id = o.owner_id) WHERE o.city = 'Oslo'",
    'SELECT "name" FROM pets WHERE "species" = "cat" -- the second is text',
]

GOLDS = sorted({gold for _, gold, *_ in EXCHANGED} | {gold for _, gold, _ in REBUILT} | set(UNUSUAL))
NOT_QUERIES = [
    "",
    ";",
    "SELECT FROM WHERE",
    "DROP TABLE pets",
    "SELECT 1; SELECT 2",
    "VALUES (1)",
    "(" * 9999,
]


@pytest.fixture(scope="module")
def database() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    connection.execute(PETS_SQL)
    yield connection
    connection.close()


def _of_kind(kind: MutantKind, sql: str) -> list[str]:
    return [mutant.sql for mutant in mutants(sql, PETS) if mutant.kind is kind]


def _canonical(sql: str) -> str:
    return str(sqlglot.parse_one(sql, read="sqlite").sql("sqlite"))


@pytest.mark.parametrize(("kind", "gold", "old", "new"), EXCHANGED)
def test_a_piece_is_exchanged(kind: MutantKind, gold: str, old: str, new: list[str]) -> None:
    assert gold.count(old) == 1
    found = _of_kind(kind, gold)
    missing = [each for each in new if gold.replace(old, each) not in found]
    assert not missing, found


@pytest.mark.parametrize(("kind", "gold", "expected"), REBUILT)
def test_a_query_is_rebuilt(kind: MutantKind, gold: str, expected: list[str]) -> None:
    found = _of_kind(kind, gold)
    missing = [each for each in expected if each not in found]
    assert not missing, found


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        (MutantKind.DISTINCT, "SELECT pet_id, name FROM pets"),  # the key is shown
        (MutantKind.DISTINCT, "SELECT species FROM pets GROUP BY species"),
        (MutantKind.DISTINCT, "SELECT COUNT(pet_id) FROM pets"),
        (MutantKind.DISTINCT, "SELECT name FROM pets ORDER BY age LIMIT 1"),
        (MutantKind.SUBQUERY, "SELECT T2.name FROM owners AS T1 JOIN pets AS T2 ON T1.owner_id = T2.owner_id"),
        (MutantKind.CONSTANT, "SELECT name, age FROM pets ORDER BY 2"),  # a place, not a value
        (MutantKind.TABLE, "SELECT species FROM pets"),  # no other table has it
        (MutantKind.CONSTANT, "SELECT COUNT(*) FROM pets GROUP BY 1"),
        (MutantKind.EXTREME, "SELECT name FROM pets WHERE age > (SELECT MAX(age) FROM visits)"),
        (MutantKind.LIMIT, "SELECT name FROM pets"),
        (MutantKind.SET_OPERATION, "SELECT name FROM pets WHERE age > 3"),
    ],
)
def test_what_cannot_differ_or_cannot_run_is_left_out(kind: MutantKind, gold: str) -> None:
    assert _of_kind(kind, gold) == []


def test_an_outer_join_whose_extra_rows_are_refused_is_left_out() -> None:
    found = _of_kind(MutantKind.JOIN, CATS)
    assert not any("LEFT JOIN pets" in sql for sql in found)
    assert CATS.replace("JOIN", "RIGHT JOIN") in found


def test_rows_that_come_once_are_not_multiplied() -> None:
    left = "LEFT JOIN visits"
    assert any(left in sql for sql in _of_kind(MutantKind.JOIN, "SELECT species FROM pets"))
    assert not any(left in sql for sql in _of_kind(MutantKind.JOIN, "SELECT DISTINCT species FROM pets"))
    assert not any(
        "LEFT JOIN owners" in sql for sql in _of_kind(MutantKind.JOIN, "SELECT species FROM pets WHERE age > 3")
    )


def test_values_whose_order_says_nothing_are_not_swapped() -> None:
    gold = "SELECT name FROM pets WHERE age = 3 OR age = 5"
    assert "SELECT name FROM pets WHERE age = 5 OR age = 3" not in _of_kind(MutantKind.CONSTANT, gold)
    gold = "SELECT name FROM pets WHERE age = 3 OR weight = 5"
    assert "SELECT name FROM pets WHERE age = 5 OR weight = 3" in _of_kind(MutantKind.CONSTANT, gold)


def test_rules_reach_every_nested_query() -> None:
    gold = "SELECT name FROM owners WHERE name IN (SELECT name FROM pets WHERE age > (SELECT AVG(age) FROM pets))"
    found = [mutant.sql for mutant in mutants(gold, PETS)]
    assert gold.replace("AVG(age)", "MAX(age)") in found
    assert gold.replace("age >", "age >=") in found
    assert gold.replace("age >", "weight >") in found


def test_double_quoted_text_is_text_unless_it_names_a_column() -> None:
    found = [mutant.sql for mutant in mutants('SELECT name FROM pets WHERE "species" = "cat"', PETS)]
    assert "SELECT name FROM pets WHERE \"species\" = 'ca'" in found
    assert "SELECT name FROM pets WHERE name = 'cat'" in found


def test_columns_are_qualified_where_a_join_makes_them_ambiguous() -> None:
    gold = "SELECT name FROM pets WHERE weight > 3"
    assert gold.replace("name FROM pets", "pets.name FROM pets JOIN owners ON pets.owner_id = owners.owner_id") in (
        _of_kind(MutantKind.JOIN, gold)
    )


def test_names_are_quoted_where_they_must_be() -> None:
    assert 'SELECT "visit date" FROM visits WHERE cost > 3' in _of_kind(
        MutantKind.COLUMN, "SELECT cost FROM visits WHERE cost > 3"
    )


@pytest.mark.parametrize("gold", GOLDS)
def test_every_mutant_is_another_valid_query(database: apsw.Connection, gold: str) -> None:
    found = mutants(gold, PETS)
    texts = [mutant.sql for mutant in found]
    assert found
    assert len(set(texts)) == len(texts)
    assert _canonical(gold) not in map(_canonical, texts)
    for text in texts:
        database.execute(f"EXPLAIN {text}")


def test_changes_are_undone() -> None:
    gold = CATS + " ORDER BY T2.age LIMIT 1"
    tree = QueryTree(sqlglot.parse_one(gold, read="sqlite"), PETS)
    changes = [*operators(tree), *extremes(tree), *joins(tree)]
    assert len({tree.text(change) for change in changes} - {gold}) == len(changes)
    assert tree.text() == gold


@pytest.mark.parametrize("sql", NOT_QUERIES)
def test_what_is_not_one_query_has_no_mutants(sql: str) -> None:
    assert mutants(sql, PETS) == ()


def test_a_query_on_unknown_tables_has_mutants_that_need_no_schema() -> None:
    found = [mutant.sql for mutant in mutants("SELECT a FROM nowhere WHERE b > 3", PETS)]
    assert "SELECT a FROM nowhere WHERE b >= 3" in found
    assert mutants("SELECT a FROM nowhere WHERE b > 3", Schema(()))


def test_many_are_bounded_and_every_kind_has_its_share() -> None:
    numbers = " OR ".join(f"T2.age = {number} AND T2.name = 'n{number}'" for number in range(60))
    gold = f"SELECT DISTINCT T1.name {JOINED} WHERE {numbers} ORDER BY T1.city LIMIT 3"
    found = mutants(gold, PETS)
    assert len(found) == MAX_MUTANTS
    kinds = Counter(mutant.kind for mutant in found)
    assert kinds[MutantKind.CONSTANT] < MAX_MUTANTS / 4
    assert kinds[MutantKind.DISTINCT] == 1
    assert kinds[MutantKind.LIMIT] >= 3
    assert len({mutant.kind for mutant in found[: len(kinds)]}) == len(kinds)


def test_the_same_under_every_hash_seed() -> None:
    program = (
        "import json, sys\n"
        "from env_server.sql.schema import Column, ForeignKey, Schema, Table\n"
        "from env_server.test_suites.mutants import mutants\n"
        f"schema = {PETS!r}\n"
        "print(json.dumps([[each.sql for each in mutants(gold, schema)] for gold in json.load(sys.stdin)]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        input=json.dumps(GOLDS),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[mutant.sql for mutant in mutants(gold, PETS)] for gold in GOLDS]


_WORDS = sorted({word for gold in GOLDS for word in gold.replace("(", " ( ").replace(")", " ) ").split()})


@settings(deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(_WORDS)).map(lambda words: " ".join(["SELECT", *words]))))
def test_never_raises(sql: str) -> None:
    assert len(mutants(sql, PETS)) <= MAX_MUTANTS


@settings(deadline=None)
@given(st.sampled_from(GOLDS), st.data())
def test_never_raises_for_a_damaged_query(gold: str, data: st.DataObject) -> None:
    words = gold.replace("(", " ( ").replace(")", " ) ").split()
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(words)))
        words[place : place + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.sampled_from(_WORDS), max_size=2))
    sql = " ".join(words)
    assert sql not in [mutant.sql for mutant in mutants(sql, PETS)]


def test_on_spider_mutants_run(spider_dir: Path) -> None:
    questions = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))[::40]
    files = {each["db_id"]: spider_dir / "database" / each["db_id"] / f"{each['db_id']}.sqlite" for each in questions}
    pool = DatabasePool(files, EnvSettings().sandbox)
    failed, total = [], 0
    for each in questions:
        found = mutants(each["query"], pool.schema(each["db_id"]))
        assert len(found) > 5, each["query"]
        connection = apsw.Connection(str(files[each["db_id"]]), flags=apsw.SQLITE_OPEN_READONLY)
        for mutant in found:
            total += 1
            try:
                connection.execute(f"EXPLAIN {mutant.sql}")
            except apsw.SQLError:
                failed.append(mutant.sql)
        connection.close()
    pool.close()
    assert len(failed) <= total / 1000, failed
