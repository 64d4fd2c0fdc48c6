"""Queries in the spelling of their schema: what changes, what does not, and that the rows are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.environment import EnvironmentFactory
from env_server.errors import SQLError
from env_server.sql.schema import Column, Schema, Table
from env_server.sql.spelling import canonicalize

SPIDER = os.environ.get("SQLENV_SPIDER_DIR")
ROWS = 1_000


def table(name: str, *columns: str) -> Table:
    return Table(name, tuple(Column(column, "TEXT", True, False) for column in columns), (), 1)


SCHEMA = Schema(
    (
        table("Pets", "Pet_ID", "Name", "range"),
        table("owner", "owner_id", "name", "pet_id", "Type"),
        table("Type", "type_id"),
    )
)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("select count ( * )  from  PETS ;", "SELECT COUNT(*) FROM Pets"),
        ("SELECT NAME ,  PET_ID FROM pets", "SELECT Name, Pet_ID FROM Pets"),
        ('SELECT name FROM OWNER WHERE name  =  "O\'Hara"', "SELECT name FROM owner WHERE name = 'O''Hara'"),
        ('SELECT "name" FROM pets', 'SELECT "name" FROM Pets'),
        ('SELECT name FROM pets WHERE name LIKE "%a b%"', "SELECT Name FROM Pets WHERE Name LIKE '%a b%'"),
        (
            "SELECT t1.NAME, T2.NAME FROM pets AS t1 JOIN owner T2 ON T1.pet_id=T2.PET_ID",
            "SELECT t1.Name, T2.name FROM Pets AS t1 JOIN owner T2 ON T1.Pet_ID = T2.pet_id",
        ),
        # Two spellings, and nothing says which one is meant.
        ("SELECT NAME FROM pets, owner", "SELECT NAME FROM Pets, owner"),
        ("SELECT Range FROM pets ORDER BY RANGE DESC", "SELECT range FROM Pets ORDER BY range DESC"),
        ("SELECT TYPE FROM owner", "SELECT Type FROM owner"),
        ("SELECT type.TYPE_ID FROM type", "SELECT Type.type_id FROM Type"),
        ("SELECT a FROM pets WHERE a IN(1,-2) AND a>- 1 AND a-1=3", None),
        ("SELECT cast(name AS INT)  FROM pets -- all of them", "SELECT CAST(Name AS INT) FROM Pets"),
        ("SELECT * FROM nowhere WHERE x = 'A  b'", "SELECT * FROM nowhere WHERE x = 'A  b'"),
        ("", ""),
    ],
)
def test_a_query_is_written_as_the_schema_is(written: str, shown: str | None) -> None:
    if shown is None:
        shown = "SELECT a FROM Pets WHERE a IN (1, -2) AND a > - 1 AND a - 1 = 3"
    assert canonicalize(written, SCHEMA) == shown
    assert canonicalize(shown, SCHEMA) == shown, "again, it stays"


@given(st.text(alphabet="aA1 .,;()'\"`[]-+*=<>\n", max_size=40) | st.text())
def test_any_text_is_taken(sql: str) -> None:
    canonicalize(sql, SCHEMA)


@pytest.fixture
def cache(generated_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(generated_cache))


def test_generated_queries_are_written_so_already(cache: None) -> None:
    dataset = load_dataset("synthetic")
    with EnvironmentFactory(dataset) as factory:
        for question in dataset.questions:
            assert canonicalize(question.gold_sql, factory.pool.schema(question.db_id)) == question.gold_sql


@pytest.mark.skipif(not SPIDER, reason="SQLENV_SPIDER_DIR names no Spider folder")
def test_real_queries_give_the_same_rows() -> None:
    dataset = load_dataset(f"spider:{SPIDER}")
    changed = 0
    with EnvironmentFactory(dataset) as factory:
        for question in dataset.questions:
            shown = canonicalize(question.gold_sql, factory.pool.schema(question.db_id))
            assert canonicalize(shown, factory.pool.schema(question.db_id)) == shown
            changed += shown != question.gold_sql
            try:
                before = factory.pool.query(question.db_id, question.gold_sql, ROWS)
            except SQLError:
                continue
            assert factory.pool.query(question.db_id, shown, ROWS).rows == before.rows, shown
    assert changed > len(dataset.questions) / 2
