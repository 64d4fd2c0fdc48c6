"""The errors that the environment raises to its caller.

What an agent does wrong is never an exception: it is an observation with `error` set. These classes are for
the caller's own mistakes (an unknown question, a broken data set) and for the infrastructure.
"""

from __future__ import annotations

from collections.abc import Sequence


class SQLEnvError(Exception):
    """Base of every error that SQLEnv raises on purpose. Its text names the fix."""


class DataError(SQLEnvError):
    """A data set cannot be loaded: a missing file, broken JSON, an unknown name."""


class NoVariantsError(DataError):
    """A database that can be read cannot have variants; its questions are judged on it alone."""


class UnknownQuestionError(SQLEnvError):
    """`reset` was asked for a question that the data set does not hold."""


class EpisodeOverError(SQLEnvError):
    """`step` was called after the episode was done. The episode's state is unchanged."""


class NoEpisodeError(SQLEnvError):
    """`step` or `state` was called before the first `reset`."""


class ClosedError(SQLEnvError):
    """What was closed is asked to go on."""


class StalePlanError(SQLEnvError):
    """A planned step was applied to an episode that has gone on meanwhile. The episode's state is unchanged."""


class SQLError(SQLEnvError):
    """A statement failed, or was refused, in the sandbox; the agent sees `message` in one line.

    `kind` is one word that classifies it: `syntax`, `missing` (no such table, column or function), `denied`
    (not a single read-only statement), `budget` (too many virtual-machine steps, or the deadline), `size`
    (a value, row, expression or statement too large), `runtime` (anything else).

    `deterministic` is False where the machine decided, not the statement: the deadline, an interrupt, a full heap,
    a lost process. Such an outcome may differ the next time, so it is not kept.
    """

    def __init__(self, kind: str, message: str, *, deterministic: bool = True) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.deterministic = deterministic


class UnknownTableError(SQLEnvError):
    """DESCRIBE or SAMPLE named a table that the database does not hold."""

    def __init__(self, name: str, tables: Sequence[str]) -> None:
        super().__init__(f"no such table: {name}. Tables: {', '.join(tables)}")
        self.name = name
        self.tables = tuple(tables)
