"""The verdict on a submitted query: run on the question's database and on its test databases.

Guarantees:
- The gold is not run: its rows were read when the data set was loaded and when the test databases were made. So nothing
  that a prediction does can change what the gold returns, and the two never share a connection.
- A query that fails, is refused or needs too much work is wrong, on whichever database that happens.
- The same query gets the same verdict, in any order and on any server.

Test databases are tried after the database itself, and no further than the first that tells the query from the gold.
The two halves are separate, for a caller that runs the query on the database by other means.
"""

from __future__ import annotations

from typing import Protocol

from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.submissions import submitted_query
from env_server.judging.verdict import Judgement, judge_rows
from env_server.settings import JudgingSettings, SandboxSettings, SQLRule
from env_server.sql.pool import Databases, QueryJob, run_query
from env_server.sql.sandbox import QueryResult
from env_server.test_suites.store import Suites

BIRD_ROWS = 20_000
"""Rows of the largest result that is compared under BIRD's rule, which lets a query repeat rows."""


class QueryJudge(Protocol):
    """Judges submitted queries; what an environment in `sql` mode asks."""

    def judge(self, question: Question, answer: str) -> Judgement:
        """Judge the text of an ANSWER. Raises DataError when a database cannot be opened."""


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
