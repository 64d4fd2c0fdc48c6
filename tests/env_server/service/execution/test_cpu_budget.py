"""The token bucket of CPU seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.execution.cpu_budget import FIRST_S, FREE_S, LEAST_S, MOST_S, RATE, CpuBudget
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_new_session_has_some_and_saves_up_to_a_bound(clock: Clock) -> None:
    cpu_budget = CpuBudget(clock)
    assert cpu_budget.left_s == FIRST_S
    clock.now += 1.0
    assert cpu_budget.left_s == pytest.approx(FIRST_S + RATE)
    clock.now += 1_000.0
    assert cpu_budget.left_s == MOST_S


def test_cheap_statements_are_free(clock: Clock) -> None:
    cpu_budget = CpuBudget(clock)
    for _ in range(10_000):
        cpu_budget.charge(FREE_S)
    assert cpu_budget.left_s == FIRST_S


def test_a_debt_is_bounded_and_paid_by_waiting(clock: Clock) -> None:
    cpu_budget = CpuBudget(clock)
    cpu_budget.charge(60.0)
    assert cpu_budget.left_s == LEAST_S
    clock.now += -LEAST_S / RATE + 0.01
    assert cpu_budget.left_s > 0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), max_size=30))
def test_nobody_gets_more_than_the_rate_and_what_was_saved(turns: list[tuple[float, float]]) -> None:
    clock = Clock()
    cpu_budget = CpuBudget(clock)
    taken = 0.0
    for waited, wanted in turns:
        clock.now += waited
        left = cpu_budget.left_s
        assert LEAST_S <= left <= MOST_S
        if left > 0 and wanted > FREE_S:
            used = min(left, wanted)
            cpu_budget.charge(used)
            taken += used
    # A charge below what is free is not counted, so each turn may take that much more.
    assert taken <= FIRST_S + (clock.now - 1_000.0) * RATE + FREE_S * len(turns) + 1e-6
