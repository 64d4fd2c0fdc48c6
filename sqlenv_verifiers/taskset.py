"""SQLEnv's questions as tasks of verifiers, and the rewards of `sqlenv train` as theirs.

Promises: a policy reads the words that it reads under `sqlenv train --action_format tools`; the rewards have the names
and, unless configured otherwise, the weights that they have there (format apart: what is no call of a tool is no action
here); an episode ends with its answer, or with its last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import verifiers.v1 as vf

from env_server.data.loading import load_dataset
from env_server.environment import EnvironmentFactory
from env_server.settings import EnvSettings, RewardSettings
from env_server.types import Verdict
from sqlenv_verifiers.state import SQLEnvConfig, SQLEnvData, SQLEnvState, SQLToolsConfig
from sqlenv_verifiers.tools import SQLToolset
from trainer.chat.prompts import first_message, system_prompt
from trainer.config import ActionFormat


class SQLEnvTask(vf.Task[SQLEnvData, SQLEnvState]):
    """One question."""

    @property
    def key(self) -> str:
        """The question's id: the same however the data set is filtered."""
        return str(self.data.question_id)

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        """Tell the tools which episode is played."""
        trace.state.question_id = self.data.question_id
        trace.state.episode_id = trace.id

    @vf.stop
    async def over(self, trace: vf.Trace) -> bool:
        """Whether the episode is over."""
        return trace.state.verdict is not None

    @vf.reward(weight=1.0)
    async def correctness(self, trace: vf.Trace) -> float:
        """1 for a right answer, else 0."""
        return float(trace.state.verdict is Verdict.CORRECT)

    @vf.reward(weight=0.2)
    async def progress(self, trace: vf.Trace) -> float:
        """How close the best query came to the gold rows, in [0, 1]."""
        progress = math.fsum(reward.progress for reward in trace.state.rewards)
        return progress / RewardSettings().progress_scale

    @vf.reward(weight=0.2)
    async def operational(self, trace: vf.Trace) -> float:
        """The sum of step costs, successes, new information and repeats."""
        return math.fsum(reward.operational for reward in trace.state.rewards)

    @vf.metric
    async def steps(self, trace: vf.Trace) -> float:
        """How many actions were taken."""
        return float(len(trace.state.actions))


class SQLEnvTaskset(vf.Taskset[SQLEnvTask, SQLEnvConfig]):
    """The questions of a split."""

    def load(self) -> Iterator[SQLEnvTask]:
        """Yield the questions, in the data set's order. Raises SQLEnvError."""
        config = self.config
        settings = EnvSettings(step_budget=config.step_budget)
        dataset = load_dataset(config.data, answer_mode=config.answer_mode, settings=settings)
        system = system_prompt(config.answer_mode, ActionFormat.TOOLS)
        with EnvironmentFactory(dataset, settings, config.answer_mode) as factory:
            environment = factory.make()
            for question in dataset.select(config.split):
                prompt = first_message(environment.reset(question_id=question.question_id))
                data = SQLEnvData(
                    id=question.question_id, question_id=question.question_id, prompt=prompt, system_prompt=system
                )
                yield SQLEnvTask(data, config.task)

    @classmethod
    def toolsets(cls, config: SQLEnvConfig) -> list[vf.Toolset]:
        """The tools' process, which the episodes of a worker share."""
        names = ("data", "answer_mode", "step_budget")
        played_on = {name: getattr(config, name) for name in names}
        return [SQLToolset(SQLToolsConfig(**{**config.tools.model_dump(), **played_on}))]
