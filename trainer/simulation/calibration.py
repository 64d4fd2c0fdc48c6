"""From episodes that were really played to a profile of what played them. Pure.

A turn's time is taken to be a sum, as in the model of `inference.simulated`: what every request costs, the reading of
prompts while it ran (its own and others'), and its tokens times a step, which grows with how many ran beside it. The
four numbers are those, none negative, with the least squares over all turns, weighted so that long turns do not
outweigh all others. Turns at several concurrencies are needed to tell a step's own time from what each sequence adds.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from env_server.errors import SQLEnvError
from inference.simulated.engine import shared
from inference.simulated.profile import ServerProfile
from trainer.rollout.episodes import Episode, Outcome, TokenRow
from trainer.rollout.timings import Part, Wait
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.figures import seconds_of

_SHORTEST_CALL_S = 1e-6
_FASTEST_READER = 1e9
"""Prompt tokens a second where reading them does not show."""
_SHORTEST_STEP_S = 1e-5


class CalibrationError(SQLEnvError):
    """There is too little to calibrate with."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One turn as the engine saw it: when, tokens that it had not read before, tokens that it generated."""

    start: float
    end: float
    read: int
    new: int


def generated(episodes: Iterable[Episode]) -> list[Generated]:
    """Every turn of episodes that were played with their times, and lost none of their turns.

    Of a first prompt, what the one before began with is taken to be in the server's cache.
    """
    turns: list[Generated] = []
    before: list[int] = []
    for episode in episodes:
        if episode.outcome is Outcome.FAILED or episode.timing is None or episode.truncated_turns:
            continue
        spans = [span for span in episode.timing.spans if span.wait is Wait.GENERATION]
        sizes = _sizes(episode.row, max(1, len(episode.row.prompt_ids) - shared(episode.row.prompt_ids, before)))
        turns += [Generated(s.start, s.end, read, new) for s, (read, new) in zip(spans, sizes, strict=False) if new]
        before = episode.row.prompt_ids
    return turns


def _sizes(row: TokenRow, opening: int) -> list[list[int]]:
    """Of each turn, the tokens that are new before it, and its own: within a row they alternate."""
    sizes = [[opening, 0]]
    before = 1
    for own in row.env_mask:
        if before and not own:
            sizes.append([0, 0])
        sizes[-1][own] += 1
        before = own
    return sizes


def fitted_server(batches: Sequence[Sequence[Generated]], max_sequences: int) -> ServerProfile:
    """The profile of one replica that fits the turns of batches which were played one after another on it.

    Raises CalibrationError.
    """
    rows, times = [], []
    for batch in batches:
        starts = sorted((turn.start, turn.read) for turn in batch)
        read_by = np.concatenate([[0], np.cumsum([read for _, read in starts])])
        begins = [start for start, _ in starts]
        counted = _Beside(batch)
        for turn in batch:
            while_it_ran = read_by[bisect.bisect(begins, turn.end)] - read_by[bisect.bisect_left(begins, turn.start)]
            steps = turn.new + 0.5
            rows.append([1.0, float(while_it_ran), steps, steps * (counted.mean(turn.start, turn.end) - 1)])
            times.append(turn.end - turn.start)
    if len(rows) < 2 * 4:
        raise CalibrationError(f"{len(rows)} turns are too few to calibrate with; play more episodes")
    weights = 1.0 / np.sqrt(np.maximum(times, 1e-4))
    from scipy.optimize import nnls  # half a second, which only a calibration need wait for

    (request, reading, step, beside), _ = nnls(np.array(rows) * weights[:, None], np.array(times) * weights)
    return ServerProfile(
        max_sequences=max_sequences,
        step_s=max(float(step), _SHORTEST_STEP_S),
        step_s_per_sequence=float(beside),
        prefill_tokens_per_s=1.0 / float(reading) if reading > 1.0 / _FASTEST_READER else _FASTEST_READER,
        network_s=float(request),
    )


class _Beside:
    """How many turns of a batch ran at a time."""

    def __init__(self, batch: Sequence[Generated]) -> None:
        changes = sorted([(turn.start, 1) for turn in batch] + [(turn.end, -1) for turn in batch])
        self._times = [at for at, _ in changes]
        self._running = np.cumsum([change for _, change in changes])
        # The integral of the count up to each change.
        gaps = np.diff(self._times)
        self._area = np.concatenate([[0.0], np.cumsum(gaps * self._running[:-1])])

    def mean(self, start: float, end: float) -> float:
        """The average over a stretch, itself included."""
        return float((self._until(end) - self._until(start)) / max(end - start, 1e-9))

    def _until(self, at: float) -> float:
        place = bisect.bisect_right(self._times, at) - 1
        if place < 0:
            return 0.0
        return float(self._area[place] + (at - self._times[place]) * self._running[place])


def fitted_environments(episodes: Iterable[Episode], profile: EnvironmentProfile) -> EnvironmentProfile:
    """The profile with the times of calls that were measured; those of few episodes at a time, so that none waited.

    A log-normal distribution through their median and through the quantiles one deviation to its sides: a single call
    that met a busy moment of the machine would decide their mean and their deviation. Raises CalibrationError.
    """
    timings = [episode.timing for episode in episodes if episode.timing is not None]
    calls = [*seconds_of(timings, Part.ENVIRONMENT), *seconds_of(timings, Part.JUDGING)]
    if not calls:
        raise CalibrationError("no call of an environment was measured")
    low, middle, high = np.quantile(np.maximum(calls, _SHORTEST_CALL_S), (0.1587, 0.5, 0.8413))
    variance = (math.log(high / low) / 2) ** 2
    mean = float(middle) * math.exp(variance / 2)
    return replace(profile, call_s=mean, spread=math.sqrt(math.expm1(variance)), network_s=0.0)


def scaled(profile: ServerProfile, factor: float) -> ServerProfile:
    """A server that takes `factor` times as long for everything."""
    if not 0.0 < factor < math.inf:
        raise CalibrationError(f"a server cannot be {factor:g} times as slow")
    return replace(
        profile,
        step_s=profile.step_s * factor,
        step_s_per_sequence=profile.step_s_per_sequence * factor,
        prefill_tokens_per_s=profile.prefill_tokens_per_s / factor,
        request_s=profile.request_s * factor,
        network_s=profile.network_s * factor,
    )
