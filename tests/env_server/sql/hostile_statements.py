"""Generated statements, as dear as the grammar allows: every built-in function and operator, on large values."""

from __future__ import annotations

from pathlib import Path

import apsw
from hypothesis import strategies as st

COLUMNS = ("a", "small", "medium", "large", "huge", "folded", "doc", "data")
SCRIPT = """
CREATE TABLE t (
    a INTEGER PRIMARY KEY, small TEXT, medium TEXT, large TEXT, huge TEXT, folded TEXT COLLATE NOCASE, doc TEXT,
    data BLOB
);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 300)
INSERT INTO t SELECT
    i,
    'row ' || i,
    replace(hex(zeroblob(100)), '0', 'ab') || i,
    iif(i % 10 = 0, hex(zeroblob(9000)) || i, ''),
    iif(i % 100 = 0, replace(hex(zeroblob(100000)), '0', 'é') || i, NULL),
    iif(i % 10 = 0, hex(zeroblob(5000)) || i, 'Row ' || i),
    iif(i % 10 = 0, '[' || replace(hex(zeroblob(1500)), '0', '1,') || '{"a":[1,"x"]}]', '{"a":' || i || '}'),
    iif(i % 10 = 0, zeroblob(20000), x'00ff')
FROM n;
CREATE INDEX by_small ON t(small);
ANALYZE;
"""


def functions() -> list[tuple[str, int]]:
    """Return every function of this SQLite with the number of its arguments, -1 for any; those of any version."""
    listed = apsw.Connection(":memory:").execute("SELECT DISTINCT name, narg FROM pragma_function_list ORDER BY 1, 2")
    return [(str(name), int(count)) for name, count in listed]


FUNCTIONS = functions()


def build(path: Path, script: str = SCRIPT) -> Path:
    """Make the database on which the statements run: some hundred rows of small texts, some large ones among them."""
    connection = apsw.Connection(str(path))
    connection.execute(script).fetchall()
    connection.close()
    return path


def repeated(characters: str, size: int) -> str:
    """An expression for a text of so many repetitions."""
    return f"replace(hex(zeroblob({(size + 1) // 2})), '0', '{characters}')"


@st.composite
def calls(draw: st.DrawFn, arguments: st.SearchStrategy[str]) -> str:
    """A call of a function of SQLite, whichever it is."""
    name, count = draw(st.sampled_from(FUNCTIONS))
    if count < 0:
        count = -count - 1 + draw(st.integers(0, 3))
    return f'"{name}"({", ".join(draw(arguments) for _ in range(count))})'


OPERATIONS = (
    *("{} || {}", "{} LIKE {}", "{} GLOB {}", "{} LIKE {} ESCAPE '!'", "{} -> {}", "{} ->> {}", "{} = {}", "{} + {}"),
    *("CAST({} AS TEXT) < {} COLLATE NOCASE", "{} IN ({}, 'x')", "CASE WHEN {} THEN 1 ELSE {} END", "{} IS NOT {}"),
)
SIZES = (10, 30, 100, 250, 400, 700, 1_000, 2_000, 4_000, 7_000, 15_000, 40_000, 100_000, 250_000, 480_000)
TEXTS = st.builds(repeated, st.sampled_from(("0", "b", "é", "9", "x", "[", "1,", "%f", "'")), st.sampled_from(SIZES))
PATTERNS = ("'%0_0_0%1'", f"'%{'0' * 95}1'", f"'%0{'_' * 95}1'", f"'*{'[0-9]' * 18}b'", f"'%é{'é' * 40}x'", "'%a%b%'")
LEAVES = st.one_of(
    st.sampled_from(COLUMNS),
    st.sampled_from(
        ("5", "0.5", "''", "'x'", "'$'", "'$[1]'", "'$.a[0]'", "NULL", "x'00'", "'%Y-%m-%d'", "'2026-01-31'")
    ),
    st.sampled_from(PATTERNS),
    st.builds("({} || a)".format, TEXTS),  # what is constant is computed once
    st.builds("('[' || {} || a || ']')".format, st.builds(repeated, st.just("1,"), st.sampled_from(SIZES))),
    TEXTS,
)


def combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Calls and operations on expressions."""
    operation = st.builds(lambda form, x, y: f"({form.format(x, y)})", st.sampled_from(OPERATIONS), parts, parts)
    return st.one_of(calls(parts), calls(parts), operation)


EXPRESSIONS = combined(LEAVES) | combined(combined(LEAVES))
STATEMENTS = (
    "SELECT {0} FROM t",
    "SELECT count(*) FROM t WHERE {0}",
    "SELECT count({0}), max({1}) FROM t GROUP BY a % 3",
    "SELECT {0} AS x FROM t ORDER BY x COLLATE NOCASE, {1} DESC",
    "SELECT DISTINCT {0}, {1} FROM t",
    "SELECT {0} OVER (ORDER BY a ROWS 50 PRECEDING) FROM t",
    "SELECT max(length({0})) OVER (PARTITION BY a % 2 ORDER BY {1}) FROM t",
    "SELECT count(*) FROM t, json_tree({0}) AS j WHERE j.path = {1}",
    "SELECT sum(length(j.json)), max(j.fullkey) FROM t, json_each({0}, '$.a') AS j",
    "SELECT count(*) FROM t l JOIN t r ON l.small = {0}",
    "SELECT count(*) FROM t WHERE small > {0}",
    "SELECT sum(y) FROM (SELECT x + x + x + x AS y FROM (SELECT w || w || w AS x FROM (SELECT {0} AS w FROM t)))",
    "WITH RECURSIVE n(a, small) AS (SELECT 1, '' UNION ALL SELECT a + 1, {0} FROM n) SELECT max(small) FROM n",
)


@st.composite
def statements(draw: st.DrawFn) -> str:
    """A statement on the database of `build`, or one that is wrong."""
    form = draw(st.sampled_from(STATEMENTS))
    first, second = draw(EXPRESSIONS), draw(EXPRESSIONS)
    if "SELECT {0} FROM" in form:
        first = ", ".join([first] * draw(st.sampled_from((1, 1, 2, 30, 200))))
    return form.format(first, second)


TRIED = (
    *("a", "small", "medium", "large", "folded", "doc", "7", "'2026-01-31'", f"'{'x' * 200}'", *PATTERNS, "'%row%'"),
    *("'%0_0_0_0_0_0_0_0_0_0_0_0_0_1'", "'%00000000000000000000000001'", "'%Y-%j-%f-%s'", "'+1 month'", "'%_'"),
)
TRIED_STATEMENTS = (
    "SELECT {0} FROM t",
    "SELECT * FROM t WHERE {0}",
    "SELECT count(*) FROM t WHERE {0} OR {1} OR {0} OR {1} OR {0}",
    "SELECT DISTINCT {0}, {1} FROM t ORDER BY {1} DESC, {0}",
    "SELECT count({0}), max({1}), min({1}) FROM t GROUP BY {0}",
    "SELECT count(*) FROM t l JOIN t r ON l.small LIKE r.small JOIN t x ON x.a = r.a",
    "SELECT sum(y) FROM (SELECT x + x + x + x AS y FROM (SELECT w + w AS x FROM (SELECT {0} AS w FROM t)))",
    "SELECT a FROM t WHERE small IN (SELECT {0} FROM t UNION SELECT {1} FROM t)",
    "SELECT a, (SELECT count(*) FROM t r WHERE r.small LIKE t.small) FROM t WHERE {0}",
)


@st.composite
def small_statements(draw: st.DrawFn, functions: frozenset[str]) -> str:
    """A statement that may be tried on the event loop, of these functions."""
    leaf = st.sampled_from(TRIED)
    names = sorted(functions - {"like"})

    def one_more(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        call = st.builds(
            "{}({})".format, st.sampled_from(names), st.lists(parts, min_size=1, max_size=3).map(", ".join)
        )
        like = st.builds(lambda x, y, z: f"({x} LIKE {y}{z})", parts, parts, st.sampled_from(("", " ESCAPE '!'")))
        return call | like | like

    expression = one_more(leaf) | one_more(one_more(leaf))
    form, first = draw(st.sampled_from(TRIED_STATEMENTS)), draw(expression)
    if form == TRIED_STATEMENTS[0]:
        first = ", ".join([first] * draw(st.sampled_from((1, 1, 5, 25))))
    return form.format(first, draw(expression))
