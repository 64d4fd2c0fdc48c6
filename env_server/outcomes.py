"""What an action gave, in the words that the agent reads: a result, or one line of error. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from env_server.errors import SQLError
from env_server.judging.verdict import Judgement
from env_server.settings import DisplaySettings
from env_server.sql.display import format_result
from env_server.sql.sandbox import QueryResult

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


Outcome = ActionOutcome | Judgement
"""Of a QueryJob, and of a JudgeJob."""


def query_outcome(result: QueryResult | SQLError, display: DisplaySettings) -> ActionOutcome:
    """Return what a statement gave, as the agent reads it."""
    if isinstance(result, SQLError):
        return ActionOutcome(error=sql_error_text(result))
    return ActionOutcome(result=format_result(result, display), rows=result)


def sql_error_text(error: SQLError) -> str:
    """Return the error as the agent reads it: its class, then the database's words, unless they say it."""
    return one_line(f"{_CLASSES.get(error.kind, 'error')}: {error.message}")


def one_line(text: str) -> str:
    """Return the text in one bounded line that can be encoded as UTF-8."""
    line = " ".join(text.encode(errors="replace").decode().split())
    return line if len(line) <= MAX_ERROR_CHARS else line[: MAX_ERROR_CHARS - 1] + "…"
