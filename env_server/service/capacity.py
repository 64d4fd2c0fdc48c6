"""The capacity of one worker: how many sessions may be open, and who waits for one.

Guarantees: never more than `limit` sessions are open; no more than `queue_size` connections wait, in the order of
arrival, and none longer than asked; a slot is never lost, not even when the connection that waits for it gives up in
the moment that it is granted.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from env_server.errors import SQLEnvError

_FULL = "all {max} sessions of this server are in use ({active} active)"
_TEXTS = {
    "capacity": f"{_FULL}. Close one, try again later, or start the server with more --max_sessions",
    "queue_full": f"{_FULL} and its queue is full. Try again later, or start the server with more --max_sessions or a "
    "longer --queue_size",
    "draining": "the server is shutting down ({active} sessions are finishing). Connect to another one",
}


class CapacityReachedError(SQLEnvError):
    """No slot came free in time; or, by its `reason`, the queue is full, or the server is draining."""

    def __init__(self, reason: Literal["capacity", "queue_full", "draining"], active: int, max_sessions: int) -> None:
        super().__init__(_TEXTS[reason].format(max=max_sessions, active=active))
        self.reason = reason
        self.active = active
        self.max_sessions = max_sessions


class Capacity:
    """Slots for sessions. Used on one event loop."""

    def __init__(self, limit: int, queue_size: int = 0) -> None:
        self.limit = limit
        self.queue_size = queue_size
        self.active = 0
        """Slots that are taken."""
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiters)

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        free = not self._closed and not self._waiters and self.active < self.limit
        self.active += free
        return free

    def release(self) -> None:
        """Free a slot, for the first that waits if any does."""
        self.active -= 1
        for waiter in list(self._waiters):
            if self.active >= self.limit:
                return
            del self._waiters[waiter]
            if not waiter.done():
                self.active += 1
                waiter.set_result(None)

    async def acquire(self, timeout_s: float) -> float:
        """Take a slot, waiting for one if there is room in the queue; return the seconds waited.

        Raises CapacityReachedError: after `timeout_s`, and at once where the queue is full or the capacity closed.
        """
        if self._closed:
            raise CapacityReachedError("draining", self.active, self.limit)
        if self.try_acquire():
            return 0.0
        if timeout_s <= 0 or self.queue_size == 0:
            raise CapacityReachedError("capacity", self.active, self.limit)
        if len(self._waiters) >= self.queue_size:
            raise CapacityReachedError("queue_full", self.active, self.limit)
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(timeout_s, self._reject, waiter, "capacity")
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()
            raise
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)
        return loop.time() - started

    def close(self) -> None:
        """Reject all that wait or come; slots that are taken can still be released."""
        self._closed = True
        for waiter in list(self._waiters):
            self._reject(waiter, "draining")

    def _reject(self, waiter: asyncio.Future[None], reason: Literal["capacity", "draining"]) -> None:
        self._waiters.pop(waiter, None)
        if not waiter.done():
            waiter.set_exception(CapacityReachedError(reason, self.active, self.limit))
