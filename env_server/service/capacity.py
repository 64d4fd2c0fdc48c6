"""The capacity of one worker: how many sessions may be open, and who waits for one.

Guarantees: never more than `limit` sessions are open; no more than `queue_size` connections wait, in the order of
arrival, and none longer than asked; a slot is never lost, not even when the connection that waits for it gives up in
the moment that it is granted.
"""

from __future__ import annotations

import asyncio

from env_server.errors import SQLEnvError


class CapacityReachedError(SQLEnvError):
    """There is no free slot, and none came free in time."""

    reason = "capacity"
    text = (
        "all {max} sessions of this server are in use ({active} active). "
        "Close one, try again later, or start the server with more --max_sessions"
    )

    def __init__(self, active: int, max_sessions: int) -> None:
        super().__init__(self.text.format(active=active, max=max_sessions))
        self.active = active
        self.max_sessions = max_sessions


class QueueFullError(CapacityReachedError):
    """There is no free slot, and as many wait for one as may."""

    reason = "queue_full"
    text = (
        "all {max} sessions of this server are in use ({active} active) and its queue is full. "
        "Try again later, or start the server with more --max_sessions or a longer --queue_size"
    )


class DrainingError(CapacityReachedError):
    """The server is shutting down and takes no new sessions."""

    reason = "draining"
    text = "the server is shutting down ({active} sessions are finishing). Connect to another one"


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

        Raises CapacityReachedError after `timeout_s`, QueueFullError at once, DrainingError once closed.
        """
        if self._closed:
            raise DrainingError(self.active, self.limit)
        if self.try_acquire():
            return 0.0
        if timeout_s <= 0 or self.queue_size == 0:
            raise CapacityReachedError(self.active, self.limit)
        if len(self._waiters) >= self.queue_size:
            raise QueueFullError(self.active, self.limit)
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(timeout_s, self._reject, waiter, CapacityReachedError)
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
            self._reject(waiter, DrainingError)

    def _reject(self, waiter: asyncio.Future[None], error: type[CapacityReachedError]) -> None:
        self._waiters.pop(waiter, None)
        if not waiter.done():
            waiter.set_exception(error(self.active, self.limit))
