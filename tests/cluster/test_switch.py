"""What becomes of a frame, by the cables it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.switch import Cable, passage

SHARES = st.floats(0.0, 1.0)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1, exclude_max=True))
def test_a_frame_takes_the_delay_of_both_cables(first: float, second: float, luck: float) -> None:
    assert passage(Cable(delay_s=first), Cable(delay_s=second), luck) == first + second


@given(SHARES, SHARES, st.floats(0, 1, exclude_max=True))
def test_nothing_passes_a_cable_that_is_cut(first: float, second: float, luck: float) -> None:
    assert passage(Cable(loss=first, up=False), Cable(loss=second), luck) is None
    assert passage(Cable(loss=first), Cable(loss=second, up=False), luck) is None


@pytest.mark.parametrize(("luck", "arrives"), [(0.0, True), (0.71, True), (0.73, False), (0.99, False)])
def test_cables_lose_frames_apart(luck: float, arrives: bool) -> None:
    assert (passage(Cable(loss=0.1), Cable(loss=0.2), luck) is not None) is arrives


def test_a_cable_that_loses_all_passes_nothing() -> None:
    assert passage(Cable(loss=1.0), Cable(), 0.0) is None
