"""A clock that says what the test sets."""

from __future__ import annotations


class Clock:
    """Stands for the `time` module, and for a function that returns the time in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    monotonic = __call__
