"""Judging submitted SQL against Spider's and BIRD's rules, written here once more in the plainest way.

The reference runs both queries on connections of its own, as the official scripts do, and tries every permutation of
the columns. Where the judge is meant to differ, a test says so; `env_server.judging.verdict` lists the reasons.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.dataset import Gold, Row, SQLValue
from env_server.errors import SQLError
from env_server.judging.submissions import submitted_query
from env_server.judging.verdict import judge_rows
from env_server.settings import SandboxSettings, SQLRule
from env_server.sql.hardness import orders_at_top_level
from env_server.sql.sandbox import Sandbox

MAX_REFERENCE_WIDTH = 6
FETCHED_ROWS = 100_000

VALUES: st.SearchStrategy[SQLValue] = st.one_of(
    st.none(),
    st.sampled_from(
        [0, 1, -1, 10, 1.0, 10.0, 0.5, -0.0, 2**53, float(2**53), 2**53 + 1, 2**63 - 1, 9.223372036854775807e18]
    ),
    st.sampled_from(["", "1", "1.0", "None", "a", "A", " a", "\u00e9", "e\u0301", "a\0b"]),
    st.sampled_from([b"", b"1", b"a"]),
)


def spider_rule(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> bool:
    """Whether some permutation of the columns makes the rows the gold's, as a list or as a multiset."""
    if not rows and not gold:
        return True
    if len(rows) != len(gold) or len(rows[0]) != len(gold[0]):
        return False
    for order in itertools.permutations(range(len(gold[0]))):
        candidate = [tuple(row[i] for i in order) for row in rows]
        if candidate == list(gold) if ordered else Counter(candidate) == Counter(gold):
            return True
    return False


@st.composite
def results(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """Draw two results, the second often made from the first."""
    width, height = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    table = st.lists(st.tuples(*[VALUES] * width), min_size=height, max_size=height)
    gold = draw(table)
    kind = draw(st.sampled_from(["other", "shuffled", "ordered", "repeated", "columns"]))
    if kind == "other" or not gold:
        return draw(st.lists(st.tuples(*[VALUES] * draw(st.integers(1, 4))), max_size=5)), gold
    order = draw(st.permutations(range(width)))
    rows = [tuple(row[i] for i in order) for row in gold]
    if kind == "repeated":
        rows[draw(st.integers(0, height - 1))] = rows[0]
    if kind == "columns":
        rows = list(zip(*(draw(st.permutations(column)) for column in zip(*rows, strict=True)), strict=True))
    return rows if kind == "ordered" else draw(st.permutations(rows)), gold


@settings(max_examples=1_500)
@given(results(), st.booleans())
def test_any_two_results(tables: tuple[list[Row], list[Row]], ordered: bool) -> None:
    rows, gold = tables
    verdict = judge_rows(rows, Gold(tuple(gold), ordered)).correct
    assert verdict == spider_rule(rows, gold, ordered=ordered)
    assert judge_rows(rows, Gold(tuple(gold), ordered), SQLRule.BIRD).correct == (set(rows) == set(gold))


# --- real queries ----------------------------------------------------------------------------------------------


def official_rows(path: Path, sql: str) -> list[Row] | None:
    """Run a query as the official script does; None when it fails."""
    sql = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    sql = re.sub(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", "2020", sql, flags=re.IGNORECASE)
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda data: data.decode(errors="ignore")
        try:
            return connection.execute(sql).fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            return None


def sandbox_rows(sandbox: Sandbox, sql: str) -> tuple[Row, ...] | None:
    """Run a query as the environment does; None when it fails."""
    try:
        return sandbox.query(submitted_query(sql), FETCHED_ROWS).rows
    except SQLError:
        return None


class Runs:
    """What queries return on one database, run in both ways, once each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sandbox = Sandbox(path, SandboxSettings())
        self._known: dict[str, tuple[list[Row] | None, tuple[Row, ...] | None]] = {}

    def verdicts(self, gold_sql: str, sql: str) -> tuple[bool, bool] | None:
        """Return the reference's verdict and the judge's; None when the gold fails or the reference would not end."""
        gold, gold_here = self._run(gold_sql)
        rows, rows_here = self._run(sql)
        if gold is None or gold_here is None:
            assert gold is None
            assert gold_here is None
            return None
        if rows and gold and len(rows[0]) == len(gold[0]) > MAX_REFERENCE_WIDTH and len(rows) == len(gold) != 1:
            return None
        expected = rows is not None and spider_rule(rows, gold, ordered="order by" in gold_sql.lower())
        verdict = (
            rows_here is not None and judge_rows(rows_here, Gold(gold_here, orders_at_top_level(gold_sql))).correct
        )
        return expected, verdict

    def close(self) -> None:
        self._sandbox.close()

    def _run(self, sql: str) -> tuple[list[Row] | None, tuple[Row, ...] | None]:
        if sql not in self._known:
            self._known[sql] = official_rows(self._path, sql), sandbox_rows(self._sandbox, sql)
        return self._known[sql]


def near_misses(sql: str) -> Iterator[str]:
    """Yield queries that are a little different; some mean the same, some cannot run."""
    for pattern, replacement in (
        (r"\bDISTINCT\b", ""),
        (r"^SELECT ", "SELECT DISTINCT "),
        (r" ORDER BY [^()]*$", ""),
        (r" LIMIT \d+", ""),
        (r"\bDESC\b", "ASC"),
        (r"\bcount\b", "sum"),
        (r"\bmax\b", "min"),
        (r"\bavg\(", "sum("),
        (r">", ">="),
        (r">|<", "! ="),
        (r" AND ", " OR "),
        (r" WHERE [^()]*$", ""),
        (r"\s*;?\s*$", " ;"),
        (r"\s*;?\s*$", " LIMIT 1"),
        (r"$", ") x"),
    ):
        changed = re.sub(pattern, replacement, sql, count=1, flags=re.IGNORECASE)
        if changed != sql:
            yield changed
    parts = re.match(r"SELECT (?!DISTINCT)([^()]+?) FROM (.*)$", sql, re.IGNORECASE | re.DOTALL)
    if parts:
        columns = [column.strip() for column in parts[1].split(",")]
        for changed_columns in (
            columns[::-1],
            columns[1:] or columns * 2,
            [f"CAST({columns[0]} AS TEXT)", *columns[1:]],
        ):
            yield f"SELECT {', '.join(changed_columns)} FROM {parts[2]}"


def golds_by_database(spider_dir: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8")):
        found.setdefault(entry["db_id"], []).append(entry["query"])
    return {db_id: list(dict.fromkeys(golds)) for db_id, golds in sorted(found.items())}


def test_real_golds_against_each_other_and_near_misses(spider_dir: Path) -> None:
    rng = random.Random(0)
    counts: Counter[tuple[bool, bool] | None] = Counter()
    for db_id, golds in golds_by_database(spider_dir).items():
        runs = Runs(spider_dir / "database" / db_id / f"{db_id}.sqlite")
        pairs = [(gold, other) for gold in golds for other in golds]
        pairs += [(gold, changed) for gold in rng.sample(golds, 6) for changed in near_misses(gold)]
        for gold, other in pairs:
            verdicts = runs.verdicts(gold, other)
            counts[verdicts] += 1
            assert verdicts is None or verdicts[0] == verdicts[1], (db_id, gold, other)
        runs.close()
    assert counts[True, True] > 2_000
    assert counts[False, False] > 40_000
    assert counts[None] < 200


# --- text that is not UTF-8 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mangled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Runs]]:
    """A database in which some texts are Latin-1 bytes, as real ones hold them."""
    path = tmp_path_factory.mktemp("mangled") / "mangled.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (id INTEGER, name TEXT, other TEXT)")
        names = [b"caf\xe9", b"na\xefve", b"caf", b"\xff", b"\xfe\xff", b"plain", b"caf\xe9", "caf\ufffd".encode()]
        connection.executemany(
            "INSERT INTO t VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT))",
            [(i, name, names[-1 - i]) for i, name in enumerate(names)],
        )
        connection.commit()
    runs = Runs(path)
    yield path, runs
    runs.close()


@pytest.mark.parametrize(
    ("gold", "query", "correct"),
    [
        ("SELECT name, other FROM t", "SELECT other, name FROM t ORDER BY id DESC", True),
        ("SELECT name FROM t ORDER BY id", "SELECT name FROM t ORDER BY id", True),
        ("SELECT name FROM t ORDER BY id", "SELECT name FROM t ORDER BY id DESC", False),
        ("SELECT name FROM t WHERE id < 2", "SELECT name FROM t WHERE id IN (0, 1)", True),
        ("SELECT name FROM t WHERE id < 2", "SELECT name FROM t WHERE id IN (1, 6)", True),
        ("SELECT name FROM t WHERE id < 2", "SELECT name FROM t WHERE id IN (0, 5)", False),
        ("SELECT DISTINCT name FROM t", "SELECT name FROM t GROUP BY name", True),
        ("SELECT name, count(*) FROM t GROUP BY name", "SELECT count(*), name FROM t GROUP BY 2", True),
        ("SELECT upper(name) FROM t", "SELECT name FROM t", False),
        ("SELECT name FROM t WHERE id = 0", "SELECT CAST(name AS BLOB) FROM t WHERE id = 0", False),
    ],
)
def test_undecodable_text(mangled: tuple[Path, Runs], gold: str, query: str, correct: bool) -> None:
    assert mangled[1].verdicts(gold, query) == (correct, correct)


def test_texts_of_other_bytes_are_other_texts(mangled: tuple[Path, Runs]) -> None:
    """Deviation: the script drops the bytes that it cannot decode, here they are marked."""
    assert mangled[1].verdicts("SELECT name FROM t WHERE id = 0", "SELECT name FROM t WHERE id = 2") == (True, False)
    assert mangled[1].verdicts("SELECT name FROM t WHERE id = 3", "SELECT name FROM t WHERE id = 4") == (True, False)
    assert mangled[1].verdicts("SELECT name FROM t WHERE id = 0", "SELECT name FROM t WHERE id = 7") == (False, True)


# --- the other deviations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "script"),
    [
        ("SELECT a FROM t WHERE b IN (SELECT b FROM t ORDER BY b LIMIT 2)", True),
        ("SELECT a FROM t WHERE b = 'order by'", True),
        ("SELECT a FROM t ORDER  BY a", False),
        ("SELECT a FROM t ORDER\nBY a", False),
    ],
)
def test_order_counts_where_the_gold_orders_at_its_top_level(sql: str, script: bool) -> None:
    assert ("order by" in sql.lower()) is script
    ordered = orders_at_top_level(sql)
    assert ordered is not script
    assert judge_rows([(2,), (1,)], Gold(((1,), (2,)), ordered)).correct is not ordered


def test_whole_floats_are_integers_wherever_they_stand() -> None:
    """The script first compares rows sorted by the text of their cells, where 10 is before 1 but after 1.0."""

    def by_text(row: Row) -> list[SQLValue]:
        return sorted(row, key=lambda cell: str(cell) + str(type(cell)))

    gold, rows = Gold(((1, 10),), ordered=False), [(1.0, 10)]
    assert by_text(gold.rows[0]) != by_text(rows[0])
    assert judge_rows(rows, gold).correct
    assert spider_rule(rows, gold.rows, ordered=False)


def test_what_is_rewritten_and_taken_off(mangled: tuple[Path, Runs]) -> None:
    runs = mangled[1]
    gold = "SELECT id FROM t WHERE id > 2"
    assert runs.verdicts(gold, "SELECT id FROM t WHERE id > = 3 AND id ! = 2") == (True, True)
    assert runs.verdicts(gold, "SELECT id FROM t WHERE id - 2 > YEAR(CURDATE()) - 2020") == (True, True)
    assert runs.verdicts(gold, "SELECT id FROM t WHERE 2020 = YEAR(CURDATE()) AND id > 2") == (False, True)
    assert runs.verdicts("SELECT '>='", "SELECT '> ='") == (True, False)
    assert runs.verdicts(gold, f"```sql\n{gold}\n```") == (False, True)
    assert runs.verdicts(gold, f"{gold};;") == (False, True)


@pytest.mark.parametrize(
    ("query", "script"),
    [
        ("SELECT random() IS NULL", True),
        ("SELECT datetime('2020-01-01', 'localtime') IS NULL", True),
        ("SELECT count(*) FROM sqlite_stmt", False),
        ("DELETE FROM t", False),
        ("SELECT 0; SELECT 0", False),
    ],
)
def test_what_the_sandbox_refuses_is_wrong(mangled: tuple[Path, Runs], query: str, script: bool) -> None:
    assert mangled[1].verdicts("SELECT 0", query) == (script, False)
