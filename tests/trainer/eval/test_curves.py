"""Curves that are smoothed and thinned keep what they show."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.eval.curves import MAX_POINTS, rolling_mean, thin, window_for


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
