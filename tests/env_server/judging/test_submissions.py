"""What is taken off a submitted query, what is rewritten in it, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from env_server.judging.submissions import runnable_query, submitted_query

QUERY = "SELECT name FROM pets WHERE age > 3"

PIECES = st.sampled_from(
    [
        *("```", "```sql\n", "```sql ", "```SELECT\n", "`", '"', "'", ";", " ", "\n", "\t", "\u2003", "[", "]", "--"),
        *("/*", "*/", "Answer:", "the answer is ", "SQL:", "query is:", "sql", "answer", "is", ":", "=", "> =", "! ="),
        *("< =", "YEAR(CURDATE())", "YEAR ( curdate( ) )", "YEAR", "(", ")", "SELECT", "1", "a", "name", "\ud800"),
    ]
)
TEXTS = st.text() | st.lists(PIECES, max_size=12).map("".join)


@pytest.mark.parametrize(
    "text",
    [
        QUERY,
        f" \n{QUERY}\t",
        f"{QUERY};",
        f"{QUERY} ; ;\n",
        f"`{QUERY}`",
        f"```{QUERY}```",
        f"```\n{QUERY}\n```",
        f"```sql\n{QUERY}\n```",
        f"```SQLite  \n{QUERY};\n```;",
        f"```sql {QUERY}```",
        f"```text\n{QUERY}\n```",
        f"```sql\n{QUERY}",
        f"````sql\n{QUERY}\n````",
        f"sql\n{QUERY}",
        f'"{QUERY}"',
        f"'{QUERY};'",
        f"Answer: {QUERY}",
        f"answer = {QUERY}",
        f"The answer is {QUERY}",
        f"The final answer is: {QUERY}",
        f"SQL: {QUERY}",
        f"SQL query: {QUERY}",
        f"The SQL query is:\n{QUERY}",
        f"Query:{QUERY}",
        f"Answer:\n```sql\n{QUERY};\n```",
        f"```\nSQL: '{QUERY}'\n```",
    ],
)
def test_wrappers_are_taken_off(text: str) -> None:
    assert submitted_query(text) == QUERY


@pytest.mark.parametrize(
    "query",
    [
        "SELECT 'a' || 'b'",
        'SELECT "name" FROM `pets`',
        "SELECT [a] FROM `t```",
        "SELECT ';'",
        "SELECT 'Answer: ```x```'",
        "SELECT 1.",
        "SELECT 'a > = b', \"x ! = y\", `c < = d`, [e > = f]",
        "SELECT 1 -- is > = two\n, 2 /* YEAR(CURDATE()) */",
        "SELECT 'YEAR(CURDATE())'",
        "SELECT YEAR(CURDATE(1)), MYYEAR(CURDATE())",
        "SELECT a >= 1, b <= 2, c != 3, d <> 4, e >  = 5",
        "WITH answer AS (SELECT 1) SELECT * FROM answer",
        "SELECT 'never closed > = ",
        "SELECT 1 /* never closed > =",
        "SELECT 1; SELECT 2",
        "VALUES (1)",
    ],
)
def test_what_is_a_query_stays_as_it_is(query: str) -> None:
    assert submitted_query(query) == query.strip()
    assert runnable_query(query) == query


@pytest.mark.parametrize(
    "text",
    [
        f"Here it is: {QUERY}",
        f"I think\n```sql\n{QUERY}\n```",
        f"```sql\n{QUERY}\n```\nbecause it is right",
        f"\"{QUERY}'",
        f"{QUERY}\n```",
        f"{QUERY}.",
    ],
)
def test_text_around_the_query_is_not_taken_off(text: str) -> None:
    assert submitted_query(text) != QUERY
    assert QUERY in submitted_query(text)


@pytest.mark.parametrize(
    ("query", "runnable"),
    [
        ("SELECT a FROM t WHERE a > = 1", "SELECT a FROM t WHERE a >= 1"),
        ("SELECT a FROM t WHERE a < = 1 AND b ! = 'x ! = y'", "SELECT a FROM t WHERE a <= 1 AND b != 'x ! = y'"),
        ("SELECT 'it''s > = ', a > = 1", "SELECT 'it''s > = ', a >= 1"),
        ("SELECT YEAR(CURDATE()) - born FROM t", "SELECT 2020 - born FROM t"),
        ("SELECT year ( CurDate (\n) ) AS now", "SELECT 2020 AS now"),
        ("SELECT a FROM t WHERE b = YEAR(CURDATE()) AND c = 1", "SELECT a FROM t WHERE b = 2020 AND c = 1"),
    ],
)
def test_what_the_evaluator_rewrites(query: str, runnable: str) -> None:
    assert runnable_query(query) == runnable
    assert submitted_query(f"```sql\n{query};\n```") == runnable


@pytest.mark.parametrize("text", ["", "   ", ";", "```", "`````", "''", "'", "Answer:", "```sql", "SQL: ``````"])
def test_wrappers_around_nothing(text: str) -> None:
    assert submitted_query(text) == ("'" if text == "'" else "")


@given(TEXTS)
@example("```SELECT\n1```")
@example("'```sql\n`SQL: 1` ;```'")
def test_reading_twice_is_reading_once(text: str) -> None:
    once = submitted_query(text)
    assert submitted_query(once) == once
    assert runnable_query(once) == once


@given(
    st.lists(
        st.sampled_from(["a", "'x;'", '"y z"', "`q`", "[r s]", ">=", "!=", ",", "(", ")", " ", "\n", "'it''s'", "1.5"])
    )
)
def test_other_queries_are_unchanged(pieces: list[str]) -> None:
    query = " ".join(["SELECT", *pieces, "FROM t"])
    assert submitted_query(query) == query


@given(st.lists(st.sampled_from(["```sql\n{}\n```", "'{}'", "`{}`", '"{}"', "Answer: {}", " {}; ", "SQL: {}"])))
def test_wrappers_nest(wrappers: list[str]) -> None:
    text = QUERY
    for wrapper in wrappers:
        text = wrapper.format(text)
    assert submitted_query(text) == QUERY


@pytest.mark.parametrize("piece", ["`", "'", "```sql\n", "Answer: ", "> =", " ", ";", "YEAR ( ", "/*", "[", "--\n"])
def test_long_texts_are_read_in_one_go(piece: str) -> None:
    """Linear: a quadratic reading of half a million characters would not end."""
    submitted_query(piece * (500_000 // len(piece)))
    submitted_query(QUERY + piece * (500_000 // len(piece)) + "x")


def test_spider_golds_are_unchanged(spider_dir: Path) -> None:
    for entry in json.loads((spider_dir / "train_spider.json").read_text(encoding="utf-8")):
        assert submitted_query(entry["query"]) == entry["query"].strip().rstrip("; ")
