"""How large a deployment must be for a target: first by what an episode uses, then by rehearsing that deployment.

Little's law gives the concurrency, and each part must have what a second's episodes use of it with some room left,
since a queue that is used to the full has no end. The rehearsal then shows whether that is enough: waits add up in
ways that no sum foresees. What it lacks is added to the part that is used most, until the target is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from env_server.errors import SQLEnvError
from trainer.simulation.figures import Figures
from trainer.simulation.rehearsal import Deployment

ROOM = 0.8
"""The share of a part that is planned to be used."""
MOST_ROUNDS = 12

Rehearse = Callable[[Deployment], Figures]


class SizingError(SQLEnvError):
    """No deployment was found that meets the target."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment that meets a target, as rehearsed, and how many clients it takes."""

    target: float
    """Episodes a second."""
    deployment: Deployment
    figures: Figures
    clients: int
    """Trainer ranks: each has a process and an event loop of its own, and its share of the concurrency."""


def planned(target: float, deployment: Deployment, found: Figures, rehearse: Rehearse) -> Plan:
    """Size for `target` episodes a second, from what a first rehearsal of a deployment showed. Raises SizingError."""
    if not found.episodes_per_second > 0.0:
        raise SizingError("no episode was played to its end, so nothing is known of what one takes")
    # What is used of each part in a second's episodes, in replicas and servers.
    rate = found.steady_episodes_per_second or found.episodes_per_second
    used = found.used
    replicas = max(used["engine"], used["front end"]) * deployment.replicas * target / rate / ROOM
    servers = used.get("environments", 0.0) * deployment.environments.servers * target / rate / ROOM
    chosen = replace(
        deployment,
        batch=0,
        replicas=max(1, math.ceil(replicas)),
        environments=replace(deployment.environments, servers=max(1, math.ceil(servers))),
        max_concurrency=max(1, math.ceil(target * found.episode_s.mean)),
    )
    for _ in range(MOST_ROUNDS):
        shown = rehearse(chosen)
        if shown.steady_episodes_per_second >= target:
            clients = math.ceil(target * shown.turns * shown.client_s_per_turn / ROOM)
            return Plan(target, chosen, shown, max(1, clients))
        chosen = _larger(chosen, shown, target)
    raise SizingError(
        f"{MOST_ROUNDS} rounds did not find a deployment for {target:g} episodes a second; the last one had "
        f"{chosen.replicas} replicas and {chosen.environments.servers} environment servers"
    )


def _larger(deployment: Deployment, shown: Figures, target: float) -> Deployment:
    """More of what was used most: of servers where they were full, else of episodes in flight."""
    lacking = target / max(shown.steady_episodes_per_second, target / 4)
    engine = max(shown.used["engine"], shown.used["front end"])
    environments = shown.used.get("environments", 0.0)
    if max(engine, environments) < ROOM:
        return replace(deployment, max_concurrency=math.ceil(deployment.max_concurrency * max(1.05, lacking)))
    if engine >= environments:
        return replace(deployment, replicas=max(deployment.replicas + 1, math.ceil(deployment.replicas * lacking)))
    servers = max(deployment.environments.servers + 1, math.ceil(deployment.environments.servers * lacking))
    return replace(deployment, environments=replace(deployment.environments, servers=servers))
