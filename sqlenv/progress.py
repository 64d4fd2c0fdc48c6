"""How far a long job is: a bar on a terminal; in a log or a redirected command, a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

LINE_EVERY_S = 10.0


class Report:
    """What is done of a job. `advance` and `update` are for one thread at a time, `line` for any."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.total = title, total
        self.done = 0
        self.judged = 0
        self.right = 0
        self._started = time.monotonic()

    def advance(self, right: bool | None = None) -> None:
        """Count one more as done; `right` says whether it succeeded, where that is known."""
        self.done += 1
        self.judged += right is not None
        self.right += right is True
        self._show()

    def update(self, done: int, total: int, title: str | None = None) -> None:
        """Set how many are done, and of how many; another title begins another job."""
        if title not in (None, self.title):
            self.title, self._started = str(title), time.monotonic()
        self.done, self.total = done, total
        self._show()

    def line(self) -> str:
        """Return the count, the total, the success so far and an estimate of the time left, where they are known."""
        parts = [f"{self.done:,}" + ("" if self.total is None else f" of {self.total:,}")]
        if self.judged:
            parts.append(f"{self.right / self.judged:.0%} right")
        if self.done and self.total is not None and self.done < self.total:
            parts.append(
                f"about {_duration((time.monotonic() - self._started) / self.done * (self.total - self.done))} left"
            )
        return f"{self.title}: {', '.join(parts)}"

    def _show(self) -> None:
        """Show what has changed."""


class _Bar(Report):
    def __init__(self, title: str, total: int | None, bar: Progress) -> None:
        super().__init__(title, total)
        self._bar = bar
        self._task = bar.add_task(title, total=total)

    def _show(self) -> None:
        said = f"{self.title}, {self.right / self.judged:.0%} right" if self.judged else self.title
        self._bar.update(self._task, description=said, completed=self.done, total=self.total)


@contextmanager
def reported(title: str, total: int | None = None, console: Console | None = None) -> Iterator[Report]:
    """Report on a job while the block runs, on `console` (standard error by default)."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            yield _Bar(title, total, bar)
        return
    report, ended = Report(title, total), threading.Event()

    def print_lines() -> None:
        while not ended.wait(LINE_EVERY_S):
            console.print(report.line(), markup=False, highlight=False, soft_wrap=True)

    thread = threading.Thread(target=print_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        thread.join()


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
