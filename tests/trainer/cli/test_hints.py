"""The hints of a game: what they tell, and what they keep for themselves."""

from __future__ import annotations

import pytest

from env_server.dataset import Gold, Hardness, Question, Row, Split
from trainer.cli.play import hints

TABLES = ("pets", "owners", "visits")


def question(sql: str, rows: tuple[Row, ...] = ((2,),), *, ordered: bool = False) -> Question:
    return Question("q", "How many?", "pets", sql, Hardness.EASY, Split.EVAL, Gold(rows, ordered))


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("SELECT name FROM pets", "It reads columns as they are."),
        ("SELECT COUNT(DISTINCT name) FROM pets", "It counts or shows equal rows once (DISTINCT) and uses COUNT."),
        (
            "SELECT name FROM pets JOIN owners USING (id) GROUP BY name HAVING SUM(x) > 1 ORDER BY AVG(x) LIMIT 1",
            "It joins tables, groups rows (GROUP BY), keeps the groups that meet a condition (HAVING), orders rows "
            "(ORDER BY), takes the first rows (LIMIT) and uses AVG and SUM.",
        ),
        ("SELECT a FROM pets UNION SELECT b FROM owners", "It combines queries (UNION, INTERSECT or EXCEPT)."),
        (
            "SELECT a FROM pets WHERE a IN (SELECT b FROM owners)",
            "It keeps the rows that meet a condition (WHERE) and has a query inside.",
        ),
    ],
)
def test_what_the_query_does(sql: str, told: str) -> None:
    assert hints(question(sql), TABLES)[1] == told


def test_each_tells_more() -> None:
    sql = "SELECT name, age FROM pets JOIN owners USING (id) ORDER BY age"
    first, _, last = hints(question(sql, (("Ann", 1), ("Bo", 2)), ordered=True), TABLES)
    assert first == "The query needs pets and owners, of 3 tables."
    assert last == "The answer has 2 rows and 2 columns, and their order counts."
    assert not any(value in hint for hint in (first, last) for value in ("Ann", "age", "SELECT"))


def test_a_query_that_sqlglot_does_not_read_has_fewer() -> None:
    assert len(hints(question("SELECT 'pets' IS DISTINCT FROM OF pets ((("), TABLES)) == 2
