"""The three exploring actions on one database: DESCRIBE, SAMPLE and QUERY.

What an agent does wrong comes back as an outcome with `error`, one line long; nothing that an argument can hold
raises. The same argument on the same database gives the same outcome. Only a database file that cannot be read
raises, DataError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from env_server.errors import SQLError, UnknownTableError
from env_server.settings import DisplaySettings
from env_server.sql.display import describe_table, format_result
from env_server.sql.pool import Databases
from env_server.sql.sandbox import QueryResult
from env_server.sql.schema import Table, quote_identifier

MAX_ERROR_CHARS = 600
"""Characters of an error."""

_CLASSES = {
    "syntax": "syntax error",
    "missing": "not found",
    "denied": "not allowed",
    "budget": "too slow",
    "size": "too large",
    "runtime": "error",
}


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """What an action gave: at most one of `result` and `error` is not empty. `rows`: SAMPLE's and QUERY's."""

    result: str = ""
    error: str = ""
    rows: QueryResult | None = None

    @property
    def ok(self) -> bool:
        """Whether the action succeeded."""
        return not self.error


class Outcomes(Protocol):
    """Remembers what statements gave, under the display settings of all who use it."""

    def get(self, db_id: str, sql: str, max_rows: int) -> ActionOutcome | None:
        """Return what a statement gave, if it is remembered."""

    def put(self, db_id: str, sql: str, max_rows: int, outcome: ActionOutcome) -> None:
        """Remember what a statement gave; it gives the same every time."""


class Explorer:
    """Carries out the exploring actions of one episode."""

    def __init__(
        self, databases: Databases, db_id: str, display: DisplaySettings, outcomes: Outcomes | None = None
    ) -> None:
        self._databases = databases
        self._outcomes = outcomes
        self._db_id = db_id
        self._display = display

    def describe(self, argument: str) -> ActionOutcome:
        """Show a table's columns, types, keys and row count."""
        table = self._find(argument, "DESCRIBE")
        return table if isinstance(table, ActionOutcome) else ActionOutcome(result=describe_table(table))

    def sample(self, argument: str) -> ActionOutcome:
        """Show a table's first rows, in the order in which the table stores them."""
        table = self._find(argument, "SAMPLE")
        if isinstance(table, ActionOutcome):
            return table
        # An index that covers the table must not decide the order.
        order = "" if table.is_view or table.is_virtual else " NOT INDEXED"
        limit = self._display.sample_rows
        return self._run(f"SELECT * FROM main.{quote_identifier(table.name)}{order} LIMIT {limit}", limit)

    def query(self, argument: str) -> ActionOutcome:
        """Run one read-only statement and show its rows."""
        if not argument.strip():
            return ActionOutcome(error="QUERY needs a SQL query")
        return self._run(argument, self._display.max_rows)

    def _find(self, argument: str, action: str) -> Table | ActionOutcome:
        if not argument.strip():
            return ActionOutcome(error=f"{action} needs a table name")
        try:
            return self._databases.schema(self._db_id).find(argument)
        except UnknownTableError as error:
            return ActionOutcome(error=one_line(str(error)))

    def _run(self, sql: str, max_rows: int) -> ActionOutcome:
        if self._outcomes is None:
            return self._asked(sql, max_rows)[0]
        outcome = self._outcomes.get(self._db_id, sql, max_rows)
        if outcome is None:
            outcome, repeatable = self._asked(sql, max_rows)
            if repeatable:
                self._outcomes.put(self._db_id, sql, max_rows, outcome)
        return outcome

    def _asked(self, sql: str, max_rows: int) -> tuple[ActionOutcome, bool]:
        """Run a statement; tell whether it gives the same every time."""
        try:
            rows = self._databases.query(self._db_id, sql, max_rows)
        except SQLError as error:
            return ActionOutcome(error=sql_error_text(error)), error.deterministic
        return ActionOutcome(result=format_result(rows, self._display), rows=rows), True


def sql_error_text(error: SQLError) -> str:
    """Return the error as the agent reads it: its class, then the database's words, unless they say it."""
    return one_line(f"{_CLASSES.get(error.kind, 'error')}: {error.message}")


def one_line(text: str) -> str:
    """Return the text in one bounded line that can be encoded as UTF-8."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 1] + "…"
