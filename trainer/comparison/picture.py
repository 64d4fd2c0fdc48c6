"""A comparison as one picture: success side by side and the paired difference, by difficulty and by database.

Of two runs, their success during training too. As `report.plots` promises: no global state, the same bytes for the same
data, and text from data is never read as mathematics.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trainer.comparison.comparison import Comparison, GroupDifference
from trainer.comparison.text import verdict
from trainer.eval.curves import thin
from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import Interval
from trainer.report.plots import (
    AFTER,
    BEFORE,
    DPI,
    INK,
    MUTED,
    Learning,
    draw_band,
    learning_of,
    steps_of,
    style_axes,
    whole_steps,
    write_png,
)

A_COLOR, B_COLOR = BEFORE, AFTER
WIDTH = 11.0
ROW, HEAD, CURVES = 0.36, 1.0, 3.6
"""Inches of one row of a panel, of what is around its rows, and of the curves of training."""
MAX_DATABASES = 40
"""Databases that are drawn, those with the most questions."""
NAME_LIMIT = 28
TITLE_COLUMNS = 155
Groups = Mapping[str, GroupDifference]


def write_picture(comparison: Comparison, a: RunFolder | None, b: RunFolder | None, path: Path) -> None:
    """Write it as a PNG; `a` and `b` are the runs that the sides are of, where they are."""
    curves = []
    if a is not None and b is not None and a.path.resolve() != b.path.resolve():
        curves = [learning_of(run, [(e.step, e.record) for e in run.episodes(turns=False)]) for run in (a, b)]
    # One run's curve alone is what `sqlenv report` draws.
    write_png(picture(comparison, curves if all(c.points or c.during for c in curves) else []), path)


def picture(comparison: Comparison, curves: Sequence[Learning] = ()) -> Figure:
    """Draw it; `curves` are the training of A and of B, or nothing."""
    groups = {"all": comparison.success, **comparison.by_difficulty}
    databases = shown_databases(comparison.by_database)
    heights = [HEAD + ROW * len(groups), HEAD + ROW * len(databases), *([CURVES] if curves else [])]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.9), dpi=DPI, layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(6, 5), height_ratios=heights)
    for row, panel in enumerate((groups, databases)):
        left, right = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        _draw_rates(left, panel)
        _draw_differences(right, panel)
    hidden = len(comparison.by_database) - len(databases)
    note = f"; the {len(databases)} with the most questions of {len(comparison.by_database)}" if hidden else ""
    left.set_xlabel(f"success by database{note}", color=MUTED)
    right.set_xlabel("B - A in points; within a database, questions count as independent", color=MUTED)
    if curves:
        _draw_curves(figure.add_subplot(grid[2, :]), curves)
    figure.suptitle(
        "\n".join(textwrap.wrap(verdict(comparison), TITLE_COLUMNS)), color=INK, fontsize=10, x=0.01, ha="left"
    )
    _name_sides(figure, comparison)
    return figure


def shown_databases(by_database: Groups) -> dict[str, GroupDifference]:
    """Return those that are drawn, the largest gain first."""
    largest = sorted(by_database.items(), key=lambda item: -item[1].difference.n)[:MAX_DATABASES]
    return dict(sorted(largest, key=lambda item: (-item[1].difference.mean, item[0])))


def _name_sides(figure: Figure, comparison: Comparison) -> None:
    handles = [figure.axes[0].plot([], [], "o-", color=color)[0] for color in (A_COLOR, B_COLOR)]
    names = [f"A  {comparison.a.name}", f"B  {comparison.b.name}"]
    legend = figure.legend(handles, names, loc="outside lower left", frameon=False, labelcolor=INK, fontsize=9.5)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_rates(axes: Any, groups: Groups) -> None:
    style_axes(axes)
    for row, group in enumerate(groups.values()):
        for side, color, offset in ((group.a, A_COLOR, -0.15), (group.b, B_COLOR, 0.15)):
            _draw_interval(axes, row + offset, side.success_rate, side.interval, color)
    axes.set_xlim(-0.02, 1.02)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    labels = [f"{_short(name)} ({group.difference.n})" for name, group in groups.items()]
    axes.set_yticks(range(len(groups)), labels, color=INK, parse_math=False)
    _rows(axes, len(groups))
    axes.set_xlabel("success, 95% interval", color=MUTED)


def _draw_differences(axes: Any, groups: Groups) -> None:
    style_axes(axes)
    axes.axvline(0, color=MUTED, linewidth=1)
    for row, group in enumerate(groups.values()):
        paired = group.difference
        sure = paired.interval.low > 0 or paired.interval.high < 0
        color = MUTED if not sure else B_COLOR if paired.mean > 0 else A_COLOR
        _draw_interval(axes, row, paired.mean, paired.interval, color)
        # In the margin to the right, so that no interval runs through a number.
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 9.5}
        axes.text(1.02, row, f"{100 * paired.mean:+.1f}", color=INK, **place)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    axes.set_yticks(range(len(groups)), [""] * len(groups))
    _rows(axes, len(groups))
    axes.set_xlabel("B - A in points, paired, 95% interval; grey: includes 0", color=MUTED)


def _draw_interval(axes: Any, y: float, value: float, interval: Interval, color: str) -> None:
    axes.plot([interval.low, interval.high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
    axes.plot([value], [y], "o", color=color, markersize=5, clip_on=False)


def _rows(axes: Any, count: int) -> None:
    axes.set_ylim(count - 0.5, -0.5)
    axes.grid(False, axis="y")


def _draw_curves(axes: Any, curves: Sequence[Learning]) -> None:
    style_axes(axes)
    for letter, learning, color in zip("AB", curves, (A_COLOR, B_COLOR), strict=True):
        points, during = thin(learning.points), thin(learning.during)
        if points:
            draw_band(axes, points, color, "_")
            window = f", mean of {learning.window} steps" if learning.window > 1 else ""
            label = f"{letter}: training episodes{window}"
            marker = "o" if len(points) == 1 else None
            axes.plot(steps_of(points), [p.rate for p in points], color=color, linewidth=2, marker=marker, label=label)
        if during:
            label = f"{letter}: evaluations during training"
            axes.plot(steps_of(during), [p.rate for p in during], "o--", color=color, markersize=4, label=label)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(whole_steps())
    axes.set_xlabel("training step; bands are 95% intervals", color=MUTED)
    axes.set_ylabel("success", color=MUTED)
    # Above the curves, where it covers nothing.
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4}
    axes.legend(frameon=False, labelcolor=INK, fontsize=9.5, **place)


def _short(name: str) -> str:
    return name if len(name) <= NAME_LIMIT else f"{name[: NAME_LIMIT - 1]}…"
