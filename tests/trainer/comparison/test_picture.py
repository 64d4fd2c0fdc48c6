"""The picture of a comparison: all groups, bounded, of any text, and the curves of two runs."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tests.trainer.comparison.folders import BETTER, WORSE, make_records, make_run
from tests.trainer.comparison.test_comparison import compared, side
from tests.trainer.records import make_record
from trainer.comparison.comparison import compare_sides
from trainer.comparison.picture import MAX_DATABASES, picture, shown_databases, write_picture
from trainer.report.plots import learning_of, write_png

HOSTILE = "$\\frac{x}$<script>&\"'"


def rows(figure: Figure, panel: int) -> list[str]:
    return [label.get_text() for label in figure.axes[panel].get_yticklabels()]


def test_success_and_differences_by_difficulty_and_database(tmp_path: Path) -> None:
    figure = picture(compared(WORSE, BETTER))
    assert len(figure.axes) == 4
    assert rows(figure, 0) == ["all (40)", "easy (10)", "medium (10)", "hard (10)", "extra (10)"]
    assert rows(figure, 2) == ["db0 (10)", "db1 (10)", "db2 (10)", "db3 (10)"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["+50.0", "+60.0", "+60.0", "+40.0", "+40.0"]
    assert [text.get_text() for text in figure.axes[3].texts] == ["+50.0"] * 4
    write_png(figure, tmp_path / "a.png")
    write_png(picture(compared(WORSE, BETTER)), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_database_with_the_largest_gain_comes_first() -> None:
    comparison = compared(WORSE, make_records([i % 4 == 2 for i in range(40)]))
    assert list(shown_databases(comparison.by_database)) == ["db2", "db0", "db1", "db3"]


def test_many_databases_are_bounded_and_it_is_said() -> None:
    sizes = {f"db{i:02d}": 1 + (i < 3) for i in range(MAX_DATABASES + 20)}
    a, b = (
        [make_record(f"{db}-{i}", outcome, db) for db, size in sizes.items() for i in range(size)]
        for outcome in ("wrong", "correct")
    )
    comparison = compared(a, b)
    shown = shown_databases(comparison.by_database)
    assert len(shown) == MAX_DATABASES
    assert {"db00", "db01", "db02"} <= shown.keys(), "those with the most questions"
    assert f"the {MAX_DATABASES} with the most questions of {len(sizes)}" in picture(comparison).axes[2].get_xlabel()


def test_hostile_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    a, b = make_records([False] * 4, hardness=HOSTILE), make_records([True] * 4, hardness=HOSTILE)
    comparison = compare_sides(side(HOSTILE, a), side("b", b))
    write_picture(comparison, None, None, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def height(path: Path) -> int:
    size: int = struct.unpack(">I", path.read_bytes()[20:24])[0]
    return size


def test_two_runs_have_their_training_beside_each_other(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, {"before": WORSE, "after": BETTER, "step-000002": WORSE}, steps=steps)
        for name, steps in (("a", 4), ("b", 6))
    ]
    comparison = compared(WORSE, BETTER)
    curves = [learning_of(run, [(e.step, e.record) for e in run.episodes()]) for run in runs]
    axes = picture(comparison, curves).axes[4]
    assert axes.get_legend_handles_labels()[1] == [
        *("A: training episodes", "A: evaluations during training"),
        *("B: training episodes", "B: evaluations during training"),
    ]
    assert [np.size(line.get_xdata()) for line in axes.lines] == [4, 2, 6, 2]
    for name, others in (("two", runs), ("same", [runs[0], runs[0]]), ("one", [runs[0], None])):
        write_picture(comparison, others[0], others[1], tmp_path / f"{name}.png")
    assert height(tmp_path / "two.png") > height(tmp_path / "same.png") == height(tmp_path / "one.png")
