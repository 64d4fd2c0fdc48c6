"""Curves over training steps, made fit to be drawn: smoothed, with bands, of a bounded number of points. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainer.eval.statistics import Interval, clustered_interval, successful
from trainer.rollout.episodes import EpisodeRecord, Outcome

T = TypeVar("T")

MAX_POINTS = 400
"""Points of a curve that a picture shows."""


@dataclass(frozen=True, slots=True)
class RollingPoint:
    """The success rate over a window of training steps that ends at `step`."""

    step: int
    rate: float
    interval: Interval


def window_for(steps: int) -> int:
    """Return how many training steps a rolling mean covers: a tenth of the run, 1 to 25."""
    return max(1, min(25, steps // 10))


def thin(rows: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return at most `limit` rows, evenly spaced, with the first and the last."""
    if len(rows) <= limit:
        return list(rows)
    return [rows[i] for i in np.linspace(0, len(rows) - 1, limit).round().astype(int)]


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over a trailing window, shorter at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return [float(x) for x in (sums[ends] - sums[starts]) / (ends - starts)]


def rolling_success(episodes: Sequence[tuple[int, EpisodeRecord]], window: int) -> list[RollingPoint]:
    """Return the success rate of training over a trailing window, one point per step that has judged episodes.

    `episodes` are (training step, episode), of which guided ones do not count; `window` counts logged steps. A point
    pools its window's episodes, with the database as the cluster; the first points have fewer steps behind them. Raises
    ValueError when window < 1.
    """
    by_step: dict[int, list[tuple[bool, str]]] = defaultdict(list)
    for step, record in episodes:
        if record.outcome != Outcome.FAILED and not record.given_steps:
            by_step[step].append((successful(record), record.db_id))
    return rolling_rates(by_step, window, len(by_step))


def rolling_rates(by_step: Mapping[int, Sequence[tuple[bool, str]]], window: int, limit: int) -> list[RollingPoint]:
    """The same of each step's outcomes, each with its database, at `limit` steps at most, evenly spaced."""
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    steps = sorted(by_step)
    points = []
    for index in thin(range(len(steps)), limit):
        pooled = [pair for step in steps[max(0, index + 1 - window) : index + 1] for pair in by_step[step]]
        outcomes, databases = [right for right, _ in pooled], [db_id for _, db_id in pooled]
        rate = sum(outcomes) / len(outcomes)
        points.append(RollingPoint(steps[index], rate, clustered_interval(outcomes, databases)))
    return points
