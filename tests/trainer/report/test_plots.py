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

from tests.trainer.records import make_record
from trainer.eval.curves import RollingPoint
from trainer.eval.run_files import Evaluation, RunFolder, RunFolderError, episode_line
from trainer.eval.statistics import Interval, summarize, wilson
from trainer.report.plots import (
    TIMES,
    Learning,
    Mark,
    Series,
    learning_curve,
    learning_curve_png,
    learning_of,
    reward_curves,
    series_of,
    svg_uri,
    time_picture,
    times_of,
)

HOSTILE = "$\\frac{x}$<script>alert(1)</script>&\"'"
MARKS = [Mark(label, n / 50, wilson(n, 50)) for label, n in ((HOSTILE, 0), ("before", 12), ("after", 50))]


def make_points(steps: int) -> list[RollingPoint]:
    return [RollingPoint(i, 0.5, Interval(0.4, 0.6)) for i in range(1, steps + 1)]


def make_series(name: str, steps: int) -> Series:
    return Series(name, tuple(range(steps)), tuple(math.sin(i) for i in range(steps)))


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
        svg_uri(reward_curves([make_series(HOSTILE, steps)] * 4, 3)),
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
    figure = reward_curves([Series("reward", (1.0,), (0.5,))], 1)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1.0]
    assert axes.lines[-1].get_marker() == "o"


def test_series_leave_out_what_is_missing_or_not_finite() -> None:
    metrics = [{"step": 1, "a": 1.0}, {"step": 2, "a": math.nan}, {"step": 3, "b": math.inf}, {"step": 4, "a": 4.0}]
    assert series_of(metrics, {"a": "first", "b": "second", "c": "third"}) == [Series("first", (1, 4), (1.0, 4.0))]


def test_times_are_of_the_steps_that_logged_all_of_them() -> None:
    whole = {f"time/{part}": float(i) for i, part in enumerate(TIMES)}
    metrics = [{"step": 1, **whole}, {"step": 2, "reward": 1.0}, {"step": 3, **whole, "time/push": math.nan}]
    assert times_of(metrics) == {"step": [1]} | {part: [float(i)] for i, part in enumerate(TIMES)}
    assert times_of([]) == {"step": []} | {part: [] for part in TIMES}


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
    learning = learning_of(folder, [(e.step, e.record) for e in folder.episodes()])
    assert [p.step for p in learning.during] == [0, 20, 100]
    assert {(p.rate, p.interval) for p in learning.during} == {(before.summary.success_rate, before.summary.interval)}
    assert [(mark.label, mark.step) for mark in learning.marks] == [("before", None), ("after", 20)]
    curve, comparison = learning_curve(learning).axes
    _, labels = curve.get_legend_handles_labels()
    assert {"evaluations during training, 95% interval", "evaluation after: 66.7%"} <= set(labels)
    assert [label.get_text() for label in comparison.get_yticklabels()] == ["before", "after"]


@pytest.mark.parametrize(("episodes", "evaluations"), [(True, True), (True, False), (False, True)])
def test_a_png_of_whole_and_partial_runs(tmp_path: Path, episodes: bool, evaluations: bool) -> None:
    folder = make_run(tmp_path / "run", episodes, evaluations)
    picture = tmp_path / "curve.png"
    learning_curve_png(folder.path, picture)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (1200, 480)


def test_png_of_an_empty_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", episodes=False, evaluations=False)
    with pytest.raises(RunFolderError, match="nothing to draw"):
        learning_curve_png(folder.path, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
