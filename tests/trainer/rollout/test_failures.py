"""When failures are too many: of one batch, and of small ones together; and what is said then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rollout.failures import WINDOW, FailureWindow, RolloutError, check_failures


@given(st.integers(0, 200), st.integers(1, 200), st.floats(0.0, 1.0))
def test_more_than_the_share_is_too_many_but_one_failure_alone_never(failed: int, played: int, share: float) -> None:
    episodes = failed + played
    if failed <= 1 or failed <= share * episodes:
        check_failures(["dead"] * failed, episodes, share)
    else:
        with pytest.raises(RolloutError, match=f"^{failed} of {episodes} episodes failed.*: dead$"):
            check_failures(["dead"] * failed, episodes, share)


def test_the_kinds_of_errors_are_counted() -> None:
    causes = ["TimeoutError: a", *["EngineError: dead"] * 3, "OSError: b", "A: 1", "B: 1", "C: 1", "TimeoutError: c"]
    with pytest.raises(RolloutError) as raised:
        check_failures(causes, 10, 0.5)
    assert str(raised.value) == (
        "9 of 10 episodes failed, more than the 50% that a run may lose "
        "(3 EngineError, 2 TimeoutError, 1 OSError, 1 A, 2 others); the first cause: TimeoutError: a"
    )


def outcome_of(window: FailureWindow, failed: int, episodes: int) -> str:
    try:
        window.add(["dead"] * failed, episodes)
    except RolloutError as error:
        return str(error)
    return ""


def test_small_batches_are_judged_together_once_there_are_enough() -> None:
    window = FailureWindow(0.2)
    said = [outcome_of(window, 1, 4) for _ in range(WINDOW // 4)]
    assert said[:-1] == [""] * (WINDOW // 4 - 1)
    assert said[-1].startswith("25 of 100 episodes failed in the last 25 batches, more than the 20% ")


def test_what_was_long_ago_is_forgotten() -> None:
    window = FailureWindow(0.25)
    for _ in range(3):
        assert not [said for _ in range(WINDOW // 4) if (said := outcome_of(window, 1, 4))]
        assert not [said for _ in range(WINDOW // 4) if (said := outcome_of(window, 0, 4))]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 150)), max_size=30), st.floats(0.0, 1.0))
def test_batches_that_each_keep_to_the_share_keep_to_it_together(
    batches: list[tuple[float, int]], allowed: float
) -> None:
    window = FailureWindow(allowed)
    for part, episodes in batches:
        assert outcome_of(window, int(part * allowed * episodes), episodes) == ""
