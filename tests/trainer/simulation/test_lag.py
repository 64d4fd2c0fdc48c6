"""The lag of a loop, as quantiles of time."""

from __future__ import annotations

import asyncio
import time

import pytest

from inference.simulated.clock import run_skipping
from trainer.simulation.lag import INTERVAL_S, Lag, lag_of_this_loop


def test_a_hold_counts_for_as_long_as_it_lasts() -> None:
    lag = Lag()
    lag.add(0.0)
    lag.add(10.5 * INTERVAL_S)
    assert len(lag.samples) == 1 + 11
    assert lag.samples[1:] == pytest.approx([(10.5 - number) * INTERVAL_S for number in range(11)])


def test_a_loop_that_is_held_up_is_late_and_one_that_waits_is_not() -> None:
    async def probed(seconds_of_work: float) -> list[float]:
        async with lag_of_this_loop() as lag:
            await asyncio.sleep(INTERVAL_S / 2)
            until = time.thread_time() + seconds_of_work
            while time.thread_time() < until:
                pass
            await asyncio.sleep(3 * INTERVAL_S)
        return lag.samples

    assert run_skipping(probed(0.0), counts_work=False) == pytest.approx([0.0] * 3, abs=1e-9)
    assert max(run_skipping(probed(5 * INTERVAL_S))) >= 4 * INTERVAL_S
