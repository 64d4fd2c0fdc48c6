"""The text-to-SQL prompt, and the query in whatever is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.chat.text_to_sql import query_in, schema_prompt


def test_the_prompt_is_the_schema_and_the_question_in_comments() -> None:
    statements = ["CREATE TABLE pets (name TEXT)", "CREATE VIEW cats AS SELECT * FROM pets;\n"]
    assert schema_prompt(statements, "How many?\nHint: count") == (
        "CREATE TABLE pets (name TEXT);\n\n"
        "CREATE VIEW cats AS SELECT * FROM pets;\n\n"
        "-- Using valid SQLite, answer the following question for the tables provided above.\n"
        "-- How many?\n"
        "-- Hint: count\n"
        "SELECT"
    )


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        ("  select name\nFROM pets;", "select name\nFROM pets"),
        ("SELECT ';' AS a; SELECT 2", "SELECT ';' AS a"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("Here you are:\n```sql\nSELECT 1\n\nFROM t\n```\nIt counts.\n```\nSELECT 2\n```", "SELECT 1\n\nFROM t"),
        ("```\nnothing\n```\n```SELECT 2```", "SELECT 2"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("```sql\n-- all of them\nSELECT 1 -- yes\n```", "SELECT 1 -- yes"),
        ("SELECT 1\n```\nand more", "SELECT 1"),
        ("SQL: SELECT 1", "SELECT 1"),
        ("The SQL query is: `SELECT 1`", "SELECT 1"),
        ("Use `SELECT a` or `SELECT b`.", "SELECT a"),
        ("To answer, use SELECT name FROM pets WHERE age > 3;", "SELECT name FROM pets WHERE age > 3"),
        ("To select the names, use\n\nSELECT name FROM pets\n\nThis gives them.", "SELECT name FROM pets"),
        ("WITH a AS (SELECT 1) SELECT * FROM a", "WITH a AS (SELECT 1) SELECT * FROM a"),
        ("WITH RECURSIVE n(i) AS (SELECT 1) SELECT i FROM n", "WITH RECURSIVE n(i) AS (SELECT 1) SELECT i FROM n"),
        ("With the tables above I would count.", None),
        ("I would select the pets.", None),
        ("The answer is 5.", None),
        ("", None),
        ("```", None),
        ("<think>SELECT 1 is wrong</think>SELECT 2", "SELECT 2"),
        ("<think>SELECT 1 is", None),
        ("SELECT 'a\n\nb' FROM t", "SELECT 'a\n\nb' FROM t"),
    ],
)
def test_the_query_is_found(text: str, query: str | None) -> None:
    assert query_in(text) == query


PIECES = st.sampled_from(
    ["```", "```sql\n", "SELECT ", "select", "WITH a AS (", ";", "\n\n", "'", '"', "`", "--", "SQL:"]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=20).map("".join))
def test_any_text_gives_one_statement_of_its_own_or_none(text: str) -> None:
    query = query_in(text)
    if query is not None:
        assert query in text
        assert query.upper().startswith(("SELECT", "WITH"))
        assert query == query.rstrip()
        assert query_in(query) is not None


@pytest.mark.parametrize("piece", ["SELECT ", "with a as ", "```", "a: ", "'", "\n\n", "WITH a (", "* ", "`"])
def test_long_replies_are_read(piece: str) -> None:
    """In linear time: this many of any of them would not end otherwise."""
    query = query_in(piece * 50_000)
    assert query is None or query in piece * 50_000
