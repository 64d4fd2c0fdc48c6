"""Suites made before they are needed: by several processes, and each kept as soon as it is made.

A build that was interrupted goes on where it stopped, and builds that overlap wait for one another instead of making
the same suites twice. Each process reads its share of the gold queries from its standard input, and answers each suite
with a line of JSON on a pipe that all of them share: an empty text, or what went wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile

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
"""Gold queries of one database that are made one after the other, so that its profile is read once for them."""
_LINE_CHARS = 600
"""Of a line at most, so that the lines of several processes do not mix on the pipe."""
# Its modules are found where this process found them.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from env_server.test_suites.building import main; main()"

_Chunk = tuple[str, str, Sequence[str]]
"""A database's id, its path, and gold queries."""


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
    with suites.building():
        # What another process has made meanwhile is there now.
        missing = suites.missing(wanted)
        chunks: list[_Chunk] = [
            (db_id, str(databases[db_id].absolute()), golds[start : start + _CHUNK])
            for db_id, golds in missing.items()
            for start in range(0, len(golds), _CHUNK)
        ]
        total = sum(map(len, missing.values()))
        if total and progress is not None:
            progress(0, total)
        count = min(processes or len(os.sched_getaffinity(0)), len(chunks))
        made = _in_processes(chunks, settings, cache_dir, count) if count > 1 else _made(chunks, settings, cache_dir)
        for done, problem in enumerate(made, 1):
            if problem:
                raise DataError(problem)
            if progress is not None:
                progress(done, total)
    return total


def main() -> None:
    """Make the suites that standard input asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    # Nothing that prints may get between the replies.
    os.dup2(2, 1)
    share = json.load(sys.stdin)
    settings = SandboxSettings(**share["settings"])
    limit_memory(settings)
    try:
        for problem in _made(share["chunks"], settings, Path(share["cache_dir"])):
            replies.write(json.dumps(problem[:_LINE_CHARS]) + "\n")
    except BrokenPipeError:
        os._exit(1)


def _made(chunks: Iterable[_Chunk], settings: SandboxSettings, cache_dir: Path) -> Iterator[str]:
    """Make suites, and yield what went wrong with each: "" where nothing did."""
    for db_id, path, golds in chunks:
        suites = Suites({db_id: Path(path)}, settings, cache_dir)
        for sql in golds:
            try:
                suites.make(db_id, sql)
                yield ""
            except DataError as error:
                yield str(error)


def _in_processes(chunks: Sequence[_Chunk], settings: SandboxSettings, cache_dir: Path, count: int) -> Iterator[str]:
    """Make them in so many processes, each with an equal share."""
    setup = {"settings": asdict(settings), "cache_dir": str(cache_dir.absolute())}
    command = (sys.executable, "-c", _PROGRAM, *sys.path)
    reading, writing = os.pipe()
    children: list[subprocess.Popen[bytes]] = []
    with os.fdopen(reading, encoding="utf-8") as replies:
        try:
            with os.fdopen(writing, "w"):
                for number in range(count):
                    with TemporaryFile("w+", encoding="utf-8") as share:
                        json.dump({**setup, "chunks": chunks[number::count]}, share)
                        share.seek(0)
                        children.append(subprocess.Popen(command, stdin=share, stdout=writing))
            for line in replies:
                yield json.loads(line)
            if any(child.wait() for child in children):
                yield f"a process for {TITLE} was lost; what it had made is kept: try again"
        except OSError as error:
            raise DataError(f"a process for {TITLE} cannot be started: {error.strerror}") from error
        finally:
            for child in children:
                child.kill()  # in the middle of a suite, too
                child.wait()
