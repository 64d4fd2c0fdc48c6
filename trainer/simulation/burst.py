"""A short burst against real servers, to calibrate a rehearsal: batches of growing concurrency, each turn timed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inference.engine import Engine
from inference.simulated.profile import ServerProfile
from trainer.chat.format import ChatFormat
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import Environments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.calibration import fitted_environments, fitted_server, generated
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.scripts import Script, recorded

CONCURRENCIES = (1, 4, 16, 32)
EPISODES = 16
"""Of a batch, at least; else four times its concurrency: one episode in fifty may take ten times as long as others."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a burst showed."""

    server: ServerProfile
    environments: EnvironmentProfile
    scripts: list[Script]
    episodes: list[Episode]


def measured(
    engine: Engine,
    environments: Environments,
    chat: ChatFormat,
    budget: TokenBudget,
    requests: Callable[[int, int], Sequence[EpisodeRequest]],
    concurrencies: Sequence[int] = CONCURRENCIES,
    max_sequences: int = 256,
    workers: int = 4,
) -> Measured:
    """Play, and fit. `requests(first, count)` are the episodes to play. Raises RolloutError, CalibrationError."""
    batches: list[list[Episode]] = []

    async def play() -> None:
        played = 0
        for concurrency in concurrencies:
            settings = RolloutSettings(budget, max_concurrency=concurrency)
            count = max(EPISODES, 4 * concurrency)
            client = RolloutClient(engine, environments, chat, settings)
            chosen = requests(played, count)
            await _open_databases(environments, chosen)
            batches.append(await client.play(chosen))
            played += count

    asyncio.run(play())
    # With the fewest in flight: a rehearsal has calls wait for its workers itself.
    least = batches[min(range(len(batches)), key=lambda number: concurrencies[number])]
    episodes = [episode for batch in batches for episode in batch]
    return Measured(
        fitted_server([generated(batch) for batch in batches], max_sequences),
        fitted_environments(least, EnvironmentProfile(workers=workers)),
        recorded(map(record, episodes)),
        episodes,
    )


async def _open_databases(environments: Environments, requests: Sequence[EpisodeRequest]) -> None:
    """Have each question's database opened: its first reset is slow, and in a long run most are not the first."""
    for request in requests:
        async with environments.session() as session:
            await session.reset(request.question_id, "")
