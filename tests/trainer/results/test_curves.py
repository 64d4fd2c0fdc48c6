"""Curves over training steps: what a point pools."""

from __future__ import annotations

import pytest

from tests.trainer.records import make_record
from trainer.results.curves import rolling_success


def test_rolling_success_pools_a_trailing_window() -> None:
    episodes = [
        (step, make_record(f"{step}-{i}", "correct" if i < step else "wrong", f"db{i}"))
        for step in (4, 1, 2)
        for i in range(4)
    ]
    episodes.append((3, make_record("x", "failed")))
    points = rolling_success(episodes, window=2)
    assert [(p.step, p.rate) for p in points] == [(1, 0.25), (2, 0.375), (4, 0.75)]
    assert all(p.interval.low <= p.rate <= p.interval.high for p in points)
    with pytest.raises(ValueError, match="window"):
        rolling_success(episodes, 0)
