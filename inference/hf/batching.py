"""Which waiting requests form the next batch. A pure state machine: no clock, no tasks, no tensors.

The engine tells it what happens (a session joins or leaves, a request arrives or is withdrawn, a batch
ends) and asks `poll` what to do now. Times are seconds of one monotonic clock that the caller reads.

Invariants:

1. At most one batch runs at a time, and it holds at most `max_batch` requests.
2. A batch starts at once when `max_batch` requests wait or when every open session waits.
3. Otherwise it starts `linger_s` after the engine was free and a request waited: nobody waits longer than that
   for sessions that are busy elsewhere.
4. Requests leave in the order (turn of the session, session key). With at least as much room as sessions and
   nobody late, the composition of every batch follows from the sessions alone, not from timing.
5. Every request leaves exactly once: in a batch, or withdrawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Run these sessions' requests now; they are no longer waiting. `keys` is not empty."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Ask again at this time, or when something happens. Infinity: only when something happens."""

    deadline: float


class Batcher:
    """Forms batches from the requests of open sessions. A session has at most one request waiting."""

    def __init__(self, max_batch: int, linger_s: float) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        if not 0.0 <= linger_s < math.inf:
            raise ValueError(f"linger_s must be a finite number of seconds >= 0, not {linger_s}")
        self._max_batch = max_batch
        self._linger_s = linger_s
        self._turns: dict[int, int] = {}  # open session -> requests made so far
        self._waiting: dict[int, tuple[int, float]] = {}  # session -> (turn, arrival)
        self._running = False
        self._free_since = -math.inf

    @property
    def sessions(self) -> int:
        """Open sessions."""
        return len(self._turns)

    @property
    def open_keys(self) -> frozenset[int]:
        """The keys of the open sessions."""
        return frozenset(self._turns)

    @property
    def running(self) -> bool:
        """True between a `Start` and its `finish`."""
        return self._running

    def join(self, key: int) -> None:
        """Open a session; raises ValueError when the key is open already."""
        if key in self._turns:
            raise ValueError(f"session {key} is open already")
        self._turns[key] = 0

    def leave(self, key: int) -> None:
        """Close a session; a waiting request is withdrawn."""
        del self._turns[key]
        self._waiting.pop(key, None)

    def submit(self, key: int, now: float) -> None:
        """Add a session's request; raises ValueError when one is waiting already."""
        if key in self._waiting:
            raise ValueError(f"session {key} waits already")
        self._waiting[key] = (self._turns[key], now)
        self._turns[key] += 1

    def withdraw(self, key: int) -> None:
        """Forget a session's waiting request, if there is one."""
        self._waiting.pop(key, None)

    def finish(self, now: float) -> None:
        """Note that the running batch has ended."""
        self._running = False
        self._free_since = now

    def poll(self, now: float) -> Start | WaitUntil:
        """Decide; a `Start` takes its requests out and marks the engine as running."""
        if self._running or not self._waiting:
            return WaitUntil(math.inf)
        if len(self._waiting) < min(self._max_batch, len(self._turns)):
            deadline = self._deadline()
            if now < deadline:
                return WaitUntil(deadline)
        order = sorted(self._waiting, key=lambda key: (self._waiting[key][0], key))
        chosen = tuple(order[: self._max_batch])
        for key in chosen:
            del self._waiting[key]
        self._running = True
        return Start(chosen)

    def _deadline(self) -> float:
        """Return when lingering ends: counted from when the engine was free and the first request there."""
        first = min(arrival for _, arrival in self._waiting.values())
        return max(first, self._free_since) + self._linger_s
