"""An event loop in a thread of its own, for code that has none running, or one that is not always running.

Sockets on it are served, and keepalive pings answered, whatever the calling thread does: a trainer that computes for
minutes, a notebook between two cells. Its calls may come from any thread, also from one that runs a loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in its own thread. A context manager; `close` cancels what still runs and ends the thread."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._end = asyncio.Event()
        # Held to schedule a call and to close, so that no call is scheduled on a loop that has ended.
        self._closing = threading.Lock()
        self._closed = False
        # A daemon, so that a forgotten `close` does not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine; cancelling the future cancels it. Raises RuntimeError after `close`."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("the loop is closed")

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and wait for it, blocking this thread; an interrupted wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine there and await it here; cancelling the wait cancels the coroutine."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def close(self) -> None:
        """Cancel everything and end the thread; closing twice is allowed."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        with self._runner:  # which cancels what is left, and closes the loop
            self._runner.run(self._end.wait())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
