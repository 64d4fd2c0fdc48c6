"""Hints for a person at play, made from the question's gold: each tells more than the one before. Pure.

The gold query itself is not among them; it is shown when the episode is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from env_server.dataset import Gold, Question
from env_server.sql.parsing import parse_query
from trainer.rollout.players import mentioned_tables

_CLAUSES: tuple[tuple[type[exp.Expression], str], ...] = (
    (exp.Join, "joins tables"),
    (exp.Where, "keeps the rows that meet a condition (WHERE)"),
    (exp.Group, "groups rows (GROUP BY)"),
    (exp.Having, "keeps the groups that meet a condition (HAVING)"),
    (exp.Distinct, "counts or shows equal rows once (DISTINCT)"),
    (exp.Order, "orders rows (ORDER BY)"),
    (exp.Limit, "takes the first rows (LIMIT)"),
    (exp.SetOperation, "combines queries (UNION, INTERSECT or EXCEPT)"),
)


def hints(question: Question, tables: Sequence[str]) -> tuple[str, ...]:
    """Return the hints for a question about a database with these tables."""
    if not question.gold_sql:
        return (_shape(question.gold),)
    used = mentioned_tables(question.gold_sql, tables)
    named = f"The query needs {_listed(used)}, of {_counted(len(tables), 'table')}."
    return (named, *_steps(question.gold_sql), _shape(question.gold))


def _steps(sql: str) -> tuple[str, ...]:
    """What the query does; nothing is said of one that sqlglot does not read."""
    query = parse_query(sql)
    if query is None:
        return ()
    steps = [words for kind, words in _CLAUSES if query.find(kind) is not None]
    if len(list(query.find_all(exp.Select))) > 1 + len(list(query.find_all(exp.SetOperation))):
        steps.append("has a query inside")
    functions = sorted({node.sql_name() for node in query.find_all(exp.AggFunc)})
    if functions:
        steps.append(f"uses {_listed(functions)}")
    return (f"It {_listed(steps)}." if steps else "It reads columns as they are.",)


def _shape(gold: Gold) -> str:
    rows, columns = _counted(len(gold.rows), "row"), _counted(gold.width, "column")
    return f"The answer has {rows} and {columns}" + (", and their order counts." if gold.ordered else ".")


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _listed(names: Sequence[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
