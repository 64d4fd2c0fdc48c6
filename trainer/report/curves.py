"""The curves of a run: matplotlib draws them for the report and PNGs, the viewer's page from the same numbers.

Guarantees: a curve has at most MAX_POINTS points; a rolling mean is taken over all steps before points are left out;
values that were not logged, or are not finite, are left out. Pure, but for `learning_of`, which reads a run's folder.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import numpy as np

from trainer.eval.run_files import RunFolder, TrainingEpisode
from trainer.eval.statistics import Interval, clustered_interval
from trainer.rollout.episodes import Outcome

T = TypeVar("T")
Metrics = Sequence[Mapping[str, float]]
"""The rows of metrics.jsonl."""

MAX_POINTS = 400
RATIO = "sampling/importance_sampling_ratio"
CHARTS: Mapping[str, Sequence[tuple[str, str]]] = {
    "Reward": [
        ("reward", "weighted reward"),
        ("rollout/reward", "environment reward"),
        ("rewards/*/mean", ""),
        ("reward_std", "std of the weighted reward"),
    ],
    "Reward weights": [("reward_weights/*", "")],
    "Signal and exploration": [
        ("rollout/no_signal", "share of groups without signal"),
        ("gradient_share/correctness", "share of gradient from mixed groups"),
        ("rollout/exploration_entropy", "entropy of explorations"),
        ("entropy", "entropy per token, in nats"),
    ],
    "Policy": [
        ("kl", "KL divergence from the reference"),
        (f"{RATIO}/mean", "importance ratio"),
        (f"{RATIO}/max", "largest importance ratio"),
        ("sampling/sampling_logp_difference/mean", "logprob gap, engine to trainer"),
        ("clip_ratio/region_mean", "share of tokens clipped"),
        ("grad_norm", "gradient norm"),
        ("learning_rate", "learning rate"),
        ("loss", "loss"),
    ],
    "Episodes": [
        ("completions/mean_length", "tokens per episode"),
        ("completions/clipped_ratio", "share of episodes cut off"),
        ("rollout/steps", "steps per episode"),
        ("rollout/staleness/mean", "staleness, in updates"),
        ("rollout/failed", "errored episodes"),
    ],
}
"""Groups of charts: metrics, of which a `*` is part of a name, with their titles."""
TIMES = {
    "training": "#1a66b5",
    "push": "#8fb8e6",
    "generation": "#0e8a6e",
    "environment": "#e3a72f",
    "judging": "#c2571a",
    "queue": "#7d5ba6",
    "client": "#c3aed6",
    "other": "#9aa6b4",
}
"""The parts of a step's time, from the bottom of their chart up, with their colours."""


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over training steps: its finite values as logged, and their rolling mean."""

    steps: Sequence[float]
    values: Sequence[float]
    means: Sequence[float]


@dataclass(frozen=True, slots=True)
class RollingPoint:
    """The success rate over a window of training steps that ends at `step`, or that of an evaluation."""

    step: int
    rate: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class Mark:
    """An evaluation's success rate; `step`: when it was played, where that is known."""

    label: str
    rate: float
    interval: Interval
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """The success of training episodes, of evaluations during training, and of those before and after it.

    `window`: the number of training steps that one of the `points` covers.
    """

    points: Sequence[RollingPoint]
    window: int
    during: Sequence[RollingPoint]
    marks: Sequence[Mark]


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


def series_of(metrics: Metrics, names: Iterable[str] | None = None) -> dict[str, Series]:
    """Return the series of these metrics that have finite values; of all metrics by default."""
    window = window_for(len(metrics))
    found = {}
    for name in dict.fromkeys(key for row in metrics for key in row if key != "step") if names is None else names:
        known = [(row["step"], row[name]) for row in metrics if name in row and np.isfinite(row[name])]
        if known:
            steps, values = zip(*known, strict=True)
            points = thin(list(zip(steps, values, rolling_mean(values, window), strict=True)))
            found[name] = Series(*(list(column) for column in zip(*points, strict=True)))
    return found


def charts_of(group: str, metrics: Metrics) -> dict[str, str]:
    """Return the logged metrics of a group of charts, with their titles."""
    logged = dict.fromkeys(key for row in metrics for key in row)
    return {
        name: title or _title(name) for pattern, title in CHARTS[group] for name in logged if fnmatchcase(name, pattern)
    }


def _title(name: str) -> str:
    name = re.sub(r"^rewards/(?:reward_)?(.+)/mean$", r"reward for \1", name)
    return re.sub(r"^reward_weights/(?:reward_)?", "weight of ", name).replace("_", " ")


def times_of(metrics: Metrics) -> dict[str, list[float]]:
    """Return the seconds of each part of a step's time over the steps that logged them all, and these as "step"."""
    rows = [row for row in metrics if all(np.isfinite(row.get(f"time/{part}", np.nan)) for part in TIMES)]
    return {"step": [row["step"] for row in rows]} | {part: [row[f"time/{part}"] for row in rows] for part in TIMES}


Counts = Mapping[tuple[int, str, str], int]
"""How many training episodes there are of each step, database and outcome; guided ones are left out."""


def count_episodes(episodes: Iterable[TrainingEpisode]) -> Counts:
    """Count the training episodes that the policy played unguided."""
    return Counter((e.step, e.record.db_id, e.record.outcome) for e in episodes if not e.record.given_steps)


def rolling_success(counts: Counts, window: int | None = None) -> tuple[list[RollingPoint], int]:
    """Return the success rate of training over a trailing window of logged steps, and the window.

    A point pools the judged episodes of its window, with the database as the cluster; the first points have fewer steps
    behind them. The window is by default that of `window_for`. Raises ValueError when it is below 1.
    """
    by_step: dict[int, list[tuple[bool, str]]] = defaultdict(list)
    for (step, db_id, outcome), number in counts.items():
        if outcome != Outcome.FAILED:
            by_step[step] += [(outcome == Outcome.CORRECT, db_id)] * number
    window = window_for(len(by_step)) if window is None else window
    if window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    steps = sorted(by_step)
    points = []
    for index in thin(range(len(steps))):
        pooled = [pair for step in steps[max(0, index + 1 - window) : index + 1] for pair in by_step[step]]
        outcomes, databases = zip(*pooled, strict=True)
        rate = sum(outcomes) / len(outcomes)
        points.append(RollingPoint(steps[index], rate, clustered_interval(outcomes, databases)))
    return points, window


def learning_of(folder: RunFolder, episodes: Iterable[TrainingEpisode] | None = None) -> Learning:
    """Return the learning curve of a run; `episodes`: its training episodes, where they have been read already."""
    ends = folder.evaluations()
    # The evaluations of a run are on one set of questions; the curve begins with the one before training.
    first = [(0, e) for e in ends if e.label == "before"]
    during = folder.evaluations_during()
    return Learning(
        *rolling_success(count_episodes(folder.episodes(turns=False) if episodes is None else episodes)),
        [RollingPoint(s, e.summary.success_rate, e.summary.interval) for s, e in (*first, *during)] if during else [],
        [Mark(e.label, e.summary.success_rate, e.summary.interval, e.step) for e in ends],
    )
