"""Curves of a bounded size that hide nothing that was logged."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.records import make_record
from trainer.eval.run_files import TrainingEpisode
from trainer.report.curves import (
    CHARTS,
    MAX_POINTS,
    TIMES,
    Series,
    charts_of,
    count_episodes,
    rolling_mean,
    rolling_success,
    series_of,
    thin,
    times_of,
    window_for,
)


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


@given(st.integers(1, 3 * MAX_POINTS))
def test_a_series_is_bounded_and_its_mean_is_over_all_steps(count: int) -> None:
    rows = [{"step": float(step), "x": math.sin(step)} for step in range(1, count + 1)]
    x = series_of(rows)["x"]
    assert len(x.steps) == min(count, MAX_POINTS)
    assert (x.steps[0], x.steps[-1]) == (1, count)
    values = [row["x"] for row in rows]
    means = rolling_mean(values, window_for(count))
    for step, value, mean in zip(x.steps, x.values, x.means, strict=True):
        assert (value, mean) == (values[int(step) - 1], means[int(step) - 1])


def test_a_series_leaves_out_what_is_missing_or_not_finite() -> None:
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": math.nan}, {"step": 3, "b": math.inf}, {"step": 4, "a": 4.0}]
    expected = {"a": Series([1, 4], [1.0, 4.0], [1.0, 4.0])}
    assert series_of(rows) == series_of(rows, ["a", "b", "c"]) == expected
    assert series_of([]) == {}


def test_no_point_of_a_rare_metric_is_left_out() -> None:
    rows = [{"step": float(step), "x": 1.0} for step in range(1, 4 * MAX_POINTS)]
    for step in (7, 11, 13):
        rows[step - 1]["eval/success_rate"] = step / 100
    assert series_of(rows)["eval/success_rate"].steps == [7, 11, 13]


def test_charts_are_of_what_was_logged_with_titles() -> None:
    rows = [{"step": 1, "rewards/reward_x/mean": 1.0, "reward": 1.0, "reward_weights/x_y": 1.0, "kl": 0.0}]
    assert charts_of("Reward", rows) == {"reward": "weighted reward", "rewards/reward_x/mean": "reward for x"}
    assert charts_of("Reward weights", rows) == {"reward_weights/x_y": "weight of x y"}
    assert [charts_of(group, []) for group in CHARTS] == [{}] * len(CHARTS)


def test_times_are_of_the_steps_that_logged_all_of_them() -> None:
    whole = {f"time/{part}": float(i) for i, part in enumerate(TIMES)}
    metrics = [{"step": 1, **whole}, {"step": 2, "reward": 1.0}, {"step": 3, **whole, "time/push": math.nan}]
    assert times_of(metrics) == {"step": [1]} | {part: [float(i)] for i, part in enumerate(TIMES)}
    assert times_of([]) == {"step": []} | {part: [] for part in TIMES}


def test_success_pools_the_judged_unguided_episodes_of_a_window() -> None:
    records = [
        (step, make_record(f"{step}", "correct" if step % 2 else "wrong", db)) for step in range(4) for db in "ab"
    ]
    lost, guided = make_record("lost", "failed", "a"), make_record("guided", "correct", "a", given_steps=2)
    counts = count_episodes(TrainingEpisode(step, record) for step, record in [*records, (3, lost), (0, guided)])
    points, window = rolling_success(counts, 2)
    assert [(p.step, p.rate) for p in points] == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 0.5)]
    assert all(p.interval.low <= p.rate <= p.interval.high for p in points)
    assert (window, rolling_success(counts)[1]) == (2, 1)
    assert rolling_success({}) == ([], 1)
    with pytest.raises(ValueError, match="at least 1"):
        rolling_success(counts, 0)
