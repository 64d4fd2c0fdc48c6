"""The same SQL up to formatting: what may differ, what may not, and that equal keys mean equal rows."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.duplicates import formatting_key
from env_server.sql.lexer import folded

NAMES = {"owners", "owner_id", "name", "city", "pets", "pet_id", "species", "age", "weight", "order"}

SAME = [
    ("SELECT name FROM pets", "select  NAME\nfrom Pets ;"),
    ("SELECT name FROM pets", "SELECT name -- the name\nFROM /* all */ pets;;"),
    ("SELECT name FROM pets", 'SELECT "name" FROM [pets]'),
    ("SELECT name FROM pets", "SELECT `Name` FROM `PETS`"),
    ('SELECT "order" FROM pets', "SELECT [ORDER] FROM pets"),
    ("SELECT count(*) FROM pets", "SELECT COUNT ( * ) FROM pets"),
    ("SELECT T1.name FROM pets AS T1", "SELECT p.name FROM pets p"),
    (
        "SELECT T1.name, count(*) AS n FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id "
        "WHERE T2.city = 'Oslo' GROUP BY T1.name ORDER BY n, 1 LIMIT 3",
        'select zoo.[Name] , COUNT(*) Total from /* x */ `PETS` zoo join Owners x_1 -- y\non zoo."owner_id" = '
        "X_1.OWNER_ID where x_1.city == 'Oslo' Group By zoo.NAME order\tby TOTAL , 1 limit 3 ; ",
    ),
    ("SELECT count(*) AS n FROM pets ORDER BY n", 'SELECT count(*) "Total" FROM pets ORDER BY total'),
    ("SELECT x.name FROM (SELECT name FROM pets) AS x", "SELECT y.name FROM (SELECT name FROM pets) y"),
    ("SELECT name FROM pets WHERE age <> 3", "SELECT name FROM pets WHERE age!=3"),
    ("SELECT name FROM pets WHERE age == 3", "SELECT name FROM pets WHERE age = 3"),
    ("SELECT 1 AS a, 2 AS b", "SELECT 1 b, 2 a"),
    ("SELECT name FROM pets WHERE species = 'it''s'", "SELECT name FROM pets WHERE species='it''s'"),
    ("SELECT name FROM pets WHERE ÄGE = 1", "SELECT name FROM pets WHERE Äge = 1"),
]
DIFFERENT = [
    ("SELECT 'Oslo'", "SELECT 'oslo'"),
    ('SELECT name FROM pets WHERE species = "Cat"', 'SELECT name FROM pets WHERE species = "cat"'),
    ("SELECT 1", "SELECT 1.0"),
    ("SELECT x'41'", "SELECT '41'"),
    ("SELECT 'name' FROM pets", 'SELECT "name" FROM pets'),
    ("SELECT name FROM pets", "SELECT DISTINCT name FROM pets"),
    ("SELECT name, age FROM pets", "SELECT age, name FROM pets"),
    ("SELECT age - weight FROM pets", "SELECT weight - age FROM pets"),
    ("SELECT a.name FROM pets a, pets b", "SELECT b.name FROM pets a, pets b"),
    ("SELECT max(age) AS name, name FROM pets", "SELECT max(age) AS weight, weight FROM pets"),
    ("SELECT CAST(age AS TEXT) FROM pets", "SELECT CAST(age AS REAL) FROM pets"),
    ("SELECT name AS a FROM pets", "SELECT name FROM pets"),
    ("SELECT (age + 1) * 2 FROM pets", "SELECT age + 1 * 2 FROM pets"),
    ("SELECT count(*) FROM pets", "SELECT sum(age) FROM pets"),
    ("SELECT [a b] FROM pets", "SELECT a b FROM pets"),
    ('SELECT name ";" FROM pets', "SELECT name FROM pets"),
    ("SELECT ÄGE FROM pets", "SELECT äge FROM pets"),
    ("SELECT name FROM pets WHERE age >= 3", "SELECT name FROM pets WHERE age > 3"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_formatting_does_not_count(one: str, other: str) -> None:
    assert formatting_key(one, NAMES) == formatting_key(other, NAMES)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_everything_else_counts(one: str, other: str) -> None:
    assert formatting_key(one, NAMES) != formatting_key(other, NAMES)


@given(st.text(max_size=40) | st.text("'\"`[];()- \n/*.xX1aA,=<>", max_size=40))
def test_any_text_has_a_key_and_its_layout_does_not_change_it(text: str) -> None:
    key = formatting_key(text, NAMES)
    assert formatting_key(f"\n {text}", NAMES) == key
    assert formatting_key(key, NAMES) or not key


def test_equal_keys_mean_equal_rows_on_the_real_databases(spider_dir: Path) -> None:
    entries = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))
    by_database: dict[str, set[str]] = {}
    for entry in entries:
        by_database.setdefault(entry["db_id"], set()).add(entry["query"])
    pairs = 0
    for db_id, queries in by_database.items():
        file = spider_dir / "database" / db_id / f"{db_id}.sqlite"
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = bytes
            tables = [name.decode() for (name,) in connection.execute("SELECT name FROM sqlite_master")]
            names = {folded(table) for table in tables}
            for table in tables:
                names |= {folded(row[1].decode()) for row in connection.execute(f'PRAGMA table_info("{table}")')}
            groups: dict[str, list[str]] = {}
            for sql in queries:
                groups.setdefault(formatting_key(sql, names), []).append(sql)
            for first, *others in groups.values():
                for other in others:
                    pairs += 1
                    assert connection.execute(first).fetchall() == connection.execute(other).fetchall()
    assert pairs > 0
