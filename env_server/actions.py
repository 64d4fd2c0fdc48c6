"""The actions of an agent, in one table: what each takes, how it is planned, and how it is explained. Pure.

`ACTIONS` is read by the episode, the reward, the parser of what a policy writes, the system prompt, the tools, the
terminal and the playground, so that another action is one more row (docs/extending.md).

An action's `plan` returns its outcome, or the one job whose outcome it is: a query to run, a verdict to reach. Someone
runs the job, in this thread or in another process; equal jobs on the same data have equal outcomes, but for those that
a clock or a lost process decided. What an agent does wrong is an outcome with `error`, in one line.

A query process imports this module, so it stays without pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from env_server.dataset import Question
from env_server.errors import SQLError, UnknownTableError
from env_server.judging.verdict import Judgement
from env_server.settings import MAX_ARGUMENT_CHARS, DisplaySettings
from env_server.sql.display import describe_table, format_result
from env_server.sql.pool import QueryJob
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Column, Schema, quote_identifier

MAX_ERROR_CHARS = 600
"""Characters of an error."""
HISTORY_CHARS = 200
"""Longest entry of `action_history`: a reminder for the agent, not a transcript."""
MAX_ROW_BYTES = 900_000
"""Of a row that SAMPLE reads: the sandbox refuses larger ones."""
_ERROR_CLASSES = {
    "syntax": "syntax error",
    "missing": "not found",
    "denied": "not allowed",
    "budget": "too slow",
    "size": "too large",
    "runtime": "error",
}


class JudgeJob(NamedTuple):
    """Judge the text of an ANSWER that carries a query."""

    question: Question
    answer: str


Job = QueryJob | JudgeJob


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """What an action gave: at most one of `result` and `error` is not empty. `rows`: SAMPLE's and QUERY's."""

    result: str = ""
    error: str = ""
    rows: QueryResult | None = None


Outcome = ActionOutcome | Judgement
"""Of a QueryJob, and of a JudgeJob."""


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What an episode offers to the planning of its actions; `judge` plans or reaches the verdict on an answer."""

    db_id: str
    schema: Schema
    display: DisplaySettings
    judge: Callable[[str], Job | Outcome]


class Argument(NamedTuple):
    """What an action takes. `wanted` is what an error says is missing, `meaning` describes a tool's parameter."""

    name: str
    wanted: str
    meaning: str


TABLE = Argument("table", "a table name", "The table's name.")
SQL = Argument("sql", "a SQL query", "The query, in SQLite's dialect.")
ANSWER = Argument(
    "value",
    "the answer",
    "The answer: one value as it is, a list separated by commas, or rows as a | b, one row per line; [] when nothing "
    "fits.",
)
ANSWER_SQL = ANSWER._replace(name="sql", meaning="The query that answers the question.")
"""What ANSWER takes in `sql` mode."""


@dataclass(frozen=True, slots=True)
class Action:
    """One row. `plan` may raise UnknownTableError.

    `help` and `example` go into the system prompt; `tool` describes the tool, where that is not `help`; `shows` is for
    people.
    """

    argument: Argument
    plan: Callable[[ActionContext, str], Job | Outcome]
    help: str
    example: str
    shows: str
    tool: str = ""

    @property
    def description(self) -> str:
        """What a tool for it does."""
        return self.tool or f"{self.help[0].upper()}{self.help[1:]}."

    def parameter(self, mode: str) -> Argument:
        """Return what a tool for it takes where answers are given in this mode."""
        return ANSWER_SQL if self.argument is ANSWER and mode == "sql" else self.argument


def _describe(context: ActionContext, table: str) -> ActionOutcome:
    return ActionOutcome(result=describe_table(context.schema.find(table)))


def _sample(context: ActionContext, name: str) -> QueryJob:
    table = context.schema.find(name)
    source, limit = f"main.{quote_identifier(table.name)}", context.display.sample_rows
    if table.is_view or table.is_virtual:
        return QueryJob(context.db_id, f"SELECT * FROM {source} LIMIT {limit}", limit)
    # The first rows as stored: an index that covers the table must not decide the order, nor a huge cell hide them.
    first = f"FROM {source} NOT INDEXED LIMIT {limit}"
    cells = ", ".join(_bounded(column, MAX_ROW_BYTES // len(table.columns)) for column in table.columns) or "*"
    return QueryJob(context.db_id, f"SELECT * {first}", limit, f"SELECT {cells} {first}")


def _bounded(column: Column, most: int) -> str:
    """Return the SQL of a column's cell: of one with more than `most` bytes its size, which takes no reading."""
    name = quote_identifier(column.name)
    size = f"octet_length({name})"
    return f"CASE WHEN {size} > {most} THEN '(' || {size} || ' bytes)' ELSE {name} END AS {name}"


ACTIONS: Mapping[str, Action] = {
    "DESCRIBE": Action(
        TABLE, _describe, "show a table's columns", "employees", shows="columns, types, keys and row count"
    ),
    "SAMPLE": Action(
        TABLE, _sample, "show a few rows", "employees", shows="a few rows", tool="Show a few rows of a table."
    ),
    "QUERY": Action(
        SQL,
        lambda context, sql: QueryJob(context.db_id, sql, context.display.max_rows),
        "run one SELECT",
        "SELECT COUNT(*) FROM employees WHERE age > 30",
        shows="one read-only statement",
        tool="Run one SELECT and see its result.",
    ),
    "ANSWER": Action(
        ANSWER,
        lambda context, answer: context.judge(answer),
        "give the answer and finish",
        "42",
        shows="ends it: a value; a, b, c; or rows as a | b, one per line",
    ),
}


def plan_action(kind: str, argument: str, context: ActionContext) -> Job | Outcome:
    """Return what an action gives, or the job that tells; `kind` in upper case, `argument` without outer blanks."""
    if len(argument) > MAX_ARGUMENT_CHARS:
        size = f"{len(argument):,} characters, at most {MAX_ARGUMENT_CHARS:,}"
        return ActionOutcome(error=f"too large: the argument is too long ({size})")
    action = ACTIONS.get(kind)
    if action is None:
        return ActionOutcome(error=one_line(f"unknown action {shorten(kind)!r}; use one of {', '.join(ACTIONS)}"))
    if not argument:
        return ActionOutcome(error=f"{kind} needs {action.argument.wanted}")
    try:
        return action.plan(context, argument)
    except UnknownTableError as error:
        return ActionOutcome(error=one_line(str(error)))


def query_outcome(result: QueryResult | SQLError, display: DisplaySettings) -> ActionOutcome:
    """Return what a statement gave, as the agent reads it: rows, or the error's class and the database's words."""
    if isinstance(result, SQLError):
        return ActionOutcome(error=one_line(f"{_ERROR_CLASSES.get(result.kind, 'error')}: {result.message}"))
    return ActionOutcome(result=format_result(result, display), rows=result)


def one_line(text: str) -> str:
    """Return the text in one bounded line that can be encoded as UTF-8."""
    return shorten(" ".join(text.encode(errors="replace").decode().split()), MAX_ERROR_CHARS)


def shorten(text: str, limit: int = HISTORY_CHARS) -> str:
    """Return the text, cut to `limit` characters and marked where it is longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
