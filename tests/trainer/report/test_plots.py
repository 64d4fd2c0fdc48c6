"""The pictures: safe inside a page, the same for the same data, bounded."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report.plots import (
    MAX_POINTS,
    PNG_HEIGHT,
    PNG_WIDTH,
    Learning,
    Mark,
    Series,
    Size,
    comparison,
    learning_curve,
    learning_curve_png,
    learning_of,
    reward_curves,
    rolling_mean,
    series_of,
    thin,
    window_for,
)
from trainer.results.run_files import Evaluation, RunFolder, RunFolderError
from trainer.results.statistics import Interval, RollingPoint, summarize, wilson
from trainer.rollout.episodes import EpisodeRecord

HOSTILE = '$\\frac{x}$<script>alert(1)</script>&"\' id="figure_1" #000001'
MARKS = [Mark(label, n / 50, wilson(n, 50)) for label, n in (("random", 0), ("before", 12), ("after", 50))]


def make_points(steps: int) -> list[RollingPoint]:
    return [RollingPoint(i, 0.5, Interval(0.4, 0.6)) for i in range(1, steps + 1)]


def make_series(name: str, steps: int = 30) -> Series:
    return Series(name, tuple(range(steps)), tuple(math.sin(i) for i in range(steps)))


def all_pictures(size: Size) -> dict[str, str]:
    return {
        "curve": learning_curve(Learning(make_points(40), 4, make_points(3), MARKS), size),
        "comparison": comparison(MARKS, size),
        "rewards": reward_curves([make_series("total"), make_series("progress")], 3, size),
    }


@pytest.mark.parametrize("size", list(Size))
def test_pictures_are_one_svg_element_that_loads_nothing(size: Size) -> None:
    for svg in all_pictures(size).values():
        root = ElementTree.fromstring(svg)
        assert root.tag == "svg"
        assert root.get("viewBox")
        assert root.get("width") is None
        assert not {"script", "style", "image", "metadata"} & {element.tag for element in root.iter()}
        assert "//" not in svg
        hrefs = [element.get("href") for element in root.iter() if element.get("href") is not None]
        assert all(href is not None and href.startswith("#") for href in hrefs)


@pytest.mark.parametrize("size", list(Size))
def test_colours_are_the_pages_and_the_font_too(size: Size) -> None:
    for svg in all_pictures(size).values():
        assert "var(--ink)" in svg
        assert not re.search(r"#[0-9a-f]{6}\b", re.sub(r"url\(#\w+\)|href=\"#\w+\"", "", svg))
        assert "font-family" not in svg


def test_ids_resolve_inside_their_picture_and_are_not_shared() -> None:
    everything = [svg for size in Size for svg in all_pictures(size).values()]
    ids = [re.findall(r' id="([^"]*)"', svg) for svg in everything]
    for svg, own in zip(everything, ids, strict=True):
        assert set(re.findall(r'url\(#(\w+)\)|href="#(\w+)"', svg)) <= {(i, "") for i in own} | {("", i) for i in own}
    flat = [one for own in ids for one in own]
    assert flat
    assert len(flat) == len(set(flat))


def test_the_same_data_gives_the_same_bytes() -> None:
    assert all_pictures(Size.WIDE) == all_pictures(Size.WIDE)


def test_settings_are_left_alone() -> None:
    before = dict(mpl.rcParams)
    all_pictures(Size.NARROW)
    assert dict(mpl.rcParams) == before


class Words(HTMLParser):
    """Collects the text and the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_names_from_data_are_text_and_nothing_else() -> None:
    for svg in (
        reward_curves([make_series(HOSTILE)], 3, Size.WIDE),
        comparison([Mark(HOSTILE, 0.5, wilson(1, 2))], Size.WIDE),
    ):
        page = Words()
        page.feed(svg)
        assert HOSTILE in page.text
        assert "script" not in page.tags


def test_a_long_run_stays_small() -> None:
    curve = learning_curve(Learning(make_points(50_000), 25, make_points(50_000), MARKS), Size.WIDE)
    rewards = reward_curves([make_series("total", 50_000)], 25, Size.WIDE)
    assert max(len(curve), len(rewards)) < 100_000


@given(st.lists(st.integers(), max_size=2_000))
def test_thin_keeps_order_and_both_ends(rows: list[int]) -> None:
    kept = thin(rows)
    assert len(kept) == min(len(rows), MAX_POINTS)
    assert kept[:1] == rows[:1]
    assert kept[-1:] == rows[-1:]
    indices = thin(range(len(rows)))
    assert indices == sorted(set(indices))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.integers(1, 60))
def test_rolling_mean_is_the_mean_of_the_window(values: list[float], window: int) -> None:
    expected = [np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
    assert rolling_mean(values, window) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (9, 1), (30, 3), (120, 12), (10_000, 25)])
def test_window(steps: int, window: int) -> None:
    assert window_for(steps) == window


def test_series_leave_out_what_is_missing_or_not_finite() -> None:
    metrics = [{"step": 1, "a": 1.0}, {"step": 2, "a": math.nan}, {"step": 3, "b": math.inf}, {"step": 4, "a": 4.0}]
    assert series_of(metrics, {"a": "first", "b": "second", "c": "third"}) == [Series("first", (1, 4), (1.0, 4.0))]


def make_run(path: Path, episodes: bool, evaluations: bool) -> RunFolder:
    folder = RunFolder.create(path, {})
    records = [
        EpisodeRecord(f"e{i}", f"q{i}", f"db{i % 4}", "?", "easy", "", outcome, 1.0, 1, 1.0, 5, "")
        for i, outcome in enumerate(["correct", "wrong", "correct"] * 8)
    ]
    if episodes:
        with folder.episodes_writer() as writer:
            for index, record in enumerate(records):
                writer.write_episode(index // 8, record)
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
    svg = learning_curve(learning, Size.WIDE)
    assert "evaluations during training" in svg
    assert "evaluation after: 66.7%" in svg


@pytest.mark.parametrize(("episodes", "evaluations"), [(True, True), (True, False), (False, True)])
def test_png_has_the_promised_size_for_whole_and_partial_runs(
    tmp_path: Path, episodes: bool, evaluations: bool
) -> None:
    folder = make_run(tmp_path / "run", episodes, evaluations)
    picture = tmp_path / "curve.png"
    learning_curve_png(folder.path, picture)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:24]) == (PNG_WIDTH, PNG_HEIGHT)


def test_png_of_an_empty_run_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", episodes=False, evaluations=False)
    with pytest.raises(RunFolderError, match="nothing to draw"):
        learning_curve_png(folder.path, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
