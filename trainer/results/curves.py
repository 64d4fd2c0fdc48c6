"""Curves over training steps, made fit to be drawn: smoothed, and of a bounded number of points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

MAX_POINTS = 400
"""Points of a curve that a picture shows."""


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
