"""The pictures of runs and comparisons, by matplotlib: SVG inside the report, PNG files.

Guarantees:

1. No global state: figures are drawn with matplotlib's object API, without pyplot, and its settings are restored.
2. The same data gives the same bytes.
3. Text from data is never parsed as mathematics.
4. A curve is drawn with at most MAX_POINTS points, so that a picture's size is bounded.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trainer.eval.run_files import RunFolder, RunFolderError
from trainer.eval.statistics import percent
from trainer.report.comparison import Comparison, GroupDifference
from trainer.report.curves import (
    MAX_POINTS,
    TIMES,
    Learning,
    RollingPoint,
    Series,
    learning_of,
    rolling_mean,
    thin,
)
from trainer.report.tables import verdict

WIDTH, DPI = 10.0, 120
"""Inches of a picture, and pixels per inch of a PNG."""
INK, MUTED, GRID = "#1b2430", "#5d6878", "#d8dee6"
TRAIN, BEFORE, AFTER = "#0e8a6e", "#c2571a", "#1a66b5"
ENDS = {"before": BEFORE, "after": AFTER}
NEGLIGIBLE = 0.005
"""Share of the time below which a part is left out."""
ROW, CURVES = 0.3, 3.6
"""Inches of one row of a comparison, and of the curves of training."""
MAX_DATABASES = 40
"""Databases that a comparison shows, those with the most questions."""
NAME_LIMIT = 28
TITLE_COLUMNS = 130


def learning_curve(learning: Learning) -> Figure:
    """Draw the success of training with its band, and the evaluations: other players than the policy as lines."""
    figure = Figure(figsize=(WIDTH, 4.0), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    _draw_training(axes, learning, TRAIN, AFTER)
    last = max([1, *(p.step for p in (*learning.points[-1:], *learning.during[-1:]))])
    for mark in learning.marks:
        label = f"evaluation {mark.label}: {percent(mark.rate)}"
        if mark.label not in ENDS:
            axes.axhline(mark.rate, color=MUTED, linewidth=1.2, linestyle=":", label=label)
            continue
        step = (0 if mark.label == "before" else last) if mark.step is None else mark.step
        low, high = mark.rate - mark.interval.low, mark.interval.high - mark.rate
        # Not clipped, since it is on the border.
        style: dict[str, Any] = {
            "fmt": "o",
            "capsize": 4,
            "linewidth": 1.8,
            "clip_on": False,
            "color": ENDS[mark.label],
        }
        axes.errorbar([step], [mark.rate], yerr=[[low], [high]], label=label, **style)
    _legend(figure, *axes.get_legend_handles_labels(), place="outside upper left", columns=2)
    return figure


def series_grid(charts: Mapping[str, Series]) -> Figure:
    """Draw one small picture per series: every step faint, the rolling mean on top."""
    columns = min(len(charts), 3)
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(WIDTH, 2.3 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    for index, (title, series) in enumerate(charts.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _style(axes)
        axes.plot(series.steps, series.values, color=TRAIN, linewidth=0.8, alpha=0.35)
        axes.plot(series.steps, series.means, color=TRAIN, linewidth=2, marker=_marker(series.steps))
        axes.set_title(title, color=INK, fontsize=10, loc="left", parse_math=False)
        axes.xaxis.set_major_locator(_whole_steps(5))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    return figure


def time_picture(times: Mapping[str, Sequence[float]], window: int) -> Figure:
    """Draw the parts of the steps' time on top of each other, as rolling means; negligible ones are left out."""
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    _style(axes)
    total = sum(sum(times[part]) for part in TIMES)
    shown = {part: color for part, color in TIMES.items() if sum(times[part]) >= NEGLIGIBLE * total}
    limit = MAX_POINTS // 2  # there are more curves than elsewhere
    steps = thin(times["step"], limit)
    means = [thin(rolling_mean(times[part], window), limit) for part in shown]
    if len(steps) == 1:  # as wide as one step
        steps, means = [steps[0] - 0.5, steps[0] + 0.5], [values * 2 for values in means]
    axes.stackplot(steps, means, colors=list(shown.values()), labels=list(shown), linewidth=0)
    axes.margins(x=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(_whole_steps())
    axes.set_xlabel("training step", color=MUTED)
    axes.set_ylabel("seconds per step", color=MUTED)
    handles, labels = axes.get_legend_handles_labels()
    # In the order of the picture, from the top down.
    _legend(figure, handles[::-1], labels[::-1], place="outside right upper")
    return figure


def comparison_picture(comparison: Comparison, curves: Sequence[Learning] = ()) -> Figure:
    """Draw the paired difference of success by difficulty and database; `curves`: training of A and B.

    Databases are in the order of their differences, the largest gain first.
    """
    largest = sorted(comparison.by_database.items(), key=lambda item: -item[1].difference.n)[:MAX_DATABASES]
    databases = sorted(largest, key=lambda item: (-item[1].difference.mean, item[0]))
    rows = [("all", comparison.success), *comparison.by_difficulty.items(), *databases]
    heights = [1.0 + ROW * len(rows)] + ([CURVES] if curves else [])
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.9), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    hidden = len(comparison.by_database) - len(databases)
    note = (
        f"; the {len(databases)} databases with the most questions of {len(comparison.by_database)}" if hidden else ""
    )
    _draw_differences(panels[0], rows)
    panels[0].set_xlabel(f"B - A in points, paired, 95% interval; grey: includes 0{note}", color=MUTED)
    if curves:
        for letter, learning, color in zip("AB", curves, (BEFORE, AFTER), strict=True):
            _draw_training(panels[1], learning, color, color, f"{letter}: ")
        # Above the curves, where it covers nothing.
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
        panels[1].legend(frameon=False, labelcolor=INK, fontsize=9.5, **place)
    names = f"A  {comparison.a.name}\nB  {comparison.b.name}\n"
    title = names + "\n".join(textwrap.wrap(verdict(comparison), TITLE_COLUMNS))
    figure.suptitle(title, color=INK, fontsize=10, x=0.01, ha="left", parse_math=False)
    return figure


def svg_uri(figure: Figure) -> str:
    """Return the figure as the source of an image, from which no markup can reach the page."""
    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "sqlenv"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure, the same bytes for the same figure."""
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def write_learning_curve(run: Path, path: Path) -> None:
    """Write the learning curve as a PNG. Raises RunFolderError when the run has neither episodes nor evaluations."""
    learning = learning_of(RunFolder.open(run))
    if not learning.points and not learning.marks:
        raise RunFolderError(f"{run} has neither training episodes nor evaluations yet: nothing to draw")
    write_png(learning_curve(learning), path)


def write_comparison(comparison: Comparison, a: RunFolder | None, b: RunFolder | None, path: Path) -> None:
    """Write a comparison as a PNG; `a` and `b` are the runs that the sides belong to, where they belong to one."""
    curves = []
    if a is not None and b is not None and a.path.resolve() != b.path.resolve():
        curves = [learning_of(run) for run in (a, b)]
    # The curve of one run alone is what `sqlenv report` draws.
    write_png(comparison_picture(comparison, curves if all(c.points or c.during for c in curves) else []), path)


def _draw_training(axes: Any, learning: Learning, train: str, evaluated: str, prefix: str = "") -> None:
    """The success of training episodes with its band, and the evaluations during training with theirs."""
    _style(axes)
    window = f", mean of {learning.window} steps" if learning.window > 1 else ""
    for points, color, label, line in (
        (thin(learning.points), train, f"{prefix}training episodes{window}", "-"),
        (thin(learning.during), evaluated, f"{prefix}evaluations during training", "--"),
    ):
        if points:
            steps, marker = [p.step for p in points], "o" if line == "--" and len(points) < 50 else _marker(points)
            low, high = [p.interval.low for p in points], [p.interval.high for p in points]
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
            rates, style = [p.rate for p in points], {"linewidth": 2, "markersize": 4}
            axes.plot(steps, rates, line, color=color, marker=marker, label=label, **style)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(_whole_steps())
    axes.set_xlabel("training step; bands are 95% intervals", color=MUTED)
    axes.set_ylabel("success", color=MUTED)


def _draw_differences(axes: Any, rows: Sequence[tuple[str, GroupDifference]]) -> None:
    """A row per group of questions: its size, both success rates, and the difference with its interval."""
    _style(axes)
    axes.axvline(0, color=MUTED, linewidth=1)
    labels = []
    for row, (name, group) in enumerate(rows):
        paired, short = group.difference, name if len(name) <= NAME_LIMIT else f"{name[: NAME_LIMIT - 1]}…"
        significant = paired.interval.low > 0 or paired.interval.high < 0
        color = MUTED if not significant else AFTER if paired.mean > 0 else BEFORE
        axes.plot([paired.interval.low, paired.interval.high], [row, row], color=color, linewidth=2)
        axes.plot([paired.mean], [row], "o", color=color, markersize=5)
        # In the margin to the right, so that no interval runs through a number.
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9.5}
        axes.text(1.02, row, f"{100 * paired.mean:+.1f}", color=INK, **place)
        labels.append(f"{short} ({paired.n}): {percent(group.a.success_rate)} → {percent(group.b.success_rate)}")
    axes.set_yticks(range(len(rows)), labels, color=INK, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], place: str, columns: int = 1) -> None:
    """Outside of the axes, where it covers nothing."""
    if handles:
        legend = figure.legend(handles, labels, loc=place, ncols=columns, frameon=False, labelcolor=INK, fontsize=9.5)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _style(axes: Any) -> None:
    """Only the two spines that carry a scale, and a quiet grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=0)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _whole_steps(count: int = 9) -> MaxNLocator:
    """Ticks at whole steps only, one where there is but one."""
    return MaxNLocator(count, integer=True, min_n_ticks=1)


def _marker(points: Sequence[float] | Sequence[RollingPoint]) -> str | None:
    """A marker for a curve of a single point."""
    return "o" if len(points) == 1 else None
