"""What a step needs from outside, at most once: a query run, or a verdict reached.

`Episodes.plan` names a job; someone runs it, in this thread or in another process; `Episodes.apply` takes its outcome.
A job holds all that whoever runs it has to know. Equal jobs on the same data have equal outcomes, but for those that a
clock or a lost process decided.
"""

from __future__ import annotations

from typing import NamedTuple

from env_server.dataset import Question


class QueryJob(NamedTuple):
    """Run one statement and return at most `max_rows` of its rows."""

    db_id: str
    sql: str
    max_rows: int


class JudgeJob(NamedTuple):
    """Judge the text of an ANSWER that carries a query."""

    question: Question
    answer: str


Job = QueryJob | JudgeJob
