"""The four actions as tools, in a process of their own that all episodes of a worker share.

`python -m sqlenv_verifiers.tools` is how verifiers starts it. An episode's environment is made at its first call and
kept until it is over; one that was lost, or given up for newer ones, is played again from its actions.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

import verifiers.v1 as vf
from pydantic import Field

from env_server.cache import LRUCache
from env_server.data.loading import load_dataset
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings
from env_server.types import ActionType, SQLAction, SQLObservation
from sqlenv_verifiers.state import SQLEnvState, SQLToolsConfig
from trainer.chat.prompts import observation_message

KEPT_EPISODES = 4_096
OVER = "The episode is over."


@dataclass
class Played:
    """An episode in this process; its calls wait for one another."""

    environment: SQLEnvironment
    observations: list[SQLObservation]
    actions: list[tuple[str, str]]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, kind: str, argument: str) -> SQLObservation:
        """Take an action. Raises EpisodeOverError, and changes nothing then."""
        observation = self.environment.step(SQLAction(action_type=kind, argument=argument))
        self.actions.append((kind, argument))
        self.observations.append(observation)
        return observation


class SQLToolset(vf.Toolset[SQLToolsConfig, SQLEnvState]):
    """describe, sample, query and answer."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Load the data."""
        config = self.config
        settings = EnvSettings(step_budget=config.step_budget)
        dataset = await asyncio.to_thread(load_dataset, config.data, answer_mode=config.answer_mode, settings=settings)
        self._factory = EnvironmentFactory(dataset, settings, config.answer_mode)
        await asyncio.to_thread(self._factory.build_suites)
        self._played: LRUCache[str, Played] = LRUCache(KEPT_EPISODES)

    @vf.tool
    async def describe(self, table: Annotated[str, Field(description="The table's name.")]) -> str:
        """Show a table's columns."""
        return await self._take(ActionType.DESCRIBE, table)

    @vf.tool
    async def sample(self, table: Annotated[str, Field(description="The table's name.")]) -> str:
        """Show a few rows of a table."""
        return await self._take(ActionType.SAMPLE, table)

    @vf.tool
    async def query(self, sql: Annotated[str, Field(description="The query, in SQLite's dialect.")]) -> str:
        """Run one SELECT and see its result."""
        return await self._take(ActionType.QUERY, sql)

    @vf.tool
    async def answer(self, value: Annotated[str, Field(description="The answer, as the first message says.")]) -> str:
        """Give the answer and finish."""
        return await self._take(ActionType.ANSWER, value)

    async def _take(self, kind: ActionType, argument: str) -> str:
        state = self.state
        played = self._played.get(state.episode_id)
        if played is None:
            played = self._begun(state)
            self._played.put(state.episode_id, played)
        async with played.lock:
            if played.observations[-1].done:
                return OVER
            observation = await asyncio.to_thread(played.take, kind, argument)
            state.actions = list(played.actions)
            state.rewards = [seen.reward_components for seen in played.observations if seen.reward_components]
            state.verdict = observation.verdict
            return observation_message(observation)

    def _begun(self, state: SQLEnvState) -> Played:
        """An episode as far as its actions say that it went."""
        environment = self._factory.make()
        played = Played(environment, [environment.reset(question_id=state.question_id)], [])
        for kind, argument in state.actions:
            played.take(kind, argument)
        return played


if __name__ == "__main__":
    SQLToolset.run()
