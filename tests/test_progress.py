"""Progress where there is no terminal: lines, while the job runs and not when it is short."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

import sqlenv.progress
from sqlenv.progress import Report, reported


class Log(io.StringIO):
    """A log that says when a line of it matches."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self._wanted = re.compile(wanted)
        self.found = threading.Event()

    def write(self, text: str) -> int:
        if self._wanted.search(text):
            self.found.set()
        return super().write(text)


@pytest.mark.parametrize("done", [0, 3])
def test_a_log_gets_lines_while_nothing_else_happens(done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlenv.progress, "LINE_EVERY_S", 0.01)
    log = Log(r"evaluating: \[x\]: 3 of 400, 67% right, about .* left" if done else r"evaluating: \[x\]: 0 of 400\b")
    with reported("evaluating: [x]", 400, Console(file=log)) as progress:
        for i in range(done):
            progress.advance(right=i > 0)
        assert log.found.wait(60)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert "\r" not in log.getvalue()


def test_a_short_job_prints_nothing_into_a_log() -> None:
    log = io.StringIO()
    with reported("playing", 2, Console(file=log)) as progress:
        progress.advance()
        progress.update(2, 2)
    assert log.getvalue() == ""


def test_a_line_has_what_is_known() -> None:
    report = Report("reading", None)
    report.advance()
    assert report.line() == "reading: 1"
    report.update(7, 7, "trying")
    assert report.line() == "trying: 7 of 7"


def test_every_bar_is_also_lines() -> None:
    root = Path(__file__).parents[1]
    own = [
        path.relative_to(root).as_posix()
        for package in ("env_server", "inference", "trainer", "sqlenv")
        for path in (root / package).rglob("*.py")
        if re.search(r"rich\.progress|^\s*(from|import) tqdm", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert own == ["sqlenv/progress.py"]
