"""What is said about a step: two lines, whatever is measured, and whole numbers in a narrow terminal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.training.run_log import WIDTH, step_text

METRICS = {
    "rollout/success_rate": 0.25,
    "rollout/steps": 12.5,
    "rollout/failed": 0.0,
    "rollout/reward": 0.314,
    "reward": -0.125,
    "reward_std": 0.41,
    "rollout/no_signal": 0.375,
    "completions/mean_length": 1234.4,
    "completions/clipped_ratio": 0.031,
    "kl": 0.0123,
    "entropy": 10.53,
    "sampling/importance_sampling_ratio/min": 0.812,
    "sampling/importance_sampling_ratio/max": 11.84,
    "sampling/sampling_logp_difference/mean": 0.0113,
    "grad_norm": 0.5312,
    "gradient_share/correctness": 0.874,
    "learning_rate": 2.5e-6,
    "loss": 0.01,
}
TIMES = {
    "time/rollout": 8.04,
    "time/queue": 0.04,
    "time/generation": 5.6,
    "time/environment": 1.9,
    "time/judging": 0.3,
    "time/client": 0.2,
    "time/push": 0.2,
    "time/training": 12.4,
    "time/other": 100.0,
}
LEFT = 3723.9


def test_two_lines_hold_what_experts_watch() -> None:
    usual = {name: value for name, value in METRICS.items() if name != "kl"} | TIMES
    assert step_text(12, 60, usual, LEFT) == (
        "step   12/60  success 25.0%  reward +0.31  weighted -0.125±0.41  no signal 38%  "
        "12.5 steps  1234 tokens, 3% clipped  1h02 left\n"
        "    entropy 10.53  ratio 0.81-11.84  gap 1e-02  grad 0.53 (87% correctness)  lr 2.5e-06  "
        "rollout 8.0 s (70% generation), train 12 s"
    )


@pytest.mark.parametrize("width", [20, 40, 80, WIDTH, 200])
def test_lines_break_between_numbers_alone(width: int) -> None:
    wide, narrow = (step_text(12, 100, METRICS | TIMES, LEFT, columns) for columns in (10_000, width))
    longest = max(map(len, re.split("  +|\n", wide)))
    assert all(len(line) <= max(width, 4 + longest) for line in narrow.splitlines())
    assert re.sub(r"\s+", " ", narrow) == re.sub(r"\s+", " ", wide)


def test_what_was_not_measured_is_left_out() -> None:
    metrics: dict[str, Any] = {"loss": 0.5, "reward": 0.5, "entropy": None}
    assert step_text(3, 9, metrics, 30) == "step    3/9  weighted +0.500  0:30 left"


def test_failed_episodes_are_said_where_there_are_any() -> None:
    assert "failed 2" in step_text(3, 9, METRICS | {"rollout/failed": 2.0}, LEFT)
    assert "failed" not in step_text(3, 9, METRICS, LEFT)


def test_a_push_is_said_where_it_takes_its_time() -> None:
    slow = step_text(3, 9, TIMES | {"time/push": 4.0}, LEFT)
    assert slow.endswith("rollout 8.0 s (70% generation), push 4.0 s, train 12 s")


def test_a_step_that_trains_on_an_earlier_ones_episodes_waits_for_none() -> None:
    earlier = dict.fromkeys(TIMES, 0.0) | {"time/training": 12.4}
    assert step_text(3, 9, earlier, LEFT).endswith("rollout 0.0 s, train 12 s")
