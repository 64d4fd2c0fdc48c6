"""The pictures: the same for the same data, of any text, bounded."""

from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.trainer.records import make_record
from tests.trainer.report import folders
from tests.trainer.report.folders import BETTER, WORSE, make_records
from tests.trainer.report.test_comparison import compared, side
from trainer.eval.run_files import Evaluation, RunFolder, RunFolderError, episode_line
from trainer.eval.statistics import Interval, summarize, wilson
from trainer.report.comparison import compare_sides
from trainer.report.curves import TIMES, Learning, Mark, RollingPoint, Series, learning_of, series_of, times_of
from trainer.report.plots import (
    MAX_DATABASES,
    comparison_picture,
    learning_curve,
    series_grid,
    svg_uri,
    time_picture,
    write_comparison,
    write_learning_curve,
    write_png,
)

HOSTILE = "$\\frac{x}$<script>alert(1)</script>&\"'"
MARKS = [Mark(label, n / 50, wilson(n, 50)) for label, n in ((HOSTILE, 0), ("before", 12), ("after", 50))]


def make_points(steps: int) -> list[RollingPoint]:
    return [RollingPoint(i, 0.5, Interval(0.4, 0.6)) for i in range(1, steps + 1)]


def make_series(steps: int) -> Series:
    return series_of([{"step": i, "x": math.sin(i)} for i in range(steps)])["x"]


def make_times(steps: int) -> dict[str, list[float]]:
    return times_of(
        [
            {"step": float(step), **{f"time/{part}": 1 + math.sin(step + i) for i, part in enumerate(TIMES)}}
            for step in range(1, steps + 1)
        ]
    )


def pictures(steps: int) -> list[str]:
    learning = Learning(make_points(steps), 4, make_points(steps // 4), MARKS)
    return [
        svg_uri(learning_curve(learning)),
        svg_uri(series_grid({HOSTILE * i: make_series(steps) for i in range(4)})),
        svg_uri(time_picture(make_times(steps), 3)),
    ]


def test_pictures_are_svg_and_the_same_bytes_for_the_same_data() -> None:
    settings = dict(mpl.rcParams)
    drawn = pictures(40)
    for uri in drawn:
        kind, _, data = uri.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag == "{http://www.w3.org/2000/svg}svg"
    assert pictures(40) == drawn
    assert dict(mpl.rcParams) == settings


def test_a_long_run_stays_small() -> None:
    assert max(map(len, pictures(5_000))) < 200_000


def test_a_run_of_one_step_has_one_tick_and_a_point() -> None:
    figure = series_grid({"reward": Series([1.0], [0.5], [0.5])})
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1.0]
    assert axes.lines[-1].get_marker() == "o"


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_parts_of_the_time_are_stacked_and_negligible_ones_left_out(steps: int) -> None:
    times = make_times(steps) | {"push": [0.001] * steps}
    figure = time_picture(times, 1)
    (axes,) = figure.axes
    shown = [part for part in TIMES if part != "push"]
    assert axes.get_legend_handles_labels()[1] == shown
    tops = [np.asarray(part.get_paths()[0].vertices)[:, 1].max() for part in axes.collections]
    heights = [sum(times[part][step] for part in shown) for step in range(steps)]
    assert tops[-1] == pytest.approx(max(heights))
    assert tops == sorted(tops)


def make_run(path: Path, episodes: bool, evaluations: bool) -> RunFolder:
    folder = RunFolder.create(path, {})
    outcomes = ["correct", "wrong", "correct"] * 8
    records = [make_record(f"q{i}", outcome, f"db{i % 4}") for i, outcome in enumerate(outcomes)]
    if episodes:
        with folder.episodes_writer() as writer:
            for index, record in enumerate(records):
                writer.write_lines(episode_line(index // 8, record))
    if evaluations:
        evaluation = Evaluation("before", "model", "synthetic", "eval", "value", 0, summarize(records, {}))
        folder.write_evaluation(evaluation, records)
    return folder


def test_the_curve_of_evaluations_begins_before_training_and_ends_are_where_they_were(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", episodes=True, evaluations=True)
    before = folder.evaluations()[0]
    assert learning_of(folder, []).during == [], "two ends are no curve"
    records = folder.evaluation_episodes("before")
    for step in (100, 20):
        folder.write_evaluation(replace(before, label=f"step-{step:06d}", step=step, during=True), records)
    folder.write_evaluation(replace(before, label="after", step=20, order=2), records)
    learning = learning_of(folder)
    assert [p.step for p in learning.during] == [0, 20, 100]
    assert {(p.rate, p.interval) for p in learning.during} == {(before.summary.success_rate, before.summary.interval)}
    assert [(mark.label, mark.step) for mark in learning.marks] == [("before", None), ("after", 20)]
    (curve,) = learning_curve(learning).axes
    _, named = curve.get_legend_handles_labels()
    assert {"evaluations during training", "evaluation after: 66.7%"} <= set(named)


@pytest.mark.parametrize(("episodes", "evaluations"), [(True, True), (True, False), (False, True)])
def test_a_png_of_whole_and_partial_runs(tmp_path: Path, episodes: bool, evaluations: bool) -> None:
    folder = make_run(tmp_path / "run", episodes, evaluations)
    picture = tmp_path / "curve.png"
    write_learning_curve(folder.path, picture)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (1200, 480)


def test_png_of_an_empty_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", episodes=False, evaluations=False)
    with pytest.raises(RunFolderError, match="nothing to draw"):
        write_learning_curve(folder.path, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def rows(figure: Figure) -> dict[str, str]:
    """The rows of a comparison, each with its difference."""
    named = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return dict(zip(named, [text.get_text() for text in figure.axes[0].texts], strict=True))


def test_a_comparison_by_difficulty_and_database(tmp_path: Path) -> None:
    assert rows(comparison_picture(compared(WORSE, BETTER))) == {
        "all (40): 0.0% → 50.0%": "+50.0",
        **{f"{name} (10): 0.0% → 60.0%": "+60.0" for name in ("easy", "medium")},
        **{f"{name} (10): 0.0% → 40.0%": "+40.0" for name in ("hard", "extra")},
        **{f"db{i} (10): 0.0% → 50.0%": "+50.0" for i in range(4)},
    }
    for name in "ab":
        write_png(comparison_picture(compared(WORSE, BETTER)), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_database_with_the_largest_gain_comes_first_and_many_are_bounded() -> None:
    comparison = compared(WORSE, make_records([i % 4 == 2 for i in range(40)]))
    assert [name.split()[0] for name in rows(comparison_picture(comparison))][-4:] == ["db2", "db0", "db1", "db3"]
    sizes = {f"db{i:02d}": 1 + (i < 3) for i in range(MAX_DATABASES + 20)}
    a, b = (
        [make_record(f"{db}-{i}", outcome, db) for db, size in sizes.items() for i in range(size)]
        for outcome in ("wrong", "correct")
    )
    figure = comparison_picture(compared(a, b))
    shown = [name.split(":")[0] for name in rows(figure) if name.startswith("db")]
    assert len(shown) == MAX_DATABASES
    assert {"db00 (2)", "db01 (2)", "db02 (2)"} <= set(shown), "those with the most questions"
    assert f"the {MAX_DATABASES} databases with the most questions of {len(sizes)}" in figure.axes[0].get_xlabel()


def test_hostile_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    a, b = make_records([False] * 4, hardness=HOSTILE), make_records([True] * 4, hardness=HOSTILE)
    write_comparison(compare_sides(side(HOSTILE, a), side("b", b)), None, None, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def height(path: Path) -> int:
    size: int = struct.unpack(">I", path.read_bytes()[20:24])[0]
    return size


def test_two_runs_have_their_training_beside_each_other(tmp_path: Path) -> None:
    runs = [
        folders.make_run(tmp_path / name, {"before": WORSE, "after": BETTER, "step-000002": WORSE}, steps=steps)
        for name, steps in (("a", 4), ("b", 6))
    ]
    comparison = compared(WORSE, BETTER)
    axes = comparison_picture(comparison, [learning_of(run) for run in runs]).axes[1]
    assert axes.get_legend_handles_labels()[1] == [
        *("A: training episodes", "A: evaluations during training"),
        *("B: training episodes", "B: evaluations during training"),
    ]
    assert [np.size(line.get_xdata()) for line in axes.lines] == [4, 2, 6, 2]
    for name, others in (("two", runs), ("same", [runs[0], runs[0]]), ("one", [runs[0], None])):
        write_comparison(comparison, others[0], others[1], tmp_path / f"{name}.png")
    assert height(tmp_path / "two.png") > height(tmp_path / "same.png") == height(tmp_path / "one.png")
