"""Every constant of the environment that a user may want to change, with its unit and its reason.

Plain data: what a query process imports, it has in memory, and a server has several of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

MAX_ARGUMENT_CHARS = 20_000
"""Longest argument of an action, without the blanks around it: what is looked at and compared for each action. A
statement may have as many bytes (`SandboxSettings.sql_bytes`)."""


class SQLRule(StrEnum):
    """How the rows of a submitted query are compared with the gold's: as Spider's evaluation does, or as BIRD's."""

    SPIDER = "spider"
    BIRD = "bird"


def _check_positive(settings: Any) -> None:
    """Raise ValueError where a number of the settings is not above 0, TypeError where it is no such number."""
    for field in fields(settings):
        if field.type not in ("int", "float"):
            continue
        value, wanted = getattr(settings, field.name), (int,) if field.type == "int" else (int, float)
        if type(value) not in wanted:
            raise TypeError(f"{field.name} must be of type {field.type}, not {value!r}")
        if value <= 0:
            raise ValueError(f"{field.name} must be greater than 0, not {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSettings:
    """Bounds on one statement."""

    vm_steps: int = 20_000_000
    """SQLite virtual-machine steps; the bound that decides an observation, the same on every machine."""
    deadline_s: float = 5.0
    """Seconds of processor time, so that a crowded machine changes nothing; the last resort, for a machine too slow for
    `vm_steps`."""
    sql_bytes: int = 20_000
    """Longest statement accepted, in UTF-8 bytes."""
    value_bytes: int = 1_000_000
    """Largest text or blob value, and row, that SQLite may build."""
    heap_bytes: int = 256_000_000
    """SQLite's hard heap limit for the whole process."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class DisplaySettings:
    """How results are shown."""

    max_rows: int = 20
    """Rows shown; at most one more is ever fetched."""
    max_chars: int = 2_000
    """Characters of one result."""
    max_cell_chars: int = 80
    """Characters of one cell; the rest is cut and marked."""
    sample_rows: int = 3
    """Rows that SAMPLE shows."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSettings:
    """The three-layer reward."""

    step_cost: float = -0.02
    """Every step."""
    success: float = 0.02
    """The action was executed without an error."""
    new_information: float = 0.01
    """A successful QUERY that this episode has not seen before."""
    repeat: float = -0.03
    """An action that this episode has already taken."""
    progress_scale: float = 0.15
    """Total progress reward for reaching the gold rows."""
    clip_low: float = -0.10
    clip_high: float = 0.15
    """The operational and progress layers of one step are clipped to [clip_low, clip_high]."""
    correct: float = 1.0
    """Terminal reward of a correct ANSWER; a wrong one, or none, gives 0."""

    def __post_init__(self) -> None:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low ({self.clip_low}) must not exceed clip_high ({self.clip_high})")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgingSettings:
    """How a submitted query is judged, in `sql` mode."""

    rule: SQLRule = SQLRule.SPIDER
    """How its rows are compared with the gold's: as Spider's evaluation does, or as BIRD's."""
    variants: bool = True
    """Whether it has to be right on variants of the database as well: what tells a right query from a lucky one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSettings:
    """Everything that decides an episode besides its question and its actions."""

    step_budget: int = 15
    """Steps in an episode; running out ends it with terminal reward 0."""
    sandbox: SandboxSettings = SandboxSettings()
    display: DisplaySettings = DisplaySettings()
    reward: RewardSettings = RewardSettings()
    judging: JudgingSettings = JudgingSettings()

    def __post_init__(self) -> None:
        _check_positive(self)
