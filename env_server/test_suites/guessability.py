"""How easily an answer is hit by luck: queries that ask something else and give the same answer on its database.

They are mutants of the gold (`mutants`): a condition or the order dropped, another column, table, constant or limit. A
mutant counts as different when one of the question's test databases tells it from the gold, and as lucky when its rows
on the database itself are the gold's all the same. In `value` mode nothing but the answer is judged, so an agent that
asks the wrong question of such a database is rewarded like one that understands it.
"""

from __future__ import annotations

from dataclasses import dataclass

from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.sql.pool import Databases
from env_server.test_suites.constants import parse
from env_server.test_suites.mutants import mutants
from env_server.test_suites.suite import Suite

GUESSABLE_SHARE = 1 / 2
"""A question is guessable when this share of the queries that ask something else are lucky."""


@dataclass(frozen=True, slots=True)
class Guessability:
    """`different` mutants differ from the gold on a test database; `lucky` ones of them agree with it nevertheless."""

    different: int
    lucky: int

    def __str__(self) -> str:
        return f"{self.lucky} of {self.different} queries that ask something else"

    @property
    def lucky_share(self) -> float:
        """The lucky ones among those that differ; 0 where none does."""
        return self.lucky / self.different if self.different else 0.0

    @property
    def guessable(self) -> bool:
        """Whether so many of them are lucky that the answer says little about the question."""
        return self.lucky_share >= GUESSABLE_SHARE


def measure_guessability(question: Question, suite: Suite, databases: Databases) -> Guessability:
    """Count the queries beside a question's gold. Raises DataError when its database cannot be read."""
    schema = databases.schema(question.db_id)
    tree = parse(question.gold_sql, schema)
    queries = mutants(tree, schema) if tree is not None else ()
    different = {sql for database in suite.databases for sql in database.rejected(queries)}
    return Guessability(len(different), sum(_agrees(sql, question, databases) for sql in different))


def _agrees(sql: str, question: Question, databases: Databases) -> bool:
    try:
        result = databases.query(question.db_id, sql, len(question.gold.rows) + 1)
    except SQLError:
        return False
    return judge_rows(result.rows, question.gold).correct
