"""Curves of a bounded size that hide nothing that was logged."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.records import make_record
from tests.trainer.viewer.runs import make_run, train
from trainer.eval.curves import rolling_mean, rolling_success, window_for
from trainer.viewer.curves import BARS, POINTS, MetricsLog, failures_over, series, success


def test_the_log_is_read_on_and_again_when_a_run_resumes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    log = MetricsLog(run.metrics_path)
    assert log.rows() == []
    for step in (1, 2, 3):
        train(run, step, [], kl=step / 10)
    assert [row["kl"] for row in log.rows()] == [0.1, 0.2, 0.3]
    run.resume_from(1)
    train(run, 2, [], kl=0.9)
    assert log.rows() == run.metrics()
    assert [row["kl"] for row in log.rows()] == [0.1, 0.9]


def test_rows_of_one_step_are_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    log = MetricsLog(run.metrics_path)
    train(run, 1, [], kl=0.1)
    log.rows()
    with run.metrics_writer() as writer:
        writer.write({"step": 1, "eval/success_rate": 0.5})
    assert log.rows() == run.metrics()


@given(st.integers(1, 3 * POINTS))
def test_a_series_is_bounded_and_its_mean_is_over_all_steps(count: int) -> None:
    rows = [{"step": float(step), "x": math.sin(step)} for step in range(1, count + 1)]
    found = series(rows)
    assert len(found["steps"]) == min(count, POINTS)
    assert (found["steps"][0], found["steps"][-1]) == (1, count)
    values = [row["x"] for row in rows]
    means = rolling_mean(values, window_for(count))
    x = found["series"]["x"]
    for step, value, mean in zip(found["steps"], x["values"], x["means"], strict=True):
        assert (value, mean) == (values[int(step) - 1], means[int(step) - 1])


def test_what_is_not_logged_or_not_finite_is_none() -> None:
    rows = [{"step": 1.0, "x": math.nan}, {"step": 2.0, "x": 2.0, "y": math.inf}, {"step": 3.0, "x": 4.0}]
    found = series(rows)["series"]
    assert found["x"]["values"] == [2.0, 4.0]
    assert found["x"]["steps"] == [2.0, 3.0]
    assert found["y"]["values"] == []


def test_a_line_that_is_none_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, 1, [], kl=0.1)
    with run.metrics_path.open("a", encoding="utf-8") as file:
        file.write('{"step": "two"}\n')
    train(run, 3, [], kl=0.3)
    log = MetricsLog(run.metrics_path)
    assert [row["kl"] for row in log.rows()] == [0.1, 0.3]
    assert log.trouble == 'metrics.jsonl: a line is a JSON object with an integer "step"'
    run.metrics_path.unlink()
    train(run, 1, [], kl=0.2)
    assert [row["kl"] for row in log.rows()] == [0.2]
    assert log.trouble == ""


def test_a_row_that_was_handed_out_stays_as_it_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run, 1, [], kl=0.1)
    log = MetricsLog(run.metrics_path)
    (row,) = log.rows()
    with run.metrics_writer() as writer:
        writer.write({"step": 1, "eval/reward": 1.0})
    assert "eval/reward" in log.rows()[0]
    assert "eval/reward" not in row


def test_a_metric_of_every_other_step_is_thinned_by_itself() -> None:
    rows = [{"step": float(step), "x": 1.0} | ({"y": 1.0} if step % 2 else {}) for step in range(4 * POINTS)]
    found = series(rows)["series"]["y"]
    assert len(found["steps"]) == len(found["values"]) == len(found["means"]) == POINTS


def test_no_point_of_a_rare_metric_is_left_out() -> None:
    rows = [{"step": float(step), "x": 1.0} for step in range(1, 4 * POINTS)]
    for step in (7, 11, 13):
        rows[step - 1]["eval/success_rate"] = step / 100
    assert series(rows)["series"]["eval/success_rate"]["steps"] == [7, 11, 13]


def test_no_rows_make_no_series() -> None:
    assert series([]) == {"steps": [], "window": 1, "series": {}}
    assert success([])["steps"] == []


def test_success_is_that_of_the_report() -> None:
    counts = [
        *((step, db, "correct", step % 4) for step in range(1, 31) for db in ("a", "b") if step % 4),
        *((step, "a", "wrong", 2) for step in range(1, 31)),
        *((step, "a", "failed", 1) for step in range(1, 31)),
    ]
    records = [
        (step, make_record(f"{step}", outcome, db)) for step, db, outcome, number in counts for _ in range(number)
    ]
    guided = (1, make_record("guided", "correct", "a", given_steps=2))
    found, expected = success(counts), rolling_success([*records, guided], window_for(30))
    assert found["rate"] == [point.rate for point in expected]
    assert found["low"] == pytest.approx([point.interval.low for point in expected])
    assert (found["steps"], found["window"]) == ([point.step for point in expected], 3)


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 40), (1, 41), (101, 1000), (5, 84)])
def test_failures_are_all_counted_in_a_bounded_number_of_columns(first: int, last: int) -> None:
    counts: list[tuple[int, str | None, str, int]] = []
    for step in range(first, last + 1):
        counts += [(step, None, "correct", 2), (step, "gave_up", "wrong", 1), (step, None, "failed", 5)]
    bars = failures_over(counts)
    assert len(bars) <= BARS
    assert (bars[0]["first"], bars[-1]["last"]) == (first, last)
    steps = last - first + 1
    assert sum(bar["counts"]["right"] for bar in bars) == 2 * steps
    assert sum(bar["counts"]["gave_up"] for bar in bars) == steps
    assert all(one["last"] + 1 == other["first"] for one, other in itertools.pairwise(bars))


def test_no_episodes_make_no_columns() -> None:
    assert failures_over([(1, None, "failed", 3)]) == []
