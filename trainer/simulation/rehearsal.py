"""A rehearsal: the real rollout client plays scripted episodes against a simulated engine, and everything is timed.

What is real: the client, the chat format and its tokenizer, the transcript, the environments where they are not
simulated either. What is not: the model, and HTTP to its server. Where environments are simulated, the clock skips
waits (`inference.simulated.clock`), and the client's own work counts as on this machine; with real ones it is an
ordinary clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from inference.engine import Engine, Session
from inference.simulated.clock import run_skipping
from inference.simulated.engine import SimulatedEngine
from inference.simulated.profile import Faults, ServerProfile
from inference.simulated.replica import Usage
from trainer.chat.format import ChatFormat
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings, derive_seed
from trainer.rollout.environments import Environments
from trainer.rollout.episodes import Episode
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.environments import EnvironmentProfile, SimulatedEnvironments
from trainer.simulation.lag import Lag, lag_of_this_loop
from trainer.simulation.scripts import Script, ScriptedPolicy


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is rehearsed: the servers, and how the client uses them. `environments` counts where they are simulated."""

    server: ServerProfile
    replicas: int = 1
    environments: EnvironmentProfile = field(default_factory=EnvironmentProfile)
    faults: Faults = field(default_factory=Faults)
    max_concurrency: int = 64
    batch: int = 0
    """Episodes of a batch, after which all wait for the last one, as a training step does; 0: all are one batch."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is played: so many episodes of these scripts, within a budget of tokens and steps."""

    scripts: Sequence[Script]
    episodes: int
    budget: TokenBudget
    step_budget: int = 15
    seed: int = 0


@dataclass(slots=True)
class Played:
    """What happened. Times in seconds, on the clock of the rehearsal."""

    deployment: Deployment
    # asyncio shows a task's result where it sets signal handlers; thousands of episodes take it seconds.
    episodes: list[Episode] = field(repr=False)
    seconds: float
    client_s: float
    """Of the processor, for the client's event loop."""
    lag: Lag
    usage: list[Usage]
    """Of each replica, while episodes were still to begin: the whole time where they all begin at once."""
    usage_s: float
    """How long that was."""
    environment_busy_s: list[float] | None
    """Of each environment server, in that time; None where they are real."""


def rehearse(
    chat: ChatFormat,
    load: Load,
    deployment: Deployment,
    environments: Environments | None = None,
    *,
    counts_work: bool = True,
    skips_waits: bool = True,
    on_episode: Callable[[Episode], None] | None = None,
) -> Played:
    """Play in simulated environments, or in those that are given: then on an ordinary clock.

    Without `counts_work`, the client's work takes no time: what is left is the ideal for these latencies.
    """
    rehearsal = _Rehearsal(chat, load, deployment, environments, on_episode)
    if environments is None and skips_waits:
        return run_skipping(rehearsal.run(), counts_work=counts_work)
    return asyncio.run(rehearsal.run())


class _Rehearsal:
    def __init__(
        self,
        chat: ChatFormat,
        load: Load,
        deployment: Deployment,
        environments: Environments | None,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        self._load = load
        self._deployment = deployment
        self._simulated: SimulatedEnvironments | None = None
        if environments is None:
            self._simulated = SimulatedEnvironments(load.scripts, deployment.environments, load.step_budget)
            environments = self._simulated
        self._engine = SimulatedEngine(
            ScriptedPolicy(chat, load.scripts),
            deployment.server,
            stop_ids=chat.stop_ids,
            replicas=deployment.replicas,
            faults=deployment.faults,
        )
        settings = RolloutSettings(
            load.budget, max_concurrency=deployment.max_concurrency, engine_timeout_s=1e6, environment_timeout_s=1e6
        )
        self._numbered = _Numbered(self._engine)
        self._client = RolloutClient(self._numbered, environments, chat, settings)
        self._on_episode = on_episode
        self._ended = 0
        self._began = 0.0
        self._noted: tuple[float, list[Usage], list[float] | None] | None = None

    async def run(self) -> Played:
        load, deployment, loop = self._load, self._deployment, asyncio.get_running_loop()
        requests = [self._request(number) for number in range(load.episodes)]
        size = deployment.batch or load.episodes
        episodes: list[Episode] = []
        self._began, work = loop.time(), time.thread_time()
        # A session of its own holds the engine's clock between batches.
        async with lag_of_this_loop() as lag, self._engine.session(-1):
            for first in range(0, load.episodes, size):
                self._numbered.first = first
                episodes += await self._client.play(requests[first : first + size], self._note)
            seconds, work = loop.time() - self._began, time.thread_time() - work
            usage_s, usage, busy = self._noted or self._use()
        await self._engine.aclose()
        return Played(deployment, episodes, seconds, work, lag, usage, usage_s, busy)

    def _request(self, number: int) -> EpisodeRequest:
        script = self._load.scripts[number % len(self._load.scripts)]
        question_id = script.question_id if self._simulated is None else str(number)
        return EpisodeRequest(question_id, derive_seed(self._load.seed, number))

    def _note(self, episode: Episode) -> None:
        """Note the use of the servers when the last episode has begun: afterwards they run empty."""
        self._ended += 1
        begun = self._ended + self._deployment.max_concurrency
        if begun == self._load.episodes and self._ended > self._load.episodes // 3 and not self._deployment.batch:
            self._noted = self._use()
        if self._on_episode is not None:
            self._on_episode(episode)

    def _use(self) -> tuple[float, list[Usage], list[float] | None]:
        busy = None if self._simulated is None else [server.busy_s for server in self._simulated.servers]
        now = asyncio.get_running_loop().time()
        return now - self._began, [replace(usage) for usage in self._engine.usage], busy


class _Numbered:
    """An engine whose sessions are numbered on from batch to batch, so that each batch has scripts of its own."""

    def __init__(self, engine: Engine) -> None:
        self.first = 0
        self._engine = engine

    def session(self, key: int) -> Session:
        return self._engine.session(self.first + key)

    async def aclose(self) -> None:
        await self._engine.aclose()
