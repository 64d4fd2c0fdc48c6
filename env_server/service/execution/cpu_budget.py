"""What a session may use of the processor while others wait for it: a token bucket of CPU seconds.

Statements that cost next to nothing are free. Whoever has used up the cpu_budget is not refused anything and waits only
for others like itself: its statements are not tried on the event loop, and have no place in the processes that are kept
for the rest (`query_pool`). The time is that of the processor, so a crowded machine makes nobody look greedy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 0.03
"""What a new session has. Less than what it may save up, so that many new ones at once crowd nobody out."""
MOST_S = 0.1
"""What an idle session saves up to: some queries of the largest kind that is common."""
LEAST_S = -1.0
"""Debts are bounded, so that runaway queries are forgiven within a minute."""
RATE = 0.02
"""CPU seconds that come back each second. Beside it, 64 agents that query without pause use a tenth of it each."""
FREE_S = 0.001
"""A statement that takes less costs nothing: it holds nobody up."""


class CpuBudget:
    """The cpu_budget of one session."""

    __slots__ = ("_clock", "_left_s", "_since")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = FIRST_S
        self._since = clock()

    @property
    def left_s(self) -> float:
        """CPU seconds that are left; 0 or less: it is used up."""
        now = self._clock()
        self._left_s = min(MOST_S, self._left_s + (now - self._since) * RATE)
        self._since = now
        return self._left_s

    def charge(self, cpu_s: float) -> None:
        """Take what a statement has used."""
        if cpu_s > FREE_S:
            self._left_s = max(LEAST_S, self.left_s - cpu_s)
