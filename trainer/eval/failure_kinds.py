"""Why an episode did not succeed, derived from its record. Pure.

Guarantees: every episode that was judged and is not right has one kind, the first of `FailureKind` that applies; one
that is right, or that errored, has none. The same record has the same kind. Only a record's turns decide it: no
database, no gold.

A query is a QUERY that the policy wrote as an action; a text that was none and ran as a QUERY counts as one only where
it succeeded. The gold's rows were seen where the rewards for progress have reached their full sum, as they do only for
as many rows as the gold's and with the same cells, in whatever order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from env_server.judging.submissions import submitted_query
from env_server.settings import RewardSettings
from env_server.types import ActionType
from trainer.rollout.episodes import EpisodeRecord, Outcome

Turn = Mapping[str, Any]
"""A turn as a record has it."""

_EMPTY = frozenset(("", "[]", "none", "null", "nothing", "unknown", "n/a", "i don't know"))
"""Answers that name no value."""
_ROUNDING = 1e-6


class FailureKind(StrEnum):
    """Why an episode failed, in the order in which the kinds are tried. `meaning` says each in words."""

    UNPARSEABLE = "unparseable"
    OUT_OF_TOKENS = "out_of_tokens"
    NO_SUCH_COLUMN = "no_such_column"
    NO_SUCH_TABLE = "no_such_table"
    SYNTAX_ERROR = "syntax_error"
    OTHER_ERROR = "other_error"
    OUT_OF_STEPS = "out_of_steps"
    RIGHT_ROWS = "right_rows"
    GAVE_UP = "gave_up"
    NEVER_QUERIED = "never_queried"
    WRONG_QUERY = "wrong_query"

    @property
    def meaning(self) -> str:
        """The kind in words, as tables show it."""
        return _MEANINGS[self]


_MEANINGS = {
    FailureKind.UNPARSEABLE: "most turns were no action, or no query",
    FailureKind.OUT_OF_TOKENS: "no answer: out of tokens",
    FailureKind.OUT_OF_STEPS: "no answer: out of steps",
    FailureKind.NO_SUCH_COLUMN: "every query failed: no such column",
    FailureKind.NO_SUCH_TABLE: "every query failed: no such table",
    FailureKind.SYNTAX_ERROR: "every query failed: syntax",
    FailureKind.OTHER_ERROR: "every query failed: another error",
    FailureKind.RIGHT_ROWS: "saw the right rows, answered wrongly",
    FailureKind.GAVE_UP: "gave up: an empty answer, or one on no evidence",
    FailureKind.NEVER_QUERIED: "never queried",
    FailureKind.WRONG_QUERY: "the wrong query",
}
_ERRORS = (
    ("no such column", FailureKind.NO_SUCH_COLUMN),
    ("no such table", FailureKind.NO_SUCH_TABLE),
    ("syntax error", FailureKind.SYNTAX_ERROR),
)


def failure_kind(record: EpisodeRecord) -> FailureKind | None:
    """Return why an episode failed; None for one that is right, not judged, or errored."""
    if record.outcome in (Outcome.CORRECT, Outcome.UNJUDGED, Outcome.FAILED):
        return None
    if record.steps and record.parse_rate < 0.5:
        return FailureKind.UNPARSEABLE
    if record.outcome == Outcome.OUT_OF_TOKENS:
        return FailureKind.OUT_OF_TOKENS
    queries = queries_of(record)
    successful = [turn for turn in queries if not turn["error"]]
    if queries and not successful:
        return error_kind(queries[-1]["error"])
    if record.outcome == Outcome.OUT_OF_BUDGET:
        return FailureKind.OUT_OF_STEPS if queries else FailureKind.NEVER_QUERIED
    if saw_right_rows(record):
        return FailureKind.RIGHT_ROWS
    answer = _answer(record)
    if successful:
        gave_up = answer.casefold() in _EMPTY and not _shows_nothing(successful[-1]["result"])
        return FailureKind.GAVE_UP if gave_up else FailureKind.WRONG_QUERY
    if _is_query(answer) or (answer.casefold() not in _EMPTY and _sampled(record)):
        return FailureKind.NEVER_QUERIED
    return FailureKind.GAVE_UP


def count_failures(records: Sequence[EpisodeRecord]) -> dict[FailureKind, int]:
    """Count the failures of an evaluation by kind, in the order of the kinds; those that do not occur are left out."""
    counts = Counter(kind for record in records if (kind := failure_kind(record)) is not None)
    return {kind: counts[kind] for kind in FailureKind if counts[kind]}


def queries_of(record: EpisodeRecord) -> list[Turn]:
    """Return the turns that ran a query, in order."""
    return [t for t in record.turns if kind_of(t) == ActionType.QUERY and (t["parseable"] or not t["error"])]


def kind_of(turn: Turn) -> str:
    """Return the type of a turn's action, as the environment reads it."""
    return str(turn["action_type"]).strip().upper()


def error_kind(error: str) -> FailureKind:
    """Return the kind of a query's error."""
    return next((kind for words, kind in _ERRORS if words in error), FailureKind.OTHER_ERROR)


def saw_right_rows(record: EpisodeRecord) -> bool:
    """Whether a query of the episode returned the gold's rows, in any order."""
    progress = math.fsum(turn["reward"]["progress"] for turn in record.turns)
    return progress >= RewardSettings().progress_scale - _ROUNDING


def _answer(record: EpisodeRecord) -> str:
    """The answer that was judged; empty where none was given."""
    last = record.turns[-1] if record.turns else None
    return str(last["argument"]).strip() if last is not None and kind_of(last) == ActionType.ANSWER else ""


def _is_query(answer: str) -> bool:
    """Whether an answer is a query, as in `sql` mode."""
    return submitted_query(answer).lstrip("( \n").casefold().startswith(("select", "with", "values"))


def _shows_nothing(result: str) -> bool:
    """Whether an empty answer is what a result says."""
    return result.endswith("no rows") or "NULL" in result


def _sampled(record: EpisodeRecord) -> bool:
    return any(kind_of(turn) == ActionType.SAMPLE and not turn["error"] for turn in record.turns)
