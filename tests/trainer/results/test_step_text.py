"""What is said about a step: two lines, whatever is measured, and whole numbers in a narrow terminal."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from trainer.results.step_text import WIDTH, Pace, clock, step_text

METRICS = {
    "rollout/success_rate": 0.25,
    "rollout/steps": 12.5,
    "rollout/failed": 0.0,
    "reward": -0.125,
    "reward_std": 0.41,
    "frac_reward_zero_std": 0.375,
    "completions/mean_length": 1234.4,
    "completions/clipped_ratio": 0.031,
    "kl": 0.0123,
    "entropy": 10.53,
    "sampling/importance_sampling_ratio/min": 0.812,
    "sampling/importance_sampling_ratio/max": 11.84,
    "sampling/sampling_logp_difference/mean": 0.0113,
    "grad_norm": 0.5312,
    "learning_rate": 2.5e-6,
    "loss": 0.01,
}
PACE = Pace(left=3723.9, step=20.44, rollout=8.04)


def test_two_lines_hold_what_experts_watch() -> None:
    assert step_text(12, 60, METRICS, PACE) == (
        "step   12/60  success 25.0%  reward -0.125±0.41  no signal 38%  steps 12.5  tokens 1234, 3% clipped  "
        "1h02 left\n"
        "    kl 0.0123  entropy 10.53  ratio 0.81-11.84  gap 1e-02  grad 0.53  lr 2.5e-06  rollout 8.0 s, train 12 s"
    )


@pytest.mark.parametrize("width", [20, 40, 80, WIDTH, 200])
def test_lines_break_between_numbers_alone(width: int) -> None:
    wide, narrow = (step_text(12, 100, METRICS, PACE, columns) for columns in (10_000, width))
    longest = max(map(len, re.split("  +|\n", wide)))
    assert all(len(line) <= max(width, 4 + longest) for line in narrow.splitlines())
    assert re.sub(r"\s+", " ", narrow) == re.sub(r"\s+", " ", wide)


def test_what_was_not_measured_is_left_out() -> None:
    metrics: dict[str, Any] = {"loss": 0.5, "reward": 0.5, "entropy": None}
    assert step_text(3, 9, metrics, Pace(30, math.nan, 0.0)) == "step    3/9  reward +0.500  0:30 left"


def test_failed_episodes_are_said_where_there_are_any() -> None:
    assert "failed 2" in step_text(3, 9, METRICS | {"rollout/failed": 2.0}, PACE)
    assert "failed" not in step_text(3, 9, METRICS, PACE)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (3599, "59:59"), (36_060, "10h01")])
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
