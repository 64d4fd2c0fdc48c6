"""What the curves of a run show: its metrics and the success of its episodes, over the training steps.

Promises: a log is read on from where it was left, however long it is. Every curve has at most `POINTS` points, a mean
is taken over all steps before points are left out, and what was not logged, or was not finite, is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.eval.curves import RollingPoint, rolling_mean, rolling_rates, thin, window_for
from trainer.eval.failure_kinds import FailureKind
from trainer.eval.run_files import Evaluation, metrics_row
from trainer.rollout.episodes import Outcome
from trainer.viewer.growing import Place, read_news

POINTS = 500
BARS = 40
"""Columns of the picture of failures."""
CHUNK = 50_000_000
RIGHT = "right"
"""Beside the kinds of failure: the episodes that are right."""


class MetricsLog:
    """A run's metrics.jsonl, as far as it has been written; `trouble` says which line is none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = Place()
        self._merged: dict[float, dict[str, float]] = {}
        self.trouble = ""

    def rows(self) -> list[dict[str, float]]:
        """Read what is new, and return one row per step; none where there is no log yet. Raises OSError."""
        more = self._path.is_file()
        while more:
            news = read_news(self._path, self._place, CHUNK)
            if news.restarted:
                self._merged.clear()
                self.trouble = ""
            for line in news.lines:
                try:
                    row = metrics_row(line)
                except ValueError as error:
                    self.trouble = f"{self._path.name}: {error}"
                    continue
                # Another row instead of a changed one: whoever asked before reads on in the old one.
                self._merged[row["step"]] = {**self._merged.get(row["step"], {}), **row}
            self._place, more = news.place, news.more
        return list(self._merged.values())


def series(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each metric over the steps, as logged and as a rolling mean; `steps` of its own where it has not all."""
    window = window_for(len(rows))
    steps = thin([row["step"] for row in rows], POINTS)
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    found = {}
    for name in names:
        known = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
        means = rolling_mean([value for _, value in known], window)
        points = thin(list(zip(known, means, strict=True)), POINTS)
        found[name] = {"values": [value for (_, value), _ in points], "means": [mean for _, mean in points]}
        if len(known) < len(rows):
            found[name]["steps"] = [step for (step, _), _ in points]
    return {"steps": steps, "window": window, "series": found}


def success(counts: Sequence[tuple[int, str, str, int]]) -> dict[str, Any]:
    """Return the success of training episodes, from how many there are of each step, database and outcome."""
    by_step: dict[int, list[tuple[bool, str]]] = defaultdict(list)
    for step, db_id, outcome, number in counts:
        if outcome != Outcome.FAILED:
            by_step[step] += [(outcome == Outcome.CORRECT, db_id)] * number
    window = window_for(len(by_step))
    return {"window": window, **_columns(rolling_rates(by_step, window, POINTS))}


def _columns(points: Sequence[RollingPoint]) -> dict[str, list[float]]:
    return {
        "steps": [p.step for p in points],
        "rate": [p.rate for p in points],
        "low": [p.interval.low for p in points],
        "high": [p.interval.high for p in points],
    }


def evaluation_point(evaluation: Evaluation) -> dict[str, Any]:
    """Return what is shown of an evaluation."""
    summary = evaluation.summary
    return {
        "label": evaluation.label,
        "step": evaluation.step,
        "during": evaluation.during,
        "policy": evaluation.policy,
        "data": evaluation.data,
        "split": evaluation.split,
        "rate": summary.success_rate,
        "low": summary.interval.low,
        "high": summary.interval.high,
        "episodes": summary.episodes,
        "failed": summary.failed,
        "reward": summary.mean_reward,
        "steps": summary.mean_steps,
    }


def failures_over(counts: Sequence[tuple[int, str | None, str, int]]) -> list[dict[str, Any]]:
    """Return how often each kind of failure occurred over training, from counts of each step, kind and outcome.

    Steps are put together so that there are at most BARS of them; episodes that the infrastructure lost are left out.
    """
    steps = sorted({step for step, _, outcome, _ in counts if outcome != Outcome.FAILED})
    if not steps:
        return []
    width = math.ceil((steps[-1] - steps[0] + 1) / BARS)
    bars: dict[int, dict[str, int]] = {}
    for step, kind, outcome, number in counts:
        if outcome != Outcome.FAILED:
            bar = bars.setdefault((step - steps[0]) // width, defaultdict(int))
            bar[RIGHT if kind is None else kind] += number
    return [
        {"first": (first := steps[0] + place * width), "last": min(first + width - 1, steps[-1]), "counts": bars[place]}
        for place in sorted(bars)
    ]


KINDS = [{"kind": kind.value, "meaning": kind.meaning} for kind in FailureKind]
"""The kinds of failure with their words, in the order in which they are tried."""
