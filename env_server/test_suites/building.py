"""Suites made before they are needed: by several processes, and each kept as soon as it is made.

A build that was interrupted goes on where it stopped, and builds that overlap wait for one another instead of making
the same suites twice. Each process takes a few gold queries of one database at a time, as lines of JSON on its standard
input, and answers each suite with a line: empty, or what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from env_server.dataset import Question
from env_server.errors import DataError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import limit_memory
from env_server.test_suites.store import Suites

Progress = Callable[[int, int], None]
"""Called with the number of suites made so far and of all that are to be made; not at all where there are none."""

TITLE = "making test databases"
"""What is shown meanwhile."""
_CHUNK = 8
"""Gold queries of one database that a process takes at a time."""
# Its modules are found where this process found them.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from env_server.test_suites.building import main; main()"


class _Chunk(NamedTuple):
    db_id: str
    path: str
    golds: Sequence[str]


def build_suites(
    databases: Mapping[str, Path],
    questions: Iterable[Question],
    settings: SandboxSettings,
    cache_dir: Path,
    *,
    progress: Progress | None = None,
    processes: int | None = None,
) -> int:
    """Make the suites of the questions that the cache lacks; return how many that were.

    `processes` is the number of cores by default; few suites are made in this process. `progress` is called in this
    thread. Raises DataError when a database or the cache cannot be used, or a process is lost.
    """
    suites = Suites(databases, settings, cache_dir)
    wanted = [question for question in questions if question.judged]
    if not suites.missing(wanted):
        return 0
    told = progress or (lambda _done, _total: None)
    with suites.building():
        # What another process has made meanwhile is there now.
        missing = suites.missing(wanted)
        chunks = [
            _Chunk(db_id, str(databases[db_id].absolute()), golds[start : start + _CHUNK])
            for db_id, golds in missing.items()
            for start in range(0, len(golds), _CHUNK)
        ]
        total = sum(len(chunk.golds) for chunk in chunks)
        if not total:
            return 0
        told(0, total)
        count = min(processes or len(os.sched_getaffinity(0)), len(chunks))
        made = _in_this_process(suites, chunks) if count <= 1 else _in_processes(chunks, settings, cache_dir, count)
        for done, _ in enumerate(made, 1):
            told(done, total)
    return total


def _in_this_process(suites: Suites, chunks: Sequence[_Chunk]) -> Iterator[None]:
    for chunk in chunks:
        for sql in chunk.golds:
            suites.make(chunk.db_id, sql)
            yield


def _in_processes(chunks: Sequence[_Chunk], settings: SandboxSettings, cache_dir: Path, count: int) -> Iterator[None]:
    """Yield for each suite that is made. Raises DataError."""
    todo: SimpleQueue[_Chunk] = SimpleQueue()
    for chunk in chunks:
        todo.put(chunk)
    results: SimpleQueue[str] = SimpleQueue()
    setup = json.dumps({"settings": asdict(settings), "cache_dir": str(cache_dir.absolute())})
    children = [_Child(setup, todo, results) for _ in range(count)]
    try:
        for _ in range(sum(len(chunk.golds) for chunk in chunks)):
            if problem := results.get():
                raise DataError(problem)
            yield
    finally:
        for child in children:
            child.end()


class _Child:
    """A process that makes suites, and the thread that talks to it."""

    def __init__(self, setup: str, todo: SimpleQueue[_Chunk], results: SimpleQueue[str]) -> None:
        command = (sys.executable, "-c", _PROGRAM, *sys.path)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise DataError(f"a process for {TITLE} cannot be started: {error.strerror}") from error
        self._todo = todo
        self._results = results
        self._thread = threading.Thread(target=self._talk, args=(setup,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the process, in the middle of a suite, too."""
        self._process.kill()
        self._thread.join()
        with self._process:
            pass

    def _talk(self, setup: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        chunk: _Chunk | None = None
        try:
            with suppress(Empty):
                self._send(setup)
                while True:
                    chunk = self._todo.get_nowait()
                    self._send(json.dumps(chunk))
                    for _ in chunk.golds:
                        line = self._process.stdout.readline()
                        if not line:
                            raise BrokenPipeError
                        self._results.put(json.loads(line))
        except OSError:
            where = f" of database {chunk.db_id!r}" if chunk else ""
            self._results.put(
                f"a process that makes test databases{where} was lost; what it had made is kept: try again"
            )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def main() -> None:
    """Make suites for the process at the other end of standard input and output, until it closes them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Nothing that prints may get between the replies.
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    settings = SandboxSettings(**setup["settings"])
    limit_memory(settings)
    for line in sys.stdin:
        db_id, path, golds = json.loads(line)
        suites = Suites({db_id: Path(path)}, settings, Path(setup["cache_dir"]))
        for sql in golds:
            problem = ""
            try:
                suites.make(db_id, sql)
            except DataError as error:
                problem = str(error)
            try:
                replies.write(json.dumps(problem) + "\n")
                replies.flush()
            except BrokenPipeError:
                return
