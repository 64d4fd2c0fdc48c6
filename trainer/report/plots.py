"""The pictures of a training run: SVG for the report, one PNG for a README.

Promises:

1. No global state: figures are drawn with matplotlib's object API, without pyplot, and its settings are restored.
2. The same data gives the same bytes.
3. Text from data is never read as mathematics.
4. A curve is drawn with at most MAX_POINTS points, so that a picture's size is bounded.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trainer.eval.curves import MAX_POINTS, RollingPoint, rolling_mean, rolling_success, thin, window_for
from trainer.eval.run_files import RunFolder, RunFolderError
from trainer.eval.statistics import Interval
from trainer.rollout.episodes import EpisodeRecord

WIDTH, HEIGHT, DPI = 10.0, 4.0, 120
"""Inches of the learning curve, and pixels per inch of its PNG."""
INK, MUTED, GRID = "#1b2430", "#5d6878", "#d8dee6"
TRAIN, BEFORE, AFTER = "#0e8a6e", "#c2571a", "#1a66b5"

TIMES = {
    "training": "#1a66b5",
    "push": "#8fb8e6",
    "generation": "#0e8a6e",
    "environment": "#e3a72f",
    "judging": "#c2571a",
    "queue": "#7d5ba6",
    "client": "#c3aed6",
    "other": "#cfd6de",
}
"""The parts of a step's time, from the bottom of their picture up, with their colours."""
NEGLIGIBLE = 0.005
"""Share of the time below which a part is left out."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An evaluation's success rate, to be drawn with its interval; at `step`, where that is known."""

    label: str
    rate: float
    interval: Interval
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """What the learning curve shows: training episodes, evaluations during training, and those at both ends.

    `window` is the number of training steps that one of the `points` is about.
    """

    points: Sequence[RollingPoint]
    window: int
    during: Sequence[RollingPoint]
    marks: Sequence[Mark]


def learning_of(folder: RunFolder, episodes: Sequence[tuple[int, EpisodeRecord]]) -> Learning:
    """Read what the learning curve shows from a run's folder; `episodes` are its training episodes with their steps."""
    window = window_for(len({step for step, _ in episodes}))
    ends = folder.evaluations()
    # The evaluations of a run are on one set of questions; the curve begins with the one before training.
    first = [(0, e) for e in ends if e.label == "before"]
    during = folder.evaluations_during()
    return Learning(
        rolling_success(episodes, window),
        window,
        [RollingPoint(s, e.summary.success_rate, e.summary.interval) for s, e in (*first, *during)] if during else [],
        [Mark(e.label, e.summary.success_rate, e.summary.interval, e.step) for e in ends],
    )


@dataclass(frozen=True, slots=True)
class Series:
    """One number over the training steps; the values are finite."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


def learning_curve(learning: Learning) -> Figure:
    """Draw the training success with its band, and the evaluations; beside it these, with their intervals."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    count = 2 if learning.marks else 1
    panels = list(figure.subplots(1, count, width_ratios=(5, 3)[:count], squeeze=False).flat)
    for axes in panels:
        style_axes(axes)
    _draw_learning_curve(panels[0], learning)
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        # Above the picture, where it covers nothing.
        place = {"loc": "outside upper left", "ncols": 2, "frameon": False}
        figure.legend(handles, labels, labelcolor=INK, fontsize=9.5, **place)
    if learning.marks:
        _draw_comparison(panels[1], learning.marks)
    return figure


def reward_curves(series: Sequence[Series], window: int) -> Figure:
    """Draw one small picture per series: every step faint, the rolling mean on top."""
    columns = min(len(series), 3)
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(WIDTH, 2.3 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    for index, one in enumerate(series):
        axes = figure.add_subplot(rows, columns, index + 1)
        style_axes(axes)
        _draw_series(axes, one, window)
    return figure


def times_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the seconds of each part of a step's time over the steps that logged them, and these as "step"."""
    rows = [row for row in metrics if all(np.isfinite(row.get(f"time/{part}", np.nan)) for part in TIMES)]
    return {"step": [row["step"] for row in rows]} | {part: [row[f"time/{part}"] for row in rows] for part in TIMES}


def time_picture(times: Mapping[str, Sequence[float]], window: int) -> Figure:
    """Draw the parts of the steps' time on top of each other, as rolling means; negligible ones are left out."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    style_axes(axes)
    whole = sum(sum(times[part]) for part in TIMES)
    shown = {part: color for part, color in TIMES.items() if sum(times[part]) >= NEGLIGIBLE * whole}
    limit = MAX_POINTS // 2  # there are more curves than elsewhere
    steps = thin(times["step"], limit)
    means = [thin(rolling_mean(times[part], window), limit) for part in shown]
    if len(steps) == 1:  # as wide as one step
        steps, means = [steps[0] - 0.5, steps[0] + 0.5], [values * 2 for values in means]
    axes.stackplot(steps, means, colors=list(shown.values()), labels=list(shown), linewidth=0)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(whole_steps())
    axes.set_xlabel("training step", color=MUTED)
    axes.set_ylabel("seconds a step", color=MUTED)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the picture, from the top down.
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, labelcolor=INK, fontsize=9.5)
    return figure


def svg_uri(figure: Figure) -> str:
    """Return the figure as the source of an image, in which nothing of it can reach the page."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sqlenv"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def learning_curve_png(run: Path, path: Path) -> None:
    """Write the learning curve as a PNG. Raises RunFolderError when the run has neither episodes nor evaluations."""
    folder = RunFolder.open(run)
    learning = learning_of(folder, [(e.step, e.record) for e in folder.episodes(turns=False)])
    if not learning.points and not learning.marks:
        raise RunFolderError(f"{run} has neither training episodes nor evaluations yet: nothing to draw")
    write_png(learning_curve(learning), path)


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure, the same bytes for the same figure."""
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def series_of(metrics: Sequence[Mapping[str, float]], keys: Mapping[str, str]) -> list[Series]:
    """Return the series of the logged keys that have finite values; `keys` maps a key to the name it is shown by."""
    result = []
    for key, name in keys.items():
        pairs = [(row["step"], row[key]) for row in metrics if key in row and np.isfinite(row[key])]
        if pairs:
            steps, values = zip(*pairs, strict=True)
            result.append(Series(name, steps, values))
    return result


def whole_steps(count: int = 9) -> MaxNLocator:
    """Ticks at whole steps alone, one where there is but one."""
    return MaxNLocator(count, integer=True, min_n_ticks=1)


def style_axes(axes: Any) -> None:
    """Only the two spines that carry a scale, and a quiet grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_learning_curve(axes: Any, learning: Learning) -> None:
    points = thin(learning.points)
    if points:
        window = learning.window
        draw_band(axes, points, TRAIN, "95% interval")
        label = "training episodes" + (f", mean of {window} steps" if window > 1 else "")
        marker = "o" if len(points) == 1 else None
        axes.plot(steps_of(points), [p.rate for p in points], color=TRAIN, linewidth=2, marker=marker, label=label)
    during = thin(learning.during)
    if during:
        draw_band(axes, during, AFTER, "_")
        label = "evaluations during training, 95% interval"
        style = {"linewidth": 1.6, "marker": "o", "markersize": 4 if len(during) < 50 else 0}
        axes.plot(steps_of(during), [p.rate for p in during], color=AFTER, label=label, **style)
    last = max([1, *(p.step for p in (*points[-1:], *during[-1:]))])
    for mark in learning.marks:
        if mark.label in ("before", "after"):
            end = 0 if mark.label == "before" else last
            _draw_mark(axes, end if mark.step is None else mark.step, mark)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(whole_steps())
    axes.set_xlabel("training step", color=MUTED)
    axes.set_ylabel("success", color=MUTED)


def draw_band(axes: Any, points: Sequence[RollingPoint], color: str, label: str) -> None:
    """The intervals of a curve; a label that begins with `_` is in no legend."""
    low, high = [p.interval.low for p in points], [p.interval.high for p in points]
    axes.fill_between(steps_of(points), low, high, color=color, alpha=0.18, linewidth=0, label=label)


def steps_of(points: Sequence[RollingPoint]) -> list[int]:
    """The steps of a curve's points."""
    return [p.step for p in points]


def _color(mark: Mark) -> str:
    return {"before": BEFORE, "after": AFTER}.get(mark.label, MUTED)


def _draw_mark(axes: Any, x: float, mark: Mark) -> None:
    """A point with its error bar; not clipped, since it stands on the border."""
    low, high = mark.rate - mark.interval.low, mark.interval.high - mark.rate
    style = {"fmt": "o", "capsize": 4, "linewidth": 1.8, "clip_on": False}
    label = f"evaluation {mark.label}: {mark.rate:.1%}"
    axes.errorbar([x], [mark.rate], yerr=[[low], [high]], color=_color(mark), label=label, **style)


def _draw_comparison(axes: Any, marks: Sequence[Mark]) -> None:
    for row, mark in enumerate(marks):
        color = _color(mark)
        axes.barh([row], [mark.rate], height=0.5, color=color, alpha=0.28, linewidth=0)
        axes.plot([mark.interval.low, mark.interval.high], [row, row], color=color, linewidth=2)
        axes.plot([mark.rate], [row], "o", color=color)
        # In the margin to the right, so that no interval runs through a number.
        axes.text(1.03, row, f"{mark.rate:.1%}", color=INK, va="center", fontsize=10)
    axes.set_xlim(0, 1.18)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_yticks(range(len(marks)), [m.label for m in marks], color=INK, parse_math=False)
    axes.set_ylim(max(len(marks), 3) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel("success, 95% interval", color=MUTED)


def _draw_series(axes: Any, series: Series, window: int) -> None:
    rows = list(zip(series.steps, series.values, rolling_mean(series.values, window), strict=True))
    steps, values, means = zip(*thin(rows), strict=True)
    axes.plot(steps, values, color=TRAIN, linewidth=0.8, alpha=0.35)
    axes.plot(steps, means, color=TRAIN, linewidth=2, marker="o" if len(steps) == 1 else None)
    axes.set_title(series.name, color=INK, fontsize=10, loc="left", parse_math=False)
    axes.xaxis.set_major_locator(whole_steps(5))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
