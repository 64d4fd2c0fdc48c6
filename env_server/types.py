"""The wire types: what an agent sends and what it sees. The one place that defines them.

Everything an agent or a client can observe is a field here. Nothing derived from the gold answer appears
except the reward numbers and, when the episode is done, the verdict.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from env_server.dataset import Split
from env_server.formatting import observation_html, observation_text


class ActionType(StrEnum):
    """The actions that code names; `env_server.actions.ACTIONS` are all that there are."""

    DESCRIBE = "DESCRIBE"
    SAMPLE = "SAMPLE"
    QUERY = "QUERY"
    ANSWER = "ANSWER"


class AnswerMode(StrEnum):
    """What ANSWER carries: the value itself, or a query that yields it."""

    VALUE = "value"
    SQL = "sql"


class Verdict(StrEnum):
    """How an episode ended, as the last observation's metadata tells it."""

    CORRECT = "correct"
    WRONG = "wrong"
    OUT_OF_BUDGET = "out_of_budget"
    UNJUDGED = "unjudged"
    """Answered, and nobody knows the right answer: the question came without its SQL."""


def is_unicode(value: object) -> bool:
    """Tell whether a JSON value can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _unicode(value: str | None) -> str | None:
    if not is_unicode(value):
        raise ValueError("must not hold half of a surrogate pair")
    return value


def _seed(seed: int | None) -> int | None:
    if seed is not None and seed >= 2**64:
        raise ValueError("must be below 2**64")
    return seed


Name = Annotated[str | None, AfterValidator(_unicode)]


class ResetRequest(BaseModel):
    """The data of a reset."""

    model_config = ConfigDict(extra="ignore")

    seed: Annotated[int | None, AfterValidator(_seed)] = Field(
        default=None, ge=0, description="draws the question when question_id is not given"
    )
    episode_id: Name = Field(default=None, max_length=255, description="comes back in the state")
    question_id: Name = Field(default=None, max_length=255, description="play this question")
    split: Split = Field(default=Split.ALL, description="draw the question from this split")


class SQLAction(BaseModel):
    """One action. `action_type` is free text: an unknown type gives an observation with an error."""

    model_config = ConfigDict(extra="forbid")

    action_type: str = Field(description="DESCRIBE, SAMPLE, QUERY or ANSWER (any case)")
    argument: str = Field(default="", description="a table name, a SQL query, or the answer")
    metadata: dict[str, Any] = Field(default_factory=dict, description="ignored by the environment")


class RewardComponents(BaseModel):
    """The breakdown of one step's reward; `total` is what the observation carries as `reward`.

    total = clip(operational + progress) + terminal, where operational = step_cost + success + new_information
    + repeat.
    """

    model_config = ConfigDict(frozen=True)

    step_cost: float = 0.0
    success: float = 0.0
    new_information: float = 0.0
    repeat: float = 0.0
    operational: float = 0.0
    progress: float = 0.0
    terminal: float = 0.0
    total: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """What `total` is the sum of, by name, without what is nothing; `clipped` is what the clip added."""
        named = self.model_dump(exclude={"operational", "total"})
        named["clipped"] = self.total - sum(named.values())
        return {name: round(value, 6) for name, value in named.items() if abs(value) > 1e-9}


class SQLObservation(BaseModel):
    """What the agent sees after `reset` or `step`.

    `result` and `error` are plain text and never both set. `metadata` holds `reward_components` (after each
    step) and `verdict` (a `Verdict`, once done); the properties of these names read them. Printed,
    it is what the agent reads, with the action and the reward.
    """

    model_config = ConfigDict(extra="forbid")

    done: bool = False
    reward: float = 0.0
    question: str
    schema_info: str = Field(description="the table names, then what each DESCRIBE has shown")
    result: str = ""
    error: str = ""
    step_count: int = 0
    budget_remaining: int
    action_history: list[str] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def reward_components(self) -> RewardComponents | None:
        """The breakdown of `reward`; None after `reset`."""
        components = self.metadata.get("reward_components")
        return None if components is None else RewardComponents.model_validate(components)

    @property
    def verdict(self) -> Verdict | None:
        """How the episode ended; None while it is played."""
        verdict = self.metadata.get("verdict")
        return None if verdict is None else Verdict(verdict)

    def __str__(self) -> str:
        return observation_text(self)

    def _repr_html_(self) -> str:
        return observation_html(self)


class SQLState(BaseModel):
    """All that the state endpoint tells."""

    model_config = ConfigDict(extra="forbid")

    episode_id: str
    step_count: int


class ErrorCode(StrEnum):
    """Why a request was not carried out, in an error frame."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    SESSION_ERROR = "SESSION_ERROR"


class ServedData(BaseModel):
    """What a server serves, as GET /ready tells it under `data`; keys of newer servers are ignored."""

    model_config = ConfigDict(frozen=True)

    name: str
    questions: int
    fingerprint: str
    answer_mode: AnswerMode
    step_budget: int

    @property
    def version_tag(self) -> str:
        """What the header SERVES_HEADER of a session's handshake says: equal where the same episodes are played."""
        return f"{self.fingerprint} {self.answer_mode.value} {self.step_budget}"


SERVES_HEADER = "SQLEnv-Serves"
"""Behind a load balancer, what /ready tells may be of another server than the one that a session is on."""


class ReadyStatus(StrEnum):
    """Whether a server takes new sessions."""

    READY = "ready"
    DRAINING = "draining"


class Ready(BaseModel):
    """The answer to GET /ready; keys of newer servers are ignored."""

    model_config = ConfigDict(frozen=True)

    status: ReadyStatus
    active_sessions: int
    max_sessions: int
    waiting: int
    data: ServedData
