"""Suites by question, kept on disk, so that a question's suite is made once per machine.

They are made before they are needed, by several processes, or when first asked for; a server only reads them. A build
that was interrupted goes on where it stopped, and builds that overlap wait for one another. `Suites.of` may be called
from any thread and any number of processes. Each is an entry of the cache (`env_server.cache`), named after the
database's file and the gold query, so that a changed database gets new suites.
A database that can have no test databases (see `profile`) has empty suites that say why; a damaged one is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from env_server.cache import CACHE_VARIABLE, Cache, identity, key_of
from env_server.dataset import Gold, Question, rows_from_json, rows_to_json
from env_server.errors import DataError, NoVariantsError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox, limit_memory
from env_server.test_suites.profile import read_profile
from env_server.test_suites.suite import Strictness, Suite, SuiteDatabase, SuiteMaker

KEPT_SUITES = 128
"""Suites kept in memory, the most recently used ones; one is about 130 kB."""
_KEPT_MAKERS = 4
KIND = "test-databases"
Progress = Callable[[int, int], None]
"""Called with the number of suites made so far and of all that are to be made; not at all where there are none."""
TITLE = "making test databases"
"""What is shown meanwhile."""
_FEWEST, _MOST = 8, 64
"""Gold queries of one database that a process makes one after the other, so that its profile is read once for them."""
_PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "  # Ctrl-C ends it without a traceback
    "sys.path[:] = sys.argv[1:]; "  # its modules are found where this process found them
    "from env_server.test_suites.store import main; main()"
)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What one process makes."""

    db_id: str
    path: str
    golds: Sequence[str]
    settings: SandboxSettings
    cache_dir: str


class Suites:
    """The suites of a data set's questions. `read_only`: none is made."""

    def __init__(
        self, databases: Mapping[str, Path], settings: SandboxSettings, cache_dir: Path, *, read_only: bool = False
    ) -> None:
        self._read_only = read_only
        self._databases = dict(databases)
        self._settings = settings
        self._cache = Cache(cache_dir)
        self._lock = threading.Lock()
        self._suite = lru_cache(KEPT_SUITES)(self._load_or_make)
        self._maker = lru_cache(_KEPT_MAKERS)(self._new_maker)
        self._identity = lru_cache(None)(lambda db_id: identity(self._path(db_id)))

    def of(self, question: Question) -> Suite:
        """Return the question's suite; an empty one where it has no SQL.

        Raises DataError when the database or the cache cannot be used, or the suite is not there and none is made.
        """
        if not question.gold_sql:
            return Suite((), problem="it has an answer and no SQL")
        with self._lock:
            return self._suite(question.db_id, question.gold_sql)

    def make(self, db_id: str, sql: str) -> Suite:
        """Make the suite of a gold query and keep it on disk. Raises DataError."""
        maker = self._maker(db_id)
        suite = Suite((), problem=maker) if isinstance(maker, str) else maker.make(sql)
        self._save(db_id, sql, suite)
        return suite

    def missing(self, questions: Iterable[Question]) -> dict[str, list[str]]:
        """Return the gold queries whose suites are not on disk, each once, by database. Raises DataError."""
        missing: dict[str, dict[str, None]] = {}
        for question in (each for each in questions if each.gold_sql):
            if not self._cache.has(KIND, self._name(question.db_id, question.gold_sql)):
                missing.setdefault(question.db_id, {})[question.gold_sql] = None
        return {db_id: list(golds) for db_id, golds in missing.items()}

    def _load_or_make(self, db_id: str, sql: str) -> Suite:
        suite = self._load(db_id, sql)
        if suite is None and self._read_only:
            missing = f"a question about {db_id} has no test databases in the cache: {sql[:200]}"
            raise DataError(f"{missing}. Start the server again, or run `sqlenv data build`")
        return suite or self.make(db_id, sql)

    def _new_maker(self, db_id: str) -> SuiteMaker | str:
        """Return what makes a database's suites, or why it can have none. Raises DataError."""
        path = self._path(db_id)
        sandbox = Sandbox(path, self._settings)
        try:
            return SuiteMaker(read_profile(sandbox), self._settings)
        except NoVariantsError as error:
            return str(error)
        except DataError as error:
            raise DataError(f"no test databases can be made of {path}: {error}. Copy or unpack it again") from error
        finally:
            sandbox.close()

    def _load(self, db_id: str, sql: str) -> Suite | None:
        place = self._cache.path(KIND, self._name(db_id, sql))
        try:
            kept = json.loads(zlib.decompress(place.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, zlib.error) as error:
            hint = f"Delete it, or set {CACHE_VARIABLE} to a directory of your own"
            raise DataError(f"the test databases {place} cannot be used: {error}. {hint}") from error
        databases = tuple(
            SuiteDatabase(b64decode(image), Gold(rows_from_json(rows), ordered), Strictness(strictness))
            for image, rows, ordered, strictness in kept["databases"]
        )
        return Suite(databases, tuple(kept["untested"]), kept["problem"])

    def _save(self, db_id: str, sql: str, suite: Suite) -> None:
        databases = [
            (b64encode(each.image).decode(), rows_to_json(each.gold.rows), each.gold.ordered, each.strictness.value)
            for each in suite.databases
        ]
        kept = json.dumps({"databases": databases, "untested": suite.untested, "problem": suite.problem})
        packed = zlib.compress(kept.encode())
        self._cache.made(KIND, self._name(db_id, sql), lambda path: path.write_bytes(packed))

    def _name(self, db_id: str, sql: str) -> str:
        return key_of(self._identity(db_id), sql)

    def _path(self, db_id: str) -> Path:
        try:
            return self._databases[db_id]
        except KeyError:
            raise DataError(f"no database {db_id!r}; there are {len(self._databases)}") from None


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
    with Cache(cache_dir).lock(KIND):  # one build at a time, of all that use the cache
        missing = suites.missing(wanted)  # what another one has made meanwhile is there now
        total = sum(map(len, missing.values()))
        if total and progress is not None:
            progress(0, total)
        workers = min(processes or len(os.sched_getaffinity(0)), -(-total // _FEWEST))
        size = min(max(total // (4 * workers or 1), _FEWEST), _MOST)
        chunks = [
            _Chunk(db_id, str(databases[db_id].absolute()), golds[start : start + size], settings, str(cache_dir))
            for db_id, golds in missing.items()
            for start in range(0, len(golds), size)
        ]
        done = 0
        with ThreadPoolExecutor(workers or 1) as pool:
            try:
                alone = ([problem] for chunk in chunks for problem in _made(chunk))
                for problems in pool.map(_in_process, chunks) if workers > 1 else alone:
                    done += len(problems)
                    if problem := next(filter(None, problems), ""):
                        raise DataError(problem)
                    if progress is not None:
                        progress(done, total)
            finally:
                pool.shutdown(cancel_futures=True)
    return total


def _made(chunk: _Chunk) -> Iterator[str]:
    """Make suites, and yield what went wrong with each: "" where nothing did."""
    suites = Suites({chunk.db_id: Path(chunk.path)}, chunk.settings, Path(chunk.cache_dir))
    for sql in chunk.golds:
        try:
            suites.make(chunk.db_id, sql)
            yield ""
        except DataError as error:
            yield str(error)


def _in_process(chunk: _Chunk) -> list[str]:
    """Make suites in a process of their own, and return what went wrong with each."""
    command = (sys.executable, "-c", _PROGRAM, *sys.path)
    try:
        done = subprocess.run(command, input=json.dumps(asdict(chunk)), stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        raise DataError(f"a process for {TITLE} cannot be started: {error.strerror}") from error
    if done.returncode:
        raise DataError(f"a process for {TITLE} was lost; what it had made is kept: try again")
    problems: list[str] = json.loads(done.stdout)
    return problems


def main() -> None:
    """Make the suites that standard input asks for."""
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that prints may get between
    chunk = json.load(sys.stdin)
    settings = SandboxSettings(**chunk.pop("settings"))
    limit_memory(settings)
    json.dump(list(_made(_Chunk(**chunk, settings=settings))), replies)
