"""How late an event loop is: what a timer that is due has to wait for.

A probe sleeps for `INTERVAL_S` again and again. While the loop is held up the probe cannot sleep, so that a long hold
would be one sample among thousands; the samples that it kept from being taken are put in (as HdrHistogram does for
coordinated omission): the quantiles are those of time, not of samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

INTERVAL_S = 0.01


@dataclass(slots=True)
class Lag:
    """Samples in seconds."""

    samples: list[float] = field(default_factory=list)

    def add(self, late_s: float) -> None:
        """Note how late the probe woke, and the samples that this kept from being taken."""
        self.samples.append(max(0.0, late_s))
        while (late_s := late_s - INTERVAL_S) > 0.0:
            self.samples.append(late_s)


@asynccontextmanager
async def lag_of_this_loop() -> AsyncIterator[Lag]:
    """Probe the running loop while the block lasts."""
    lag, loop = Lag(), asyncio.get_running_loop()

    async def probe() -> None:
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            lag.add(loop.time() - due)

    task = asyncio.create_task(probe())
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.wait([task])
