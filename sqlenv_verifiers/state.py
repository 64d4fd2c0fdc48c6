"""What the tools' process and the scoring one know of an episode: which it is, what was done, and what it gave.

The state travels with each call of a tool. It holds the actions, so that an episode can be played again where its
tools' process has lost it: environments are deterministic.
"""

from __future__ import annotations

import verifiers.v1 as vf
from pydantic import Field

from env_server.dataset import Split
from env_server.types import AnswerMode, RewardComponents, Verdict


class SQLToolsConfig(vf.SharedToolsetConfig):
    """Where the tools run (verifiers' own keys), and what they play on. The taskset fills in what it was given."""

    data: str = "synthetic"
    answer_mode: AnswerMode = AnswerMode.VALUE
    step_budget: int = 15


class SQLEnvConfig(vf.TasksetConfig):
    """The questions: `--env.taskset.data`, `.split`, `.answer_mode`, `.step_budget`."""

    data: str = "synthetic"
    """A data set as `sqlenv train --data` takes it."""
    split: Split = Split.TRAIN
    answer_mode: AnswerMode = AnswerMode.VALUE
    step_budget: int = 15
    tools: SQLToolsConfig = SQLToolsConfig()


class SQLEnvData(vf.TaskData):
    """A question's id; the question itself is the prompt."""

    question_id: str


class SQLEnvState(vf.State):
    """An episode so far."""

    question_id: str = ""
    episode_id: str = ""
    actions: list[tuple[str, str]] = Field(default_factory=list)
    rewards: list[RewardComponents] = Field(default_factory=list)
    verdict: Verdict | None = None
