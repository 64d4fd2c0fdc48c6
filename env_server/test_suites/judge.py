"""The verdict on a query: run on the question's database and on its test databases.

Guarantees:
- The gold is not run: its rows were read when the data set was loaded and when the test databases were made. So nothing
  that a prediction does can change what the gold returns, and the two never share a connection.
- A query that fails, is refused or needs too much work is wrong, on whichever database that happens.
- The same query gets the same verdict, in any order and on any server.

Test databases are tried after the database itself, and no further than the first that tells the query from the gold.
The two halves are separate, for a caller that runs the query on the database by other means.

In `value` mode nothing but the answer is judged. A query that an agent ran before it answered tells more
(`support_of`): where it returns the gold rows on the question's database and other rows than the gold on a test
database, the right answer was a false positive. It returns the gold rows when some of its columns do, the same ones on
every test database: an agent that asks for a name and a count, and answers with the name, has seen the answer. Rows are
equal when they are under Spider's rule, or when they would be as a typed answer: ROUND(x, 2) answers as x.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import combinations, islice

from env_server.dataset import Gold, Question, Row
from env_server.errors import SQLError
from env_server.judging.answers import format_answer
from env_server.judging.submissions import submitted_query
from env_server.judging.verdict import Judgement, judge_rows, judge_value
from env_server.settings import JudgingSettings, SandboxSettings, SQLRule
from env_server.sql.pool import Databases, QueryJob, run_query
from env_server.sql.sandbox import QueryResult
from env_server.test_suites.store import Suites
from env_server.test_suites.suite import Strictness, SuiteDatabase

MAX_CHOICES = 100
"""Choices of columns that are tried; a result of 14 columns has 91 pairs."""
BIRD_ROWS = 20_000
"""Rows of the largest result that is compared under BIRD's rule, which lets a query repeat rows."""


class SQLJudge:
    """Judges submitted queries. Without `suites`, on the question's database alone."""

    def __init__(
        self,
        databases: Databases,
        suites: Suites | None = None,
        settings: JudgingSettings | None = None,
        sandbox: SandboxSettings | None = None,
    ) -> None:
        self._databases = databases
        self._suites = suites
        self._rule = (settings or JudgingSettings()).rule
        self._sandbox = sandbox or SandboxSettings()

    def judge(self, question: Question, answer: str) -> Judgement:
        """Judge the text of an ANSWER. Raises DataError when a database cannot be opened."""
        judgement = self.on_database(question, run_query(self._databases, self.query(question, answer)))
        return self.on_test_databases(question, answer) if judgement.correct else judgement

    def query(self, question: Question, answer: str) -> QueryJob:
        """Return what is to be run on the question's database."""
        return QueryJob(question.db_id, submitted_query(answer), self._row_limit(question))

    def on_database(self, question: Question, result: QueryResult | SQLError) -> Judgement:
        """Judge what `query` gave on the question's database. Pure."""
        if isinstance(result, SQLError):
            return Judgement(False, f"the query fails: {result}")
        if result.more:
            return Judgement(False, f"more than {self._row_limit(question)} rows")
        return judge_rows(result.rows, question.gold, self._rule)

    def on_test_databases(self, question: Question, answer: str) -> Judgement:
        """Judge an ANSWER that is right on the question's database."""
        databases = self._suites.of(question).databases if self._suites is not None else ()
        sql = submitted_query(answer)
        for number, database in enumerate(databases, 1):
            rows = database.rows_of(sql, self._sandbox)
            if rows is None or not database.accepts(rows, self._rule):
                return Judgement(False, f"right on the database, wrong on test database {number}")
        return Judgement(True, "equal")

    def _row_limit(self, question: Question) -> int:
        # Under Spider's rule, one more row than the gold has makes a query wrong already.
        return BIRD_ROWS if self._rule is SQLRule.BIRD else len(question.gold.rows) + 1


class Support(StrEnum):
    """How far a query supports the answer of its question, from the least to the most."""

    OTHER_ROWS = "other_rows"
    """It fails, or returns other rows than the gold."""
    FALSE_POSITIVE = "false_positive"
    """It returns the gold rows, and other rows than the gold on a test database."""
    UNTESTED = "untested"
    """It returns the gold rows, and the question has no test databases."""
    VERIFIED = "verified"
    """It returns the gold rows, and the gold's on every test database; or it is the gold, which is not run."""


def support_of(
    question: Question, sql: str, databases: Databases, suites: Suites, settings: SandboxSettings
) -> Support:
    """Return how far a query supports the answer. Raises DataError when a database cannot be read."""
    if sql.strip("; \t\r\n") == question.gold_sql.strip("; \t\r\n"):
        return Support.VERIFIED
    result = run_query(databases, QueryJob(question.db_id, sql, len(question.gold.rows) + 1))
    choices = [] if isinstance(result, SQLError) else _choices(result.rows, question.gold)
    if not choices:
        return Support.OTHER_ROWS
    test_databases = suites.of(question).databases
    for database in test_databases:
        rows = database.rows_of(sql, settings)
        choices = [] if rows is None else [each for each in choices if _holds(database, _columns(rows, each))]
        if not choices:
            return Support.FALSE_POSITIVE
    return Support.VERIFIED if test_databases else Support.UNTESTED


def _choices(rows: Sequence[Row], gold: Gold) -> list[Sequence[int]]:
    """Return the choices of as many columns as the gold has that give its rows; their order is the judge's to find."""
    if len(rows) != len(gold.rows):
        return []
    choices = islice(combinations(range(len(rows[0])), gold.width), MAX_CHOICES)
    return [each for each in choices if _agree(_columns(rows, each), gold)]


def _columns(rows: Sequence[Row], chosen: Sequence[int]) -> tuple[Row, ...]:
    return tuple(tuple(row[i] for i in chosen) for row in rows)


def _holds(database: SuiteDatabase, rows: Sequence[Row]) -> bool:
    return database.accepts(rows) or (database.strictness is not Strictness.SHAPE and _agree(rows, database.gold))


def _agree(rows: Sequence[Row], gold: Gold) -> bool:
    return judge_rows(rows, gold).correct or judge_value(format_answer(rows), gold).correct
