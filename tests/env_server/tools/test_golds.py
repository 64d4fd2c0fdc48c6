"""What a gold does beside what its question means: NULL sorts first, numbers are text; and rows that are refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from env_server.test_suites.suite import Refusal
from env_server.tools.diagnosis import diagnose
from env_server.tools.findings import Finding, Kind
from env_server.types import AnswerMode
from tests.env_server.tools.planted import database

CLUB = """
CREATE TABLE players (id INTEGER PRIMARY KEY, name TEXT, age INT, points TEXT, team TEXT, born TEXT, fee TEXT);
INSERT INTO players VALUES
    (1, 'Ada', NULL, '9', 'red', 'n/a', 'n/a'), (2, 'Bo', 31, '10', 'red', '1990-01-02', '$5'),
    (3, 'Cy', 25, '100', 'blue', '1996-05-05', '1,200'), (4, 'Dee', 26, '85', 'blue', '1995-05-05', '30'),
    (5, 'Eli', 40, '7', 'green', '1981-05-05', '4'), (6, 'Flo', 33, '33', 'red', '', '7');
CREATE TABLE jumps (id INTEGER PRIMARY KEY, player_id INT, height TEXT, version TEXT);
INSERT INTO jumps VALUES (1, 1, '9.50', '1.1'), (2, 2, '10.25', '1.10'), (3, 3, 'n/a', '1.2'), (4, 4, '100', '2.0');
"""
RIGHT = (
    "SELECT MAX(CAST(points AS INTEGER)) FROM players",
    "SELECT name FROM players ORDER BY CAST(points AS INTEGER) DESC LIMIT 1",
    "SELECT name FROM players ORDER BY points + 0 DESC LIMIT 1",
    "SELECT name FROM players WHERE 0 + points > 50",
    "SELECT SUM(points), AVG(points), TOTAL(points), MAX(points * 2) FROM players",
    "SELECT name FROM players WHERE points = '10'",
    "SELECT name FROM players WHERE points LIKE '%0'",
    "SELECT points || ' pts' FROM players WHERE id = 2",
    "SELECT points FROM players UNION SELECT name FROM players",
    "SELECT SUM(height), COUNT(*) FROM jumps",
    "SELECT id FROM jumps WHERE height LIKE '%.50'",
    "SELECT COUNT(*) FROM jumps WHERE height = 'n/a'",
    "SELECT MAX(version) FROM jumps",
    "SELECT name FROM players WHERE age IS NOT NULL ORDER BY age LIMIT 1",
    "SELECT name FROM players ORDER BY age NULLS LAST LIMIT 1",
    "SELECT name FROM players ORDER BY age DESC LIMIT 1",
    "SELECT name FROM players WHERE id > 1 ORDER BY CAST(points AS INT), age LIMIT 2",
    "SELECT team FROM players GROUP BY team ORDER BY COUNT(*) DESC LIMIT 1",
)
AS_TEXT = {
    "SELECT name FROM players WHERE points > '50'": "Cy; Dee",
    "SELECT name FROM players WHERE NOT points < 50": "Cy; Dee",
    "SELECT COUNT(*) FROM players WHERE points BETWEEN '10' AND '9'": "0",
    "SELECT MAX(points) FROM players": "100",
    "WITH q AS (SELECT points AS p FROM players) SELECT MIN(p) FROM q": "7",
    "SELECT name, points AS p FROM players WHERE team = 'blue' ORDER BY p": "Dee, 85; Cy, 100",
    "SELECT name FROM (SELECT name, RANK() OVER (ORDER BY points DESC) AS r FROM players) WHERE r = 1": "Cy",
    "SELECT a.name FROM players a JOIN players b ON a.points > b.points WHERE b.id = 4": "Cy",
    "SELECT ROUND(AVG(height)) FROM jumps": "40.0",
    "SELECT id FROM jumps WHERE height > '50'": "4",
    "SELECT MIN(CAST(height AS REAL)) FROM jumps": "9.5",
    "SELECT SUM(fee) FROM players": "",
    "SELECT name FROM players WHERE fee > '20'": "",
}
"""Golds that read numbers as text, and their answer with numbers; "" where SQLite cannot read them as such."""
LACKING = {
    "SELECT name FROM players ORDER BY age LIMIT 1": "Cy",
    "SELECT name FROM players ORDER BY age ASC LIMIT 3": "Cy; Dee; Bo",
    "SELECT name FROM players WHERE id = (SELECT id FROM players ORDER BY age LIMIT 1)": "Cy",
    "SELECT name, age * 2 AS twice FROM players ORDER BY twice LIMIT 1": "Cy, 50",
    "SELECT name, age FROM players ORDER BY 2 LIMIT 1": "Cy, 25",
    "SELECT p.name FROM players p LEFT JOIN jumps j ON j.player_id = p.id ORDER BY j.player_id LIMIT 1": "Ada",
    "SELECT id FROM jumps ORDER BY CAST(height AS REAL) LIMIT 1": "1",
    "SELECT id FROM jumps ORDER BY height + 0 LIMIT 2": "1; 2",
    "SELECT name FROM players ORDER BY born LIMIT 1": "Eli",
    "SELECT name FROM players ORDER BY born DESC LIMIT 1": "Cy",
    "SELECT name FROM players WHERE team = 'red' ORDER BY age DESC LIMIT 3": "Flo; Bo",
    "SELECT team FROM players GROUP BY team ORDER BY MIN(born) LIMIT 1": "green",
    "SELECT name, age FROM players UNION SELECT 'Zoe', 12 ORDER BY age LIMIT 1": "Zoe, 12",
    "SELECT name FROM (SELECT name, ROW_NUMBER() OVER (ORDER BY age) AS r FROM players) WHERE r = 1": "Cy",
    "SELECT name FROM players WHERE team = 'red' ORDER BY team, age LIMIT 1": "Bo",
}
"""Golds that keep rows without what they sort by, and their answer without these."""


def examine(root: Path, script: str, golds: Sequence[str], **options: object) -> tuple[Finding, ...]:
    folder = root / "data"
    database(folder, "club.sqlite", script)
    lines = [json.dumps({"question": f"Number {i}?", "sql": sql}) for i, sql in enumerate(golds)]
    (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return diagnose(str(folder), root / "cache", **{"test_databases": False, **options}).findings  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "golds"), [(Kind.GOLD_TEXT_NUMBERS, AS_TEXT), (Kind.GOLD_LACKS_KEY, LACKING), (None, dict.fromkeys(RIGHT))]
)
def test_an_answer_that_rests_on_text_or_null(kind: Kind | None, golds: dict[str, str], tmp_path: Path) -> None:
    found = {
        list(golds)[int(each.place.question_id[-4:])]: each
        for each in examine(tmp_path, CLUB, list(golds))
        if each.kind in (Kind.GOLD_TEXT_NUMBERS, Kind.GOLD_LACKS_KEY)
    }
    wrong = {sql: (each.kind, answer) for sql, each in found.items() if (answer := golds[sql]) not in each.message}
    assert wrong == {}
    assert list(found) == [sql for sql in golds if kind]


EVENTS = "CREATE TABLE events (id INTEGER PRIMARY KEY, body TEXT{}); {};"
REFUSED = {
    "generated": EVENTS.format(", n INT AS (json_extract(body, '$.n')) VIRTUAL", ""),
    "stored": EVENTS.format(", n REAL AS (body ->> '$.n') STORED NOT NULL", ""),
    "index": EVENTS.format("", "CREATE INDEX i ON events (json_extract(body, '$.n'))"),
    "partial index": EVENTS.format("", "CREATE INDEX i ON events (id) WHERE json_extract(body, '$.n') > 3"),
    "check": EVENTS.format(" CHECK (json_extract(body, '$.n') > 0)", ""),
    "strict": "CREATE TABLE events (id INTEGER PRIMARY KEY, body TEXT, n INT) STRICT;",
}
"""Tables that refuse a row by an error, not by a conflict."""


@pytest.mark.parametrize("schema", REFUSED.values(), ids=REFUSED)
def test_rows_that_a_table_refuses_are_left_out_of_test_databases(schema: str, tmp_path: Path) -> None:
    """So the judge has databases that tell, whatever an index, a check or a generated column computes."""
    rows = ", ".join(f"({n}, '{json.dumps({'kind': 'ab'[n % 2], 'n': n * 3})}')" for n in range(1, 9))
    golds = ["SELECT COUNT(*) FROM events WHERE id > 3", "SELECT id FROM events WHERE json_extract(body, '$.n') = 15"]
    script = f"{schema} INSERT INTO events (id, body) VALUES {rows}"
    options = {"test_databases": True, "answer_mode": AnswerMode.SQL}
    found = examine(tmp_path, script, [*golds, "SELECT MAX(id) FROM events WHERE body = 'x' OR id < 4"], **options)
    assert {each.kind for each in found} <= {Kind.FEW_QUESTIONS, Kind.REDUNDANT_CLAUSE, Kind.EMPTY_COLUMN}


def test_a_table_that_takes_no_row_has_no_test_databases(tmp_path: Path) -> None:
    script = "CREATE TABLE t (id INTEGER PRIMARY KEY CHECK (id > 1000)); INSERT INTO t VALUES (1001), (1002)"
    found = examine(tmp_path, script, ["SELECT COUNT(*) FROM t"], test_databases=True)
    (finding,) = [each for each in found if each.kind is Kind.NO_TEST_DATABASES]
    assert Refusal.NO_ROWS.value in finding.message


UNKNOWN = {
    "column": "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT COLLATE unicase, n INT);",
    "unique": "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT COLLATE unicase UNIQUE, n INT);",
    "index": "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, n INT); CREATE INDEX i ON t (name COLLATE unicase);",
}


@pytest.mark.parametrize("script", UNKNOWN.values(), ids=UNKNOWN)
def test_a_collation_of_another_program_is_named(script: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with closing(sqlite3.connect(tmp_path / "data" / "club.sqlite")) as connection:
        connection.create_collation("unicase", lambda one, other: (one > other) - (one < other))
        connection.executescript(f"{script} INSERT INTO t VALUES (1, 'Deck', 2), (2, 'Other', 3)")
    golds = ["SELECT n FROM t WHERE id = 2", "SELECT COUNT(*) FROM t", "SELECT MAX(name) FROM t"]
    found = examine(tmp_path, "", golds)
    (named,) = [each for each in found if each.kind is Kind.UNKNOWN_COLLATION]
    assert "'unicase'" in named.message
    assert not {Kind.EMPTY_TABLE, Kind.NOT_EXAMINED} & {each.kind for each in found}
    assert all("may be right" in each.hint for each in found if each.kind is Kind.GOLD_FAILS)
