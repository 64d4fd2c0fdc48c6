"""The pictures of a training run: inline SVG for the report, one PNG for a README.

Promises:

1. No global state: figures are drawn with matplotlib's object API, without pyplot, and its settings are restored.
2. The SVG is one `<svg>` element without scripts, links, ids shared between pictures or numbers of its own time:
   the same data gives the same bytes. Its colours are CSS variables (`--ink`, `--muted`, `--grid`, `--train`,
   `--before`, `--after`), so that the page decides on light and dark.
3. Text from data is never read as mathematics or markup.
4. A curve is drawn with at most MAX_POINTS points, so that a picture's size is bounded.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trainer.results.run_files import RunFolder, RunFolderError
from trainer.results.statistics import Interval, RollingPoint, rolling_success
from trainer.rollout.episodes import EpisodeRecord

MAX_POINTS = 400
PNG_WIDTH, PNG_HEIGHT, PNG_DPI = 1200, 480, 120

T = TypeVar("T")


class Size(Enum):
    """Widths of a picture in inches: a page's column, and a phone's."""

    WIDE = 10.0
    NARROW = 4.2


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


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a picture."""

    ink: str
    muted: str
    grid: str
    train: str
    before: str
    after: str

    def of(self, label: str) -> str:
        """Return the colour of an evaluation."""
        return {"before": self.before, "after": self.after}.get(label, self.muted)


PRINT = Palette("#1b2430", "#5d6878", "#d8dee6", "#0e8a6e", "#c2571a", "#1a66b5")
# Stand-ins that matplotlib writes out as they are; `_svg` turns each into the CSS variable of its name.
_STAND_INS = Palette("#000001", "#000002", "#000003", "#000004", "#000005", "#000006")
_NAMES = ("ink", "muted", "grid", "train", "before", "after")


def window_for(steps: int) -> int:
    """Return how many training steps a rolling mean covers: a tenth of the run, 1 to 25."""
    return max(1, min(25, steps // 10))


def learning_curve(learning: Learning, size: Size) -> str:
    """Return the training success with its band, and the evaluations before, during and after it."""
    height = 3.6 if size is Size.WIDE else 3.9
    figure, axes = _figure(size.value, height, _STAND_INS)
    _draw_learning_curve(axes, learning, _STAND_INS)
    _legend(figure, axes, 2 if size is Size.WIDE else 1, _STAND_INS)
    return _svg(figure, f"curve-{size.name}", "Success rate over the training steps")


def comparison(marks: Sequence[Mark], size: Size) -> str:
    """Return the evaluations, one row each, with their intervals."""
    figure, axes = _figure(size.value, 0.75 + 0.42 * max(len(marks), 3), _STAND_INS)
    _draw_comparison(axes, marks, _STAND_INS)
    return _svg(figure, f"comparison-{size.name}", "Success rates of the evaluations with 95% intervals")


def reward_curves(series: Sequence[Series], window: int, size: Size) -> str:
    """Return one small picture per series: every step faint, the rolling mean on top."""
    columns = min(len(series), 3 if size is Size.WIDE else 1)
    rows = -(-len(series) // columns)
    figure = Figure(figsize=(size.value, 2.3 * rows), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    for index, one in enumerate(series):
        axes = figure.add_subplot(rows, columns, index + 1)
        _style(axes, _STAND_INS)
        _draw_series(axes, one, window, _STAND_INS)
    return _svg(figure, f"rewards-{size.name}", "Rewards over the training steps")


def learning_curve_png(run: Path, path: Path) -> None:
    """Write a 1200 x 480 PNG: the learning curve, beside it the evaluations with their intervals.

    Raises RunFolderError when the run has neither training episodes nor evaluations.
    """
    folder = RunFolder.open(run)
    learning = learning_of(folder, [(e.step, e.record) for e in folder.episodes(turns=False)])
    marks = learning.marks
    if not learning.points and not marks:
        raise RunFolderError(f"{run} has neither training episodes nor evaluations yet: nothing to draw")
    figure = Figure(figsize=(PNG_WIDTH / PNG_DPI, PNG_HEIGHT / PNG_DPI), dpi=PNG_DPI, layout="constrained")
    panels = list(figure.subplots(1, 2 if marks else 1, width_ratios=(5, 3) if marks else (1,), squeeze=False).flat)
    for axes in panels:
        _style(axes, PRINT)
    _draw_learning_curve(panels[0], learning, PRINT)
    _legend(figure, panels[0], 2, PRINT)
    if marks:
        _draw_comparison(panels[1], marks, PRINT)
    figure.patch.set_facecolor("white")
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


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


def series_of(metrics: Sequence[Mapping[str, float]], keys: Mapping[str, str]) -> list[Series]:
    """Return the series of the logged keys that have finite values; `keys` maps a key to the name it is shown by."""
    result = []
    for key, name in keys.items():
        pairs = [(row["step"], row[key]) for row in metrics if key in row and np.isfinite(row[key])]
        if pairs:
            steps, values = zip(*pairs, strict=True)
            result.append(Series(name, steps, values))
    return result


def _figure(width: float, height: float, palette: Palette) -> tuple[Any, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    _style(axes, palette)
    return figure, axes


def _style(axes: Any, palette: Palette) -> None:
    """Only the two spines that carry a scale, a quiet grid, no background."""
    axes.patch.set_visible(False)
    axes.figure.patch.set_visible(False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.grid)
    axes.tick_params(colors=palette.muted, labelsize=9.5, length=0)
    axes.grid(True, color=palette.grid, linewidth=0.6)
    axes.set_axisbelow(True)


def _legend(figure: Any, axes: Any, columns: int, palette: Palette) -> None:
    """Above the picture, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            labelcolor=palette.ink,
            fontsize=9.5,
        )


def _draw_learning_curve(axes: Any, learning: Learning, palette: Palette) -> None:
    points = thin(learning.points)
    if points:
        window = learning.window
        _draw_band(axes, points, palette.train, "95% interval")
        label = "training episodes" + (f", mean of {window} steps" if window > 1 else "")
        marker = "o" if len(points) == 1 else None
        axes.plot(
            _steps(points), [p.rate for p in points], color=palette.train, linewidth=2, marker=marker, label=label
        )
    during = thin(learning.during)
    if during:
        _draw_band(axes, during, palette.after, "_")
        label = "evaluations during training, 95% interval"
        style = {"linewidth": 1.6, "marker": "o", "markersize": 4 if len(during) < 50 else 0}
        axes.plot(_steps(during), [p.rate for p in during], color=palette.after, label=label, **style)
    last = max([1, *(p.step for p in (*points[-1:], *during[-1:]))])
    for mark in learning.marks:
        if mark.label in ("before", "after"):
            end = 0 if mark.label == "before" else last
            x = end if mark.step is None else mark.step
            _draw_mark(axes, x, mark, palette, f"evaluation {mark.label}: {mark.rate:.1%}")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("training step", color=palette.muted)
    axes.set_ylabel("success", color=palette.muted)


def _draw_band(axes: Any, points: Sequence[RollingPoint], color: str, label: str) -> None:
    low, high = [p.interval.low for p in points], [p.interval.high for p in points]
    axes.fill_between(_steps(points), low, high, color=color, alpha=0.18, linewidth=0, label=label)


def _steps(points: Sequence[RollingPoint]) -> list[int]:
    return [p.step for p in points]


def _draw_mark(axes: Any, x: float, mark: Mark, palette: Palette, label: str) -> None:
    """A point with its error bar; not clipped, since it stands on the border."""
    low, high = mark.rate - mark.interval.low, mark.interval.high - mark.rate
    color = palette.of(mark.label)
    axes.errorbar(
        [x],
        [mark.rate],
        yerr=[[low], [high]],
        fmt="o",
        color=color,
        capsize=4,
        linewidth=1.8,
        clip_on=False,
        label=label,
    )


def _draw_comparison(axes: Any, marks: Sequence[Mark], palette: Palette) -> None:
    for row, mark in enumerate(marks):
        color = palette.of(mark.label)
        axes.barh([row], [mark.rate], height=0.5, color=color, alpha=0.28, linewidth=0)
        axes.plot([mark.interval.low, mark.interval.high], [row, row], color=color, linewidth=2)
        axes.plot([mark.rate], [row], "o", color=color)
        # In the margin to the right, so that no interval runs through a number.
        axes.text(1.03, row, f"{mark.rate:.1%}", color=palette.ink, va="center", fontsize=10)
    axes.set_xlim(0, 1.18)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_yticks(range(len(marks)), [m.label for m in marks], color=palette.ink, parse_math=False)
    axes.set_ylim(max(len(marks), 3) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel("success, 95% interval", color=palette.muted)


def _draw_series(axes: Any, series: Series, window: int, palette: Palette) -> None:
    rows = list(zip(series.steps, series.values, rolling_mean(series.values, window), strict=True))
    steps, values, means = zip(*thin(rows), strict=True)
    axes.plot(steps, values, color=palette.train, linewidth=0.8, alpha=0.35)
    axes.plot(steps, means, color=palette.train, linewidth=2)
    axes.set_title(series.name, color=palette.ink, fontsize=10, loc="left", parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _svg(figure: Any, salt: str, title: str) -> str:
    """Return the figure as an element for an HTML page: no XML prologue, no metadata, no fixed size or font."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    body = text[text.index(">") + 1 :]
    # matplotlib's style sheet holds one rule, for `*`: inside a page it would be the page's.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    # Only tags are rewritten: what stands between them may be text from data.
    body = re.sub(r"<[^<>]+>", _page_tag, body)
    return f'<svg {box.group()} role="img" aria-label="{title}">{body}'


def _page_tag(match: re.Match[str]) -> str:
    """Fit one of matplotlib's tags into a page: its variables, its font, no ids but the hashed ones it refers to."""
    tag = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", match.group()).replace("xlink:href", "href")
    tag = re.sub(r"font-family: [^;\"]*; ?", "", tag)
    tag = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", tag)
    for name in _NAMES:
        tag = tag.replace(getattr(_STAND_INS, name), f"var(--{name})")
    return tag
