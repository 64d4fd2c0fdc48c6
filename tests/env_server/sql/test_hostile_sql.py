"""What a hostile agent may send: each statement gives one clear error or a bounded result, and changes nothing.

The statements run against a small step budget; a separate process measures that memory stays bounded under the
default one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import apsw
import pytest

from env_server.errors import SQLError
from env_server.settings import DisplaySettings, SandboxSettings
from env_server.sql.display import format_result
from env_server.sql.sandbox import QueryResult, Sandbox

SETTINGS = SandboxSettings(vm_steps=300_000, sql_bytes=60_000)
DISPLAY = DisplaySettings()
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
MEGABYTE = "hex(zeroblob(499000))"
PROBE = "SELECT k, count(*) AS n, sum(a) AS s FROM t GROUP BY k ORDER BY k"


def doubling_ctes(step: str, levels: int) -> str:
    """A chain of CTEs in which each one names the one before it twice."""
    return "WITH c0(x) AS (SELECT 1)" + "".join(
        f", c{i}(x) AS {step.format(p=f'c{i - 1}')}" for i in range(1, levels + 1)
    )


BUDGET = {
    "endless recursion": ENDLESS + "SELECT count(*) FROM n",
    "endless filter": ENDLESS + "SELECT i FROM n WHERE i < 0",
    "cross join": "SELECT count(*) FROM t a, t b, t c",
    "cross join with sort": "SELECT a.b FROM t a, t b, t c ORDER BY a.b || b.b || c.b",
    "sixty tables": "SELECT count(*) FROM " + ", ".join(f"t a{i}" for i in range(60)),
    "window over a cross join": "SELECT sum(a.a) OVER (ORDER BY b.b) FROM t a, t b, t c",
    "many temporary tables": ENDLESS
    + ", x(i) AS (SELECT i FROM n LIMIT 9000) SELECT "
    + ", ".join(f"(SELECT count(*) FROM (SELECT DISTINCT i + {k} FROM x))" for k in range(60)),
}
SIZE = {
    "huge zeroblob": "SELECT zeroblob(2000000000)",
    "huge printf": "SELECT printf('%.*c', 2000000000, 'x')",
    "huge width": "SELECT printf('%900000d%900000d', 1, 1)",
    "hex of a large blob": f"SELECT hex({MEGABYTE})",
    "replace blow-up": "SELECT replace(hex(zeroblob(200000)), '0', 'xxxxxxxx')",
    "quadratic instr": f"SELECT instr({MEGABYTE}, substr({MEGABYTE}, 1, 490000) || 'b')",
    "quadratic trim": f"SELECT trim({MEGABYTE}, replace({MEGABYTE}, '0', 'a'))",
    "quadratic trim of a column": f"SELECT trim({MEGABYTE}, b) FROM t",
    "LIKE of a long text": f"SELECT {MEGABYTE} LIKE '{'%0' * 45}b'",
    "GLOB of a long text": f"SELECT {MEGABYTE} GLOB '{'*[0-9]' * 16}b'",
    "group_concat blow-up": "SELECT group_concat(b || hex(zeroblob(2000))) FROM t",
    "json_group_array blow-up": "SELECT json_group_array(hex(zeroblob(5000))) FROM t",
    "doubling string": "WITH RECURSIVE m(s) AS (SELECT 'aaaaaaaaaa' UNION ALL SELECT s || s FROM m) SELECT s FROM m",
    "sort of large rows": ENDLESS + f"SELECT {MEGABYTE} || i FROM n ORDER BY 1",
    "wide rows": f"SELECT {', '.join([MEGABYTE] * 3)}",
    "rows beyond the heap": f"SELECT {', '.join([MEGABYTE] * 400)}",
    "deep parentheses": "SELECT " + "(" * 10_000 + "1" + ")" * 10_000,
    "deep subqueries": "SELECT * FROM (" * 600 + "SELECT 1" + ")" * 600,
    "deep scalar subqueries": "SELECT " + "(SELECT " * 600 + "1" + ")" * 600,
    "deep expression": "SELECT " + " OR ".join(["1"] * 5_000),
    "deep NOT": "SELECT " + "NOT " * 5_000 + "1",
    "deep CASE": "SELECT " + "CASE WHEN 1 THEN " * 300 + "1" + " END" * 300,
    "compound of 600": " UNION ALL ".join(["SELECT 1"] * 600),
    "doubling unions": doubling_ctes("(SELECT * FROM {p} UNION ALL SELECT * FROM {p})", 60) + " SELECT * FROM c60",
    "doubling joins": doubling_ctes("NOT MATERIALIZED (SELECT l.x FROM {p} l, {p} r)", 60) + " SELECT * FROM c60",
    "too many tables": "SELECT 1 FROM " + ", ".join(f"t a{i}" for i in range(70)),
    "too many arguments": "SELECT max(" + ", ".join(["1"] * 2_000) + ")",
    "too many columns": "SELECT " + ", ".join(["1"] * 3_000),
    "long LIKE pattern": "SELECT b LIKE '" + "%a" * 10_000 + "' FROM t",
    "long GLOB pattern": "SELECT b GLOB '" + "*[a-z]" * 5_000 + "' FROM t",
    "a megabyte of SQL": "SELECT '" + "x" * 1_000_000 + "'",
    "a megabyte of comment": "SELECT 1 /*" + "x" * 1_000_000 + "*/",
}
DENIED = {
    "insert": "INSERT INTO t VALUES (1, 'x', 2)",
    "insert behind a comment": "/* SELECT */ -- SELECT\n INSERT INTO t VALUES (1, 'x', 2)",
    "insert returning": "INSERT INTO t (b) VALUES ('x') RETURNING a",
    "update": "UPDATE t SET a = 0",
    "delete behind a CTE": "WITH x AS (SELECT 1) DELETE FROM t",
    "update behind a CTE": "WITH x AS (SELECT 1) UPDATE t SET a = 1 RETURNING *",
    "replace": "REPLACE INTO t VALUES (1, 'x', 2)",
    "create": "CREATE TABLE u (a)",
    "create temp": "CREATE TEMP TABLE u (a)",
    "create temp view": "CREATE TEMP VIEW u AS SELECT 1",
    "create virtual": "CREATE VIRTUAL TABLE temp.u USING fts5(a)",
    "drop": "DROP TABLE t",
    "alter": "ALTER TABLE t RENAME TO u",
    "attach": "ATTACH DATABASE ':memory:' AS other",
    "detach": "DETACH main",
    "vacuum": "VACUUM",
    "vacuum into": "VACUUM INTO 'copy.db'",
    "analyze": "ANALYZE",
    "reindex": "REINDEX",
    "begin": "BEGIN IMMEDIATE",
    "commit": "COMMIT",
    "savepoint": "SAVEPOINT s",
    "explain": "EXPLAIN SELECT 1",
    "explain query plan": "EXPLAIN QUERY PLAN SELECT 1",
    "two statements": "SELECT 1; DROP TABLE t",
    "many statements": "SELECT 1;" * 1_000,
    "second statement behind a comment": "SELECT 1; /* */ -- \n SELECT 2",
    "load_extension": "SELECT load_extension('libc.so.6')",
    "fts3_tokenizer": "SELECT fts3_tokenizer('simple', x'4141414141414141')",
    "random": "SELECT a FROM t ORDER BY RANDOM()",
    "random in a view": "SELECT * FROM chance",
    "randomblob": "SELECT hex(randomblob(16))",
    "database list": "PRAGMA database_list",
    "database list as a function": "SELECT file FROM pragma_database_list",
    "function list": "SELECT * FROM pragma_function_list",
    "writable schema": "PRAGMA writable_schema = 1",
    "query_only off": "PRAGMA query_only = 0",
    "hard heap limit": "PRAGMA hard_heap_limit = 100",
    "temp directory": "PRAGMA temp_store_directory = '/'",
    "integrity check": "PRAGMA integrity_check",
    "pages": "SELECT * FROM dbstat",
    "pages counted": "SELECT count(*) FROM dbstat",
    "local time": "SELECT datetime('2026-01-01', 'localtime')",
}
SYNTAX = {
    "empty": "",
    "only comments": "-- nothing\n/* here",
    "NUL": "SELECT 1\0; DROP TABLE t",
    "lone surrogate": "SELECT '\udc80'",
    "unterminated text": "SELECT 'abc",
    "unterminated name": 'SELECT "abc FROM t',
    "unterminated bracket": "SELECT [abc FROM t",
    "parameter": "SELECT :a, @b, $c, ?1",
    "garbage": "\x01\x02\x7f",
    "prose": "Please show me all the pets, thank you!",
}
MISSING = {
    "regexp": "SELECT b REGEXP '(a+)+$' FROM t",
    "readfile": "SELECT readfile('/etc/passwd')",
    "writefile": "SELECT writefile('x', 'y')",
    "temp schema": "SELECT * FROM temp.t",
    "other schema": "SELECT * FROM other.t",
    "edit": "SELECT edit('x')",
    "fsdir": "SELECT * FROM fsdir('/')",
    "statements": "SELECT * FROM sqlite_stmt",
}
BOUNDED = {
    "endless rows": ENDLESS + "SELECT i FROM n",
    "endless distinct rows": ENDLESS + "SELECT DISTINCT i FROM n",
    "giant IN list": "SELECT a FROM t WHERE a IN (" + ", ".join(map(str, range(8_000))) + ")",
    "negative LIKE": f"SELECT hex(zeroblob(40000)) LIKE '{'%0' * 45}b'",
    "negative GLOB": f"SELECT hex(zeroblob(40000)) GLOB '{'*[0-9]' * 16}b'",
    "LIKE of a short pattern": f"SELECT {MEGABYTE} LIKE '%word%'",
    "large value": f"SELECT {MEGABYTE}",
    "two thousand columns": "SELECT " + ", ".join(f"a AS c{i}" for i in range(2_000)) + " FROM t",
    "odd names": 'SELECT 1 AS "", 2 AS "a\nb", 3 AS "' + "n" * 5_000 + '"',
    "control characters": "SELECT char(0, 27, 10, 13, 8232, 55296, 1114111)",
    "infinity": "SELECT 9e999, -9e999, 9e999 - 9e999",
    "schema table": "SELECT name FROM sqlite_master",
    "windows": "SELECT group_concat(b) OVER (ORDER BY a ROWS 50 PRECEDING) FROM t",
    "format of a pointer": "SELECT printf('%p %n %s', 1, 2, x'ff')",
}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret-folder") / "t.db"
    connection = apsw.Connection(str(path))
    connection.execute(
        """
        CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT, k INTEGER);
        WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300)
        INSERT INTO t SELECT i, 'row ' || i, i % 5 FROM n;
        CREATE VIEW chance AS SELECT random() AS x;
        """
    ).fetchall()
    connection.close()
    return path


@pytest.fixture(scope="module")
def sandbox(database: Path) -> Iterator[Sandbox]:
    digest = hashlib.sha256(database.read_bytes()).hexdigest()
    box = Sandbox(database, SETTINGS)
    yield box
    box.close()
    assert hashlib.sha256(database.read_bytes()).hexdigest() == digest
    assert [path.name for path in database.parent.iterdir()] == [database.name]


def tried(box: Sandbox, sql: str) -> QueryResult | tuple[str, str]:
    try:
        return box.query(sql, DISPLAY.max_rows)
    except SQLError as error:
        return error.kind, error.message


def kind_of(box: Sandbox, database: Path, sql: str) -> str:
    """Try a statement; check that it is repeatable and leaves the connection as good as a fresh one."""
    first = tried(box, sql)
    assert tried(box, sql) == first
    fresh = Sandbox(database, SETTINGS)
    assert fresh.query(PROBE, 20) == box.query(PROBE, 20)
    fresh.close()
    if isinstance(first, QueryResult):
        kind, text = "result", format_result(first, DISPLAY)
        assert len(text) <= DISPLAY.max_chars
    else:
        kind, text = first
        assert len(text) <= 400
        assert len(text.splitlines()) == 1
    assert text
    assert "secret-folder" not in text
    text.encode()
    return kind


KINDS = {"budget": BUDGET, "size": SIZE, "denied": DENIED, "syntax": SYNTAX, "missing": MISSING, "result": BOUNDED}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, statements in KINDS.items() for name in statements])
def test_a_hostile_statement_ends_as_it_should(sandbox: Sandbox, database: Path, kind: str, name: str) -> None:
    """Endless work at the step budget; what is allowed stays bounded."""
    assert kind_of(sandbox, database, KINDS[kind][name]) == kind
    if kind == "budget":
        assert tried(sandbox, BUDGET[name]) == ("budget", "the query needs more than 300000 steps")


def test_hostile_statements_in_parallel_do_not_disturb_an_ordinary_one(database: Path) -> None:
    calm = Sandbox(database, SETTINGS)
    expected = calm.query(PROBE, 20)

    def attack(sql: str) -> str:
        box = Sandbox(database, SETTINGS)
        try:
            found = tried(box, sql)
        finally:
            box.close()
        return found[0] if isinstance(found, tuple) else "result"

    attacks = [SIZE["rows beyond the heap"], SIZE["sort of large rows"], BUDGET["cross join"]] * 2
    with ThreadPoolExecutor(3) as executor:
        kinds = [executor.submit(attack, sql) for sql in attacks]
        assert all(calm.query(PROBE, 20) == expected for _ in range(50))
        assert [future.result() for future in kinds] == ["size", "size", "budget"] * 2
    calm.close()


MEMORY_SCRIPT = """
import json, resource, sys
from pathlib import Path
from env_server.errors import SQLError
from env_server.sql.sandbox import Sandbox, limit_memory
from env_server.settings import SandboxSettings

settings = SandboxSettings(sql_bytes=60_000)
limit_memory(settings)
box = Sandbox(Path(sys.argv[1]), settings)
box.query("SELECT 1", 1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kinds = []
for sql in json.load(sys.stdin):
    try:
        box.query(sql, 20)
        kinds.append("result")
    except SQLError as error:
        kinds.append(error.kind)
rows = box.query("SELECT count(*) FROM t", 1).rows
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, kinds, rows]))
"""


def test_memory_stays_bounded_under_the_default_settings(database: Path) -> None:
    names = (
        "rows beyond the heap",
        "sort of large rows",
        "group_concat blow-up",
        "doubling unions",
        "deep parentheses",
    )
    attacks = [SIZE[name] for name in names] + [BUDGET["many temporary tables"]]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(database)],
        input=json.dumps(attacks),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    growth, kinds, rows = json.loads(done.stdout)
    assert kinds[:-1] == ["size"] * len(names)
    assert rows == [[300]]
    unit = 1 if sys.platform == "darwin" else 1024
    assert growth * unit < 3 * SandboxSettings().heap_bytes
