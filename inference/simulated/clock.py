"""An event loop that does not sit out its waits, so that hours of waiting are simulated in seconds.

Where everything that runs waits by the loop's clock, nothing can happen before the next timer is due: the clock is
put forward to it. With `counts_work`, the clock also goes on while code runs (by the thread's processor time, so that
other processes do not show): what the loop's own work costs shows in the simulated time. Without, code takes no time,
and a simulation is the same on every machine, to the last bit.

Work in threads that was begun by `run_in_executor`, and sockets that have something to say, are waited for: the clock
then goes as the world's does. Whatever else happens outside the loop (a connection on another thread) is not seen:
use an ordinary loop for that.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock is put forward when there is nothing to do."""

    def __init__(self, *, counts_work: bool = True) -> None:
        self._selector_of_ours = _SkippingSelector()
        super().__init__(self._selector_of_ours)
        self._counts_work = counts_work
        self._started = time.thread_time()

    def time(self) -> float:
        """Return the simulated time, in seconds since the loop was made."""
        worked = time.thread_time() - self._started if self._counts_work else 0.0
        return worked + self._selector_of_ours.waited + self._selector_of_ours.skipped

    def run_in_executor(  # type: ignore[override]  # typeshed has it return a coroutine's future
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run in a thread, and let the clock go as the world's does until it has ended."""
        selector = self._selector_of_ours
        future = super().run_in_executor(executor, func, *args)
        selector.outside += 1

        def ended(_: object) -> None:
            selector.outside -= 1

        future.add_done_callback(ended)
        return future


def run_skipping(main: Coroutine[Any, Any, T], *, counts_work: bool = True) -> T:
    """Run to the end on a `SkippingLoop`, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=lambda: SkippingLoop(counts_work=counts_work)) as runner:
        return runner.run(main)


class _SkippingSelector(selectors.DefaultSelector):
    """Says that a wait is over as soon as nothing can end it but its time."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped = 0.0
        self.waited = 0.0
        """Seconds of real waits."""
        self.outside = 0
        """Calls that run in threads."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None or self.outside:
            began = time.monotonic()
            ready = super().select(timeout)
            self.waited += time.monotonic() - began
            return ready
        self.skipped += timeout
        return ready
