"""One capacity for all workers: how many sessions may be open, and who waits for one.

Promises:

- Never more than `limit` sessions are open, whatever the workers do at the same time: a place is counted under a lock
  that the kernel frees when its holder dies.
- Nobody waits longer than asked, and no more than `queue_size` wait, over all workers. Who waits in a worker is served
  in the order of arrival; nobody who comes later overtakes.
- A place is never lost: not when the one who waits for it gives up in the moment that it is granted, and not when a
  worker is killed, whose places and queue the parent clears.

A place that another worker frees is noticed within `POLL_S`, and only looked for while somebody waits.
"""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from env_server.errors import SQLEnvError
from env_server.service.shared_table import SharedTable

POLL_S = 0.02
"""How often a worker looks for a place that another one has freed."""


class CapacityReachedError(SQLEnvError):
    """There is no free place, and none came free in time."""

    reason = "capacity"

    def __init__(self, active: int, max_sessions: int) -> None:
        super().__init__(self._text(active, max_sessions))
        self.active = active
        self.max_sessions = max_sessions

    def _text(self, active: int, max_sessions: int) -> str:
        return (
            f"all {max_sessions} sessions of this server are in use ({active} active). "
            "Close one, try again later, or start the server with more --max_sessions"
        )


class QueueFullError(CapacityReachedError):
    """There is no free place, and as many wait for one as may."""

    reason = "queue_full"

    def _text(self, active: int, max_sessions: int) -> str:
        return (
            f"all {max_sessions} sessions of this server are in use ({active} active) and its queue is full. "
            "Try again later, or start the server with more --max_sessions or a longer --queue_size"
        )


class DrainingError(CapacityReachedError):
    """The server is shutting down and takes no new sessions."""

    reason = "draining"

    def _text(self, active: int, max_sessions: int) -> str:
        return f"the server is shutting down ({active} sessions are finishing). Connect to another one"


class _Column(IntEnum):
    ACTIVE = 0
    WAITING = 1


class PlaceTable:
    """The places that each worker has taken and how many wait in it, shared by forked workers."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._table = SharedTable(workers, len(_Column))
        # A POSIX lock belongs to a process, also on a file that forked processes share, and dies with it.
        self._lock = tempfile.TemporaryFile() if workers > 1 else None  # noqa: SIM115

    def close(self) -> None:
        """Close the lock's file."""
        if self._lock is not None:
            self._lock.close()

    def take(self, worker: int, column: int, limit: int) -> bool:
        """Count one more for the worker unless all workers together have `limit`; say whether it was counted."""
        with self._locked():
            if self.total(column) >= limit:
                return False
            self._table.row(worker)[column] += 1
            return True

    def give(self, worker: int, column: int) -> None:
        """Count one less for the worker."""
        with self._locked():
            self._table.row(worker)[column] -= 1

    def total(self, column: int) -> int:
        """Return the count over all workers."""
        return int(self._table.total(column))

    def clear(self, worker: int) -> int:
        """Give back whatever a dead worker held; return how many sessions it had."""
        with self._locked():
            row = self._table.row(worker)
            lost = int(row[_Column.ACTIVE])
            for column in _Column:
                row[column] = 0
            return lost

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


class Capacity:
    """A worker's view of the capacity. Used on the worker's event loop alone."""

    def __init__(self, limit: int, queue_size: int = 0, table: PlaceTable | None = None, worker: int = 0) -> None:
        self.limit = limit
        self.queue_size = queue_size
        self._table = table or PlaceTable()
        self._worker = worker
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._poll: asyncio.TimerHandle | None = None
        self._closed = False

    def active(self) -> int:
        """Return how many places are taken, over all workers."""
        return self._table.total(_Column.ACTIVE)

    def waiting(self) -> int:
        """Return how many wait for a place, over all workers."""
        return self._table.total(_Column.WAITING)

    def try_acquire(self) -> bool:
        """Take a place if one is free and nobody waits for it here."""
        return not self._closed and not self._waiters and self._take()

    def release(self) -> None:
        """Give a place back, to the first who waits here if anyone does."""
        self._table.give(self._worker, _Column.ACTIVE)
        self._grant()

    async def acquire(self, timeout_s: float) -> float:
        """Take a place, waiting for one if there is room in the queue; return the seconds waited.

        Raises CapacityReachedError after `timeout_s`, QueueFullError at once, DrainingError once closed.
        """
        if self._closed:
            raise self._refusal(DrainingError)
        if self.try_acquire():
            return 0.0
        if timeout_s <= 0 or self.queue_size == 0:
            raise self._refusal(CapacityReachedError)
        if not self._table.take(self._worker, _Column.WAITING, self.queue_size):
            raise self._refusal(QueueFullError)
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[waiter] = None
        timer = loop.call_later(timeout_s, self._refuse, waiter, CapacityReachedError)
        self._poll_soon()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()
            raise
        finally:
            timer.cancel()
            self._forget(waiter)
        return loop.time() - started

    def close(self) -> None:
        """Refuse everyone who waits and everyone who comes; places that are taken can still be given back."""
        self._closed = True
        for waiter in list(self._waiters):
            self._refuse(waiter, DrainingError)

    def _take(self) -> bool:
        return self._table.take(self._worker, _Column.ACTIVE, self.limit)

    def _grant(self) -> None:
        while self._waiters:
            waiter = next(iter(self._waiters))
            if not waiter.done():
                if not self._take():
                    return
                waiter.set_result(None)
            self._forget(waiter)

    def _refuse(self, waiter: asyncio.Future[None], error: type[CapacityReachedError]) -> None:
        if not waiter.done():
            waiter.set_exception(self._refusal(error))
        self._forget(waiter)

    def _refusal(self, error: type[CapacityReachedError]) -> CapacityReachedError:
        return error(self.active(), self.limit)

    def _forget(self, waiter: asyncio.Future[None]) -> None:
        if waiter in self._waiters:
            del self._waiters[waiter]
            self._table.give(self._worker, _Column.WAITING)

    def _poll_soon(self) -> None:
        if self._poll is None and self._waiters and self._table.workers > 1:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._look)

    def _look(self) -> None:
        self._poll = None
        self._grant()
        self._poll_soon()
