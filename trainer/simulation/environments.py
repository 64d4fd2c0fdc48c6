"""Environments that take time and answer from scripts: servers with workers, without SQL.

A server has `workers` that do one call each at a time, first come, first served; a call takes a worker for a time
that is drawn, and the network takes its own. A call whose server fails is made again on another one, which costs the
episode's calls so far once more, as with real servers. All of it is drawn from a seed and from the episode, and waits
by the event loop's clock; nothing is computed but the reply.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from env_server.types import ActionType, RewardComponents, SQLAction, SQLObservation, Verdict
from trainer.rollout.environments import EnvironmentSession
from trainer.simulation.scripts import Script, ScriptedTurn, drawn

_NOTHING = RewardComponents().model_dump()


@dataclass(frozen=True, slots=True)
class EnvironmentProfile:
    """Environment servers: how many, and what they take. Times in seconds; `spread` is a deviation over the mean."""

    servers: int = 1
    workers: int = 1
    """Calls that a server works on at once."""
    call_s: float = 0.005
    """Of a worker, for a reset or a step."""
    spread: float = 1.0
    network_s: float = 0.001
    """There and back."""
    failure_share: float = 0.0
    """Of calls whose server fails."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.workers < 1 or min(self.call_s, self.spread, self.network_s) < 0.0:
            raise ValueError(f"there must be a server with a worker, and times must not be negative: {self}")
        if not 0.0 <= self.failure_share < 1.0:
            raise ValueError(f"the share of calls that fail must be below 1: {self}")


class Workers:
    """The queue of one server. Pure."""

    def __init__(self, workers: int) -> None:
        self._free = [0.0] * workers
        self.busy_s = 0.0
        self.sessions = 0

    def take(self, now: float, seconds: float) -> float:
        """Book the next worker that is free; returns when the call has ended."""
        ends = max(now, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, ends)
        self.busy_s += seconds
        return ends


@dataclass(slots=True)
class SimulatedEnvironments:
    """`Environments` of a profile. A question's id is the number of its script."""

    scripts: Sequence[Script]
    profile: EnvironmentProfile
    step_budget: int = 15
    servers: list[Workers] = field(init=False)

    def __post_init__(self) -> None:
        self.servers = [Workers(self.profile.workers) for _ in range(self.profile.servers)]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session on the server with the fewest."""
        server = min(self.servers, key=lambda each: each.sessions)
        server.sessions += 1
        try:
            yield _Session(self, server)
        finally:
            server.sessions -= 1

    def close(self) -> None:
        """Nothing is held."""


class _Session:
    """Plays the script of its question, turn by turn, whatever the actions are; an ANSWER ends it."""

    def __init__(self, environments: SimulatedEnvironments, server: Workers) -> None:
        self._profile = environments.profile
        self._budget = environments.step_budget
        self._servers = environments.servers
        self._server = server
        self._scripts = environments.scripts
        self._script = environments.scripts[0]
        self._history: list[str] = []
        self._chance = random.Random()

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        """Start an episode."""
        self._script = self._scripts[int(question_id) % len(self._scripts)]
        self._chance = random.Random(f"{self._profile.seed}/{episode_id}")
        self._history = []
        await self._call()
        return self._observation(ScriptedTurn(""), done=False)

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action."""
        await self._call()
        self._history.append(f"{action.action_type} {action.argument}")
        number = len(self._history)
        turns = self._script.turns
        answered = action.action_type == ActionType.ANSWER
        reply = turns[number - 1] if number <= len(turns) else ScriptedTurn("")
        observation = self._observation(reply, done=answered or number >= self._budget)
        observation.metadata["reward_components"] = _NOTHING
        if observation.done:
            observation.metadata["verdict"] = Verdict.CORRECT if answered else Verdict.OUT_OF_BUDGET
        return observation

    async def _call(self) -> None:
        """Sit out what a call takes."""
        profile, chance, loop = self._profile, self._chance, asyncio.get_running_loop()
        times = [drawn(chance, profile.call_s, profile.spread)]
        while profile.failure_share and chance.random() < profile.failure_share:
            # The reset and the actions so far again, then this call.
            times += [drawn(chance, profile.call_s, profile.spread) for _ in range(len(self._history) + 2)]
            self._server = self._servers[(self._servers.index(self._server) + 1) % len(self._servers)]
        ends = self._server.take(loop.time(), sum(times))
        await asyncio.sleep(ends - loop.time() + profile.network_s)

    def _observation(self, reply: ScriptedTurn, *, done: bool) -> SQLObservation:
        return SQLObservation(
            done=done,
            question=self._script.question,
            schema_info=self._script.tables,
            result=reply.result,
            error=reply.error,
            step_count=len(self._history),
            budget_remaining=self._budget - len(self._history),
            action_history=list(self._history),
        )
