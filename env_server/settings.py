"""Every constant of the environment that a user may want to change, with its unit and its reason."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from env_server.types import SQLRule


class SandboxSettings(BaseModel):
    """Bounds on one statement."""

    model_config = ConfigDict(frozen=True)

    vm_steps: int = Field(default=20_000_000, gt=0)
    """SQLite virtual-machine steps; the bound that decides an observation, the same on every machine."""
    deadline_s: float = Field(default=5.0, gt=0)
    """Seconds of processor time, so that a crowded machine changes nothing; the last resort, for a machine too slow for
    `vm_steps`."""
    sql_bytes: int = Field(default=20_000, gt=0)
    """Longest statement accepted, in UTF-8 bytes."""
    value_bytes: int = Field(default=1_000_000, gt=0)
    """Largest text or blob value, and row, that SQLite may build."""
    heap_bytes: int = Field(default=256_000_000, gt=0)
    """SQLite's hard heap limit for the whole process."""


class DisplaySettings(BaseModel):
    """How results are shown."""

    model_config = ConfigDict(frozen=True)

    max_rows: int = Field(default=20, gt=0)
    """Rows shown; at most one more is ever fetched."""
    max_chars: int = Field(default=2_000, gt=0)
    """Characters of one result."""
    max_cell_chars: int = Field(default=80, gt=0)
    """Characters of one cell; the rest is cut and marked."""
    sample_rows: int = Field(default=3, gt=0)
    """Rows that SAMPLE shows."""


class RewardSettings(BaseModel):
    """The three-layer reward."""

    model_config = ConfigDict(frozen=True)

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

    @model_validator(mode="after")
    def _clip_is_an_interval(self) -> RewardSettings:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low ({self.clip_low}) must not exceed clip_high ({self.clip_high})")
        return self


class JudgingSettings(BaseModel):
    """How a submitted query is judged, in `sql` mode."""

    model_config = ConfigDict(frozen=True)

    rule: SQLRule = SQLRule.SPIDER
    """How its rows are compared with the gold's: as Spider's evaluation does, or as BIRD's."""
    variants: bool = True
    """Whether it has to be right on variants of the database as well: what tells a right query from a lucky one."""


class EnvSettings(BaseModel):
    """Everything that decides an episode besides its question and its actions."""

    model_config = ConfigDict(frozen=True)

    step_budget: int = Field(default=15, gt=0)
    """Steps in an episode; running out ends it with terminal reward 0."""
    sandbox: SandboxSettings = SandboxSettings()
    display: DisplaySettings = DisplaySettings()
    reward: RewardSettings = RewardSettings()
    judging: JudgingSettings = JudgingSettings()
