"""Tries the gold queries of usable questions on their databases: are they left to chance, lucky, guessable?

Nothing is decided here; `env_server.data.doctor.questions` does. A trial that needs too much work tells nothing.
"""

from __future__ import annotations

from env_server.data.doctor.questions import Trial
from env_server.dataset import Question
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.sql.pool import Databases
from env_server.test_suites.constants import parse
from env_server.test_suites.guessability import measure_guessability
from env_server.test_suites.mutants import read_clauses
from env_server.test_suites.store import Suites
from env_server.test_suites.suite import reordered


def try_gold(question: Question, databases: Databases, suites: Suites | None) -> Trial:
    """Try a gold query. `suites`: None where no variants are to be made. Raises DataError."""
    if not question.gold_sql:
        return Trial(False, ())
    schema = databases.schema(question.db_id)
    tree = parse(question.gold_sql, schema)
    other_order = tree is not None and any(
        _answers(sql, question, databases) is False for sql in reordered(tree, schema)
    )
    clauses = () if tree is None else read_clauses(tree)
    idle = tuple(
        clause.text for clause in clauses if any(_answers(probe, question, databases) for probe in clause.probes)
    )
    if suites is None:
        return Trial(other_order, idle)
    suite = suites.of(question)
    return Trial(other_order, idle, measure_guessability(question, suite, databases), suite.problem)


def _answers(sql: str, question: Question, databases: Databases) -> bool | None:
    """Tell whether a query gives the gold's answer; None where it cannot be run."""
    try:
        result = databases.query(question.db_id, sql, len(question.gold.rows) + 1)
    except SQLError:
        return None
    return not result.more and judge_rows(result.rows, question.gold).correct
