"""The event loop of rollouts, in a thread of its own: episodes go on while the trainer computes."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from env_server.client.loop_thread import LoopThread

T = TypeVar("T")

LOOK_S = 0.5
"""Between two looks at signals."""


class RolloutLoop:
    """Runs coroutines for one thread, the trainer's. A context manager; leaving it cancels what still runs.

    What runs here may need the trainer's model at rest, to bring weights to a server that was away. It is at rest
    while the trainer's thread waits in `run` or `result`; `caller_waits` says so and keeps it waiting.
    """

    def __init__(self) -> None:
        self._thread = LoopThread("rollouts")
        self._changed = threading.Condition()
        self._waiting = False
        self._keeping = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and wait for it; an interrupted wait cancels it."""
        with self._at_rest():
            return _waited_for(self._thread.submit(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine and go on; cancelling the future cancels it."""
        return self._thread.submit(coroutine)

    def result(self, future: Future[T]) -> T:
        """Wait for what was started; an interrupted wait cancels it."""
        with self._at_rest():
            return _waited_for(future)

    @contextmanager
    def caller_waits(self) -> Iterator[bool]:
        """Yield whether the trainer's thread waits; where it does, it goes on waiting until the block ends."""
        with self._changed:
            waits = self._waiting
            self._keeping += waits
        try:
            yield waits
        finally:
            with self._changed:
                self._keeping -= waits
                self._changed.notify_all()

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        with self._changed:
            self._waiting = True
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._keeping)
                self._waiting = False

    def close(self) -> None:
        """Cancel everything and end the thread."""
        self._thread.close()

    def __enter__(self) -> RolloutLoop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _waited_for(future: Future[T]) -> T:
    try:
        while not future.done():
            # A signal that comes just before a wait is noticed at its end.
            wait([future], LOOK_S)
        return future.result()
    except BaseException:
        future.cancel()
        raise
