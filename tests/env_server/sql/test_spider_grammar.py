"""Counts as Spider's own parser takes them: its habits, where it gives up, and agreement with a real parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.sql.hardness import parsed_complexity
from env_server.sql.spider_grammar import Complexity, read_complexity

# (clauses, nesting, extras, query): what Spider's parser and counting rules gave, on a schema with these names.
HABITS = [
    # A value that is a column takes everything up to AND, a comma, a parenthesis, a clause or JOIN with it.
    (1, 0, 0, "SELECT a FROM t WHERE a < b OR c = 1"),
    (1, 0, 1, "SELECT a FROM t WHERE a < b OR c = 1 AND d = 2"),
    (2, 0, 1, "SELECT a FROM t WHERE c = 1 OR a < b"),
    (2, 0, 0, "SELECT a FROM t WHERE a < b OR c LIKE 'x' ORDER BY a"),
    (1, 0, 1, "SELECT a FROM t WHERE a > b + 1 OR c = 1 AND d > b * 2 OR d = 3"),
    (2, 0, 1, "SELECT a FROM t WHERE a BETWEEN b AND 3 OR c = 1"),
    (2, 0, 0, "SELECT T1.a FROM t AS T1 JOIN u AS T2 ON T1.a = T2.b OR T1.c = 3 WHERE T1.d = 1"),
    (2, 0, 0, "SELECT T1.a FROM t AS T1 JOIN u AS T2 ON T1.a = T2.b LEFT JOIN v AS T3 ON T3.c = T1.c"),
    (1, 0, 0, "SELECT a FROM t GROUP BY a HAVING count(*) > b OR sum(c) > 2"),
    # Quoted text is a value that takes nothing with it, in double quotes too.
    (2, 0, 1, 'SELECT a FROM t WHERE a < "b" OR c = 1'),
    # What it takes may end in front of a subquery or behind a parenthesis; the rest is never seen.
    (1, 0, 0, "SELECT a FROM t WHERE a = b OR c IN (SELECT d FROM u) ORDER BY a LIMIT 1"),
    (1, 0, 0, "SELECT a FROM t WHERE a = b OR c IN (1) GROUP BY d ORDER BY a LIMIT 1"),
    (1, 0, 0, "SELECT a FROM t WHERE a = b OR c > (SELECT max(d) FROM u) UNION SELECT b FROM u"),
    # GROUP BY and ORDER BY end at what is not understood.
    (1, 0, 0, "SELECT a FROM t GROUP BY a + b HAVING count(*) > 1 ORDER BY c LIMIT 2"),
    (1, 0, 0, "SELECT a FROM t ORDER BY a COLLATE NOCASE DESC LIMIT 1"),
    (1, 0, 0, "SELECT a FROM t ORDER BY a - b - c LIMIT 1"),
    (1, 0, 0, "SELECT a FROM t ORDER BY sum(a)/count(*) LIMIT 1"),
    (1, 0, 0, "SELECT a FROM t ORDER BY a IS NULL, b LIMIT 1"),
    (2, 0, 0, "SELECT a FROM t ORDER BY a LIMIT 3 OFFSET 2"),
    (1, 0, 0, "SELECT a FROM t LIMIT 2, 3"),
    # An aggregate counts in SELECT where a column begins with it; in ORDER BY everywhere; in HAVING nowhere.
    (0, 0, 1, "SELECT max(a), b / count(*) FROM t"),
    (0, 0, 1, "SELECT (max(a) - min(a)), count(*) FROM t"),
    (1, 0, 1, "SELECT a FROM t ORDER BY max(b) - min(b)"),
    (1, 0, 0, "SELECT a FROM t GROUP BY a HAVING max(b) > 1 AND min(b) < 2"),
    # A star is a column wherever it stands, and columns need no comma.
    (0, 0, 1, "SELECT max(a) * b FROM t"),
    (0, 0, 1, "SELECT a * b * c FROM t"),
    # A negation counts as an aggregate.
    (1, 0, 2, "SELECT a FROM t WHERE b NOT IN (1) AND c NOT BETWEEN 1 AND 2"),
    # Case, blanks and parentheses around a whole query.
    (1, 1, 0, "(select A from T where b ! =  3) UNION (SELECT a FROM u ORDER BY b LIMIT 1);"),
    (0, 0, 0, "SELECT count(*) FROM (SELECT a FROM t WHERE a > = 3) ;;"),
    (0, 0, 1, "SELECT (a), (b - c) FROM (t)"),
]

GIVEN_UP = [
    "",
    "SELECT 1",
    "SELECT a",
    "SELECT a FROM t WHERE a=1",
    "SELECT a FROM t WHERE a <> 1",
    "SELECT a FROM t WHERE a IN (1, 2)",
    "SELECT a FROM t WHERE (a = 1 OR b = 2)",
    "SELECT a FROM t WHERE NOT a = 1",
    "SELECT a FROM t WHERE a IS NOT NULL",
    "SELECT a FROM t WHERE a = (b)",
    "SELECT a FROM t WHERE a = 2 + b",
    "SELECT a FROM t WHERE a = 'it''s'",
    "SELECT a FROM t WHERE a = 'it",
    "SELECT a FROM t WHERE a LIKE 'x' ESCAPE 'y'",
    "SELECT a FROM t WHERE EXISTS (SELECT b FROM u)",
    "SELECT a FROM t WHERE length(a) > 3",
    "SELECT a FROM t WHERE a = length(b)",
    "SELECT a FROM t, u",
    "SELECT a FROM t LEFT JOIN u ON t.a = u.b",
    "SELECT a FROM t JOIN (SELECT b FROM u)",
    "SELECT a FROM (SELECT a FROM t) AS x",
    "SELECT a AS x FROM t",
    "SELECT a x FROM t",
    "SELECT T1.* FROM t AS T1",
    'SELECT "a" FROM t',
    "SELECT `a` FROM t",
    "SELECT max(a) - min(a) FROM t",
    "SELECT (SELECT max(a) FROM t) FROM u",
    "SELECT a FROM t UNION ALL SELECT a FROM u",
    "SELECT a FROM t ORDER BY 1",
    "SELECT a FROM t ORDER BY length(a) DESC LIMIT 1",
    "SELECT a FROM t LIMIT",
    "WITH x AS (SELECT a FROM t) SELECT a FROM x",
    "SELECT a FROM t WHERE b IN (SELECT b FROM u LIMIT 1 OFFSET 2)",
    "SELECT a FROM t WHERE b = 1 -- why",
]


@pytest.mark.parametrize(("clauses", "nesting", "extras", "sql"), HABITS)
def test_habits(clauses: int, nesting: int, extras: int, sql: str) -> None:
    assert read_complexity(sql) == Complexity(clauses, nesting, extras)


@pytest.mark.parametrize("sql", GIVEN_UP)
def test_where_it_gives_up(sql: str) -> None:
    assert read_complexity(sql) is None


WORDS = ["(", ")", ",", "*", "select", "from", "where", "and", "a", "=", "1", '"', "'", "join", "on", "as", ";", "by"]


@given(st.text(max_size=80) | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_any_text_is_read_or_given_up(text: str) -> None:
    assert isinstance(read_complexity(text), Complexity | None)


@pytest.mark.parametrize("piece", ["(", "SELECT a FROM t WHERE a IN (", "SELECT a FROM (", "a = b OR ", "'", ", "])
def test_long_texts_are_read_or_given_up(piece: str) -> None:
    read_complexity("SELECT a FROM t WHERE " + piece * 50_000)
    read_complexity("SELECT " + piece * 50_000)


# --- agreement with sqlglot on what Spider's annotators mostly write --------------------------------------------

COLUMNS = st.sampled_from(["a", "b", "c", "T1.a", "T2.b"])
AGGREGATES = st.builds("{}({})".format, st.sampled_from(["count", "max", "AVG"]), st.sampled_from(["a", "DISTINCT b"]))
LITERALS = st.sampled_from(["1", "2.5", "'x or y'", '"like"', "'%z%'"])
SELECTED = COLUMNS | AGGREGATES | st.just("count(*)") | st.just("sum(a - b)")


@st.composite
def conditions(draw: st.DrawFn, depth: int) -> str:
    """Comparisons with literals and subqueries; a column on the right is one of the parser's habits."""
    found: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        left = draw(COLUMNS)
        kind = draw(
            st.sampled_from(["=", "! =", ">=", "LIKE", "NOT LIKE", "BETWEEN", "NOT BETWEEN", "IN", "NOT IN", "<"])
        )
        if kind.endswith("BETWEEN"):
            right = f"{draw(LITERALS)} AND {draw(LITERALS)}"
        elif kind.endswith("IN") or (kind == "<" and depth < 2):
            right = f"({draw(queries(depth + 1))})" if depth < 2 else "(3)"
        else:
            right = draw(LITERALS)
        found += [f"{left} {kind} {right}", draw(st.sampled_from(["AND", "OR", "and"]))]
    return " ".join(found[:-1])


@st.composite
def queries(draw: st.DrawFn, depth: int = 0) -> str:
    """A query without the parser's habits."""
    parts = [draw(st.sampled_from(["SELECT", "select", "SELECT DISTINCT"]))]
    parts.append(" , ".join(draw(st.lists(SELECTED, min_size=1, max_size=3))))
    parts.append("FROM t AS T1")
    on = st.sampled_from(["", " ON T1.a = T2.b", " ON T1.a = T2.b AND T1.c = 1"])
    parts += [f"JOIN {table}{draw(on)}" for table in ("u AS T2", "v AS T3")[: draw(st.integers(0, 2))]]
    if draw(st.booleans()):
        parts.append("WHERE " + draw(conditions(depth)))
    if draw(st.booleans()):
        parts.append("GROUP BY " + ", ".join(draw(st.lists(COLUMNS, min_size=1, max_size=2))))
        if draw(st.booleans()):
            parts.append("HAVING count(*) > 2" + draw(st.sampled_from(["", " AND avg(a) < 3", " OR max(b) = 1"])))
    if draw(st.booleans()):
        terms = st.builds("{} {}".format, COLUMNS | AGGREGATES, st.sampled_from(["", "ASC", "DESC"]))
        parts.append("ORDER BY " + ", ".join(draw(st.lists(terms, min_size=1, max_size=2))))
    if draw(st.booleans()):
        parts.append("LIMIT 3")
    elif depth < 2 and "ORDER" not in " ".join(parts) and draw(st.booleans()):
        parts += [draw(st.sampled_from(["UNION", "INTERSECT", "EXCEPT"])), draw(queries(2))]
    return " ".join(parts)


@settings(max_examples=300)
@given(queries(), st.sampled_from(["", ";", " ;"]))
def test_agrees_with_a_real_parser(query: str, end: str) -> None:
    counts = read_complexity(query + end)
    assert counts is not None
    assert counts == parsed_complexity(query + end)


def test_reads_every_gold_of_spider(spider_dir: Path) -> None:
    """Two golds are counted otherwise than by their syntax: `Mar < Jul OR Mar > Oct`."""
    entries = json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8"))
    counts = {entry["query"]: read_complexity(entry["query"]) for entry in entries}
    assert None not in counts.values()
    habits = [query for query, complexity in counts.items() if complexity != parsed_complexity(query)]
    assert [query.count("<") for query in habits] == [1]
