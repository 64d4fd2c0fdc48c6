"""What a right answer rests on: whether a query returns its question's gold rows, and still does on the test databases.

In `value` mode nothing but the answer is judged. A query that an agent ran before it answered tells more: where it
returns the gold rows on the question's database and other rows than the gold on a test database, the answer was lucky.

Guarantees:
- A query returns the gold rows when some of its columns do: an agent that asks for a name and a count, and answers with
  the name, has seen the answer. The same columns must do so on every test database.
- Rows are equal when they are under Spider's rule, or when they would be as a typed answer: ROUND(x, 2) answers as x.
- The gold itself holds. It is not run, and no test databases are made for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import combinations, islice

from env_server.dataset import Gold, Question, Row
from env_server.errors import SQLError
from env_server.judging.answers import format_answer
from env_server.judging.verdict import judge_rows, judge_value
from env_server.settings import SandboxSettings
from env_server.sql.pool import Databases
from env_server.test_suites.store import Suites
from env_server.test_suites.suite import Strictness, SuiteDatabase

MAX_CHOICES = 100
"""Choices of columns that are tried; a result of 14 columns has 91 pairs."""

Columns = tuple[int, ...]


class Standing(StrEnum):
    """What a query is to a question, from the least to the most."""

    OTHER_ROWS = "other_rows"
    """It fails, or returns other rows than the gold."""
    LUCKY = "lucky"
    """It returns the gold rows, and other rows than the gold on a test database."""
    UNTESTED = "untested"
    """It returns the gold rows, and the question has no test databases."""
    HOLDS = "holds"
    """It returns the gold rows, and the gold's on every test database."""


class Evidence:
    """Tells what queries are to questions."""

    def __init__(self, databases: Databases, suites: Suites, settings: SandboxSettings) -> None:
        self._databases = databases
        self._suites = suites
        self._settings = settings

    def standing(self, question: Question, sql: str) -> Standing:
        """Return what a query is to a question. Raises DataError when a database cannot be read."""
        if _bare(sql) == _bare(question.gold_sql):
            return Standing.HOLDS
        try:
            result = self._databases.query(question.db_id, sql, len(question.gold.rows) + 1)
        except SQLError:
            return Standing.OTHER_ROWS
        choices = [c for c in _choices(result.rows, question.gold) if _agree(_chosen(result.rows, c), question.gold)]
        if not choices:
            return Standing.OTHER_ROWS
        databases = self._suites.of(question).databases
        if not databases:
            return Standing.UNTESTED
        for database in databases:
            rows = database.rows_of(sql, self._settings)
            choices = [] if rows is None else [c for c in choices if _holds(database, _chosen(rows, c))]
            if not choices:
                return Standing.LUCKY
        return Standing.HOLDS


def _bare(sql: str) -> str:
    return sql.strip("; \t\r\n")


def _choices(rows: Sequence[Row], gold: Gold) -> list[Columns]:
    """Return the choices of as many columns as the gold has; their order is the judge's to find."""
    if len(rows) != len(gold.rows):
        return []
    return list(islice(combinations(range(len(rows[0])), gold.width), MAX_CHOICES))


def _chosen(rows: Sequence[Row], columns: Columns) -> tuple[Row, ...]:
    return tuple(tuple(row[i] for i in columns) for row in rows)


def _holds(database: SuiteDatabase, rows: Sequence[Row]) -> bool:
    return database.accepts(rows) or (database.strictness is not Strictness.SHAPE and _agree(rows, database.gold))


def _agree(rows: Sequence[Row], gold: Gold) -> bool:
    return judge_rows(rows, gold).correct or judge_value(format_answer(rows), gold).correct
