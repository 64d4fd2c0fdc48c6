"""Queries near a gold query: steps on the way to it, and ways to miss it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.sql.parsing import parse_query
from trainer.demos.noisy_expert import damage, lookups, misnamed, misplaced, misquoted, parts

QUERIES = [
    "SELECT COUNT(*) FROM pets",
    "SELECT name FROM pets WHERE age > 3",
    "SELECT species, COUNT(*) FROM pets GROUP BY species HAVING COUNT(*) > 1",
    "SELECT name FROM pets ORDER BY age DESC LIMIT 1",
    "SELECT MAX(age) FROM pets WHERE species = 'cat' AND weight < 4",
    'select T1.name from pets as T1 join owners as T2 on T1.owner_id = T2.owner_id where T2.city = "Oslo"',
    "SELECT name FROM pets WHERE owner_id IN (SELECT owner_id FROM owners WHERE city LIKE 'Os%')",
    "SELECT name FROM owners EXCEPT SELECT name FROM pets",
]
SEEDS = st.integers()


@given(st.sampled_from(QUERIES), SEEDS)
def test_damage_changes_the_query(sql: str, seed: int) -> None:
    assert damage(sql, random.Random(seed)) != sql


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT name FROM pets WHERE species = 'cat'", ["SELECT DISTINCT species FROM pets"]),
        ('SELECT name FROM pets WHERE species != "cat"', ["SELECT DISTINCT species FROM pets"]),
        ("SELECT name FROM pets WHERE species IN ('cat', 'dog')", ["SELECT DISTINCT species FROM pets"]),
        ("SELECT name FROM pets WHERE name LIKE '%a%'", ["SELECT DISTINCT name FROM pets"]),
        (QUERIES[5], ["SELECT DISTINCT city FROM owners"]),
        (QUERIES[6], ["SELECT DISTINCT city FROM owners"]),
        ("SELECT name FROM pets WHERE age = 3", []),
        ("SELECT p.name FROM pets p JOIN owners o ON p.owner_id = o.owner_id WHERE city = 'Oslo'", []),
        ('SELECT 1 FROM "pet list" WHERE "full name" = \'Bo\'', ['SELECT DISTINCT "full name" FROM "pet list"']),
        ("not a query", []),
    ],
)
def test_values_are_looked_up_where_a_text_is_compared_with(sql: str, expected: list[str]) -> None:
    assert lookups(sql) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (QUERIES[1], []),
        (QUERIES[6], ["SELECT owner_id FROM owners WHERE city LIKE 'Os%'"]),
        (QUERIES[7], ["SELECT name FROM owners", "SELECT name FROM pets"]),
        ("SELECT o.name FROM owners o WHERE EXISTS (SELECT 1 FROM pets p WHERE p.owner_id = o.owner_id)", []),
    ],
)
def test_a_part_stands_for_itself(sql: str, expected: list[str]) -> None:
    assert parts(sql) == expected


@given(st.sampled_from(QUERIES), SEEDS)
def test_a_misnamed_query_differs_in_names_alone(sql: str, seed: int) -> None:
    wrong = misnamed(sql, ["owners"], random.Random(seed))
    if wrong is None:
        assert sql == QUERIES[0]
        return
    assert wrong != sql
    tree = parse_query(wrong)
    assert tree is not None
    assert [type(node) for node in tree.walk()] == [type(node) for node in (parse_query(sql) or tree).walk()]


def test_a_column_of_a_table_that_was_not_seen_is_misnamed_first() -> None:
    wrong = {misnamed(QUERIES[5], ["owners"], random.Random(seed)) for seed in range(40)}
    assert wrong
    assert all(text is not None and "T1.name" in text for text in wrong), "T1 is pets"
    assert any(text is not None and "T2.owner_city" in text for text in wrong)


def test_another_table_is_asked() -> None:
    assert misplaced(QUERIES[1], ["owners"], random.Random(0)) == ("SELECT name FROM owners WHERE age > 3", "owners")
    assert misplaced(QUERIES[1], [], random.Random(0)) is None
    assert misplaced(QUERIES[5], ["cities"], random.Random(0)) is None


@given(st.sampled_from(QUERIES), SEEDS)
def test_a_value_is_written_otherwise(sql: str, seed: int) -> None:
    wrong = misquoted(sql, random.Random(seed))
    if wrong is None:
        assert "'" not in sql
        assert '"' not in sql
    else:
        assert wrong != sql
        assert [len(kind) for kind in wrong.split(" ")[:3]] == [len(kind) for kind in sql.split(" ")[:3]]
        assert wrong.split("=")[0] == sql.split("=")[0] or "LIKE" in sql


@given(st.text(), SEEDS)
def test_any_text_is_taken(sql: str, seed: int) -> None:
    rng = random.Random(seed)
    lookups(sql), parts(sql), misnamed(sql, [], rng), misplaced(sql, ["a"], rng), misquoted(sql, rng)
