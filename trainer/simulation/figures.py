"""What a rehearsal showed, in figures: throughput, tails, how much is used of what, and what is used up first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.timings import PARTS, EpisodeTiming, Part, Wait
from trainer.simulation.rehearsal import Played

USED_UP = 0.85
"""The share of use from which on a queue grows so fast that more load only adds waiting."""

ADVICE = {
    "engine": "the engine's replicas are full; more --replicas, or shorter turns",
    "front end": "the engine's front end is full: requests are many and short; more --replicas",
    "environments": "the environment servers are full; more --environment_servers, or more workers on each",
    "client": "the client's event loop is full; more trainer ranks, each with a client of its own",
    "concurrency": "nothing is full: --max_concurrency is what bounds it",
    "tail": "nothing is full: batches wait for their last episodes; larger batches, or shorter episodes",
}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a time in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Of at least one value; zeros of none."""
        found = sorted(values) or [0.0]
        quantiles = (found[min(len(found) - 1, math.ceil(share * len(found)) - 1)] for share in (0.5, 0.95, 0.99, 1.0))
        return cls(sum(found) / len(found), *quantiles)


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a rehearsal."""

    episodes: int
    failed: int
    seconds: float
    episodes_per_second: float
    """Over all the time, its beginning and its end included."""
    steady_episodes_per_second: float
    """Over the middle half of the episodes, by their ends: what a long run would have."""
    turns_per_second: float
    tokens_per_second: float
    """Of the policy."""
    turns: float
    """Of an episode."""
    in_flight: float
    """Episodes, on the average."""
    episode_s: Quantiles
    turn_s: Quantiles
    generation_s: Quantiles
    environment_s: Quantiles
    client_s_per_turn: float
    lag_s: Quantiles
    used: dict[str, float]
    """Shares of what there is: 1 is all of it."""
    first: str
    """What is used up first; a key of ADVICE."""

    def as_json(self) -> dict[str, Any]:
        """Return numbers of a sensible length."""
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded


def figures(played: Played) -> Figures:
    """Sum up."""
    whole = [episode for episode in played.episodes if episode.outcome is not Outcome.FAILED]
    timings = [episode.timing for episode in whole if episode.timing is not None]
    turns = sum(len(episode.turns) for episode in whole)
    lasted = [timing.ended - timing.started for timing in timings]
    seconds = played.seconds or math.inf
    in_flight = sum(lasted) / seconds
    used = _used(played, in_flight)
    return Figures(
        episodes=len(played.episodes),
        failed=len(played.episodes) - len(whole),
        seconds=played.seconds,
        episodes_per_second=len(whole) / seconds,
        steady_episodes_per_second=_steady([timing.ended for timing in timings]),
        turns_per_second=turns / seconds,
        tokens_per_second=sum(_own_tokens(episode) for episode in whole) / seconds,
        turns=turns / max(1, len(whole)),
        in_flight=in_flight,
        episode_s=Quantiles.of(lasted),
        turn_s=Quantiles.of(seconds for timing in timings for seconds in turn_seconds(timing)),
        generation_s=Quantiles.of(seconds_of(timings, Part.GENERATION)),
        environment_s=Quantiles.of([*seconds_of(timings, Part.ENVIRONMENT), *seconds_of(timings, Part.JUDGING)]),
        client_s_per_turn=played.client_s / max(1, turns),
        lag_s=Quantiles.of(played.lag.samples),
        used=used,
        first=_first(used, is_batch=played.deployment.batch > 0),
    )


def turn_seconds(timing: EpisodeTiming) -> list[float]:
    """How long each turn took: from the question to the engine until the environment's reply."""
    began = {span.turn: span.start for span in timing.spans if span.wait is Wait.GENERATION}
    return [
        span.end - began[span.turn]
        for span in timing.spans
        if span.wait in (Wait.STEP, Wait.ANSWER) and span.turn in began
    ]


def seconds_of(timings: Iterable[EpisodeTiming], part: Part) -> list[float]:
    """How long each wait for a part took, sessions apart: they cost nothing of their own."""
    return [
        span.end - span.start
        for timing in timings
        for span in timing.spans
        if PARTS[span.wait] is part and span.wait is not Wait.SESSION
    ]


def _steady(ends: Sequence[float]) -> float:
    """Episodes a second between the quartiles of their ends."""
    found = sorted(ends)
    low, high = len(found) // 4, 3 * len(found) // 4
    if high <= low or found[high] <= found[low]:
        return 0.0
    return (high - low) / (found[high] - found[low])


def _used(played: Played, in_flight: float) -> dict[str, float]:
    deployment, seconds = played.deployment, played.usage_s or math.inf
    server, replicas = deployment.server, deployment.replicas
    tokens = sum(usage.new_tokens for usage in played.usage)
    read = sum(usage.prompt_tokens for usage in played.usage)
    needed = tokens / server.tokens_per_s(server.max_sequences) + read / server.prefill_tokens_per_s
    slots = sum(usage.sequence_s for usage in played.usage) / server.max_sequences
    jobs = sum(usage.jobs for usage in played.usage)
    used = {
        "engine": max(needed, slots) / replicas / seconds,
        "front end": jobs * server.request_s / replicas / seconds,
        "client": played.client_s / (played.seconds or math.inf),
        "concurrency": in_flight / deployment.max_concurrency,
    }
    if played.environment_busy_s is not None:
        workers = deployment.environments.servers * deployment.environments.workers
        used["environments"] = sum(played.environment_busy_s) / workers / seconds
    return used


def _first(used: dict[str, float], *, is_batch: bool) -> str:
    parts = {name: share for name, share in used.items() if name != "concurrency"}
    most = max(parts, key=lambda name: parts[name])
    if parts[most] >= USED_UP:
        return most
    return "tail" if is_batch else "concurrency"


def _own_tokens(episode: Episode) -> int:
    return sum(episode.row.env_mask)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
