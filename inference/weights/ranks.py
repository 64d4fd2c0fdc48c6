"""The training side of a push: the processes that take part, and the event loop on which requests are made."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one that speaks to servers."""

    def broadcast(self, value: T) -> T:
        """Return the main process's value, on every rank."""


class OneRank:
    """A single process."""

    is_main = True

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value


class Loop(Protocol):
    """The event loop that requests are made on, seen from the thread that trains."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine there and wait for it."""

    def caller_waits(self) -> AbstractContextManager[bool]:
        """Tell whether that thread waits in `run`, so that the model is at rest; it does until the block ends."""


class OwnLoop:
    """A loop for each coroutine, in the calling thread."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine."""
        return asyncio.run(coroutine)

    def caller_waits(self) -> AbstractContextManager[bool]:
        """It always does: it is the caller that runs the coroutine."""
        return nullcontext(True)
