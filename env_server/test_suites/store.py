"""Suites by question, kept on disk, so that a question's suite is made once per machine.

They are made before they are needed (`building`), or when first asked for; a server only reads them. `Suites.of` may be
called from any thread and any number of processes. The cache holds one SQLite file per database file, named after the
database's content, so that a changed database gets new suites; deleting the folder is safe.
A database that can have no test databases (see `profile`) has empty suites that say why; a damaged one is an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import cast

import apsw

from env_server.dataset import Gold, Question
from env_server.errors import DataError, NoVariantsError
from env_server.rows_json import rows_from_json, rows_to_json
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.profile import read_profile
from env_server.test_suites.suite import SUITE_VERSION, Strictness, Suite, SuiteDatabase, SuiteMaker

KEPT_SUITES = 128
"""Suites kept in memory, the most recently used ones; one is about 130 kB."""
_KEPT_MAKERS = 4
_HASHED_BLOCKS = 64
_BLOCK_BYTES = 65_536
_BUSY_MS = 60_000

_SCHEMA = "CREATE TABLE IF NOT EXISTS suites(key TEXT PRIMARY KEY, suite BLOB)"


class Suites:
    """The suites of a data set's questions. `read_only`: none is made."""

    def __init__(
        self, databases: Mapping[str, Path], settings: SandboxSettings, cache_dir: Path, *, read_only: bool = False
    ) -> None:
        self._read_only = read_only
        self._databases = dict(databases)
        self._settings = settings
        self._folder = cache_dir / f"test-databases-v{SUITE_VERSION}-sqlite{apsw.sqlite_lib_version()}"
        self._lock = threading.Lock()
        self._suite = lru_cache(KEPT_SUITES)(self._load_or_make)
        self._maker = lru_cache(_KEPT_MAKERS)(self._new_maker)
        self._file = lru_cache(None)(self._new_file)

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
        golds: dict[str, dict[str, str]] = {}
        for question in (each for each in questions if each.gold_sql):
            golds.setdefault(question.db_id, {})[_key(question.gold_sql)] = question.gold_sql
        missing = {}
        for db_id, by_key in golds.items():
            with self._cache(db_id) as cache:
                known = {str(key) for (key,) in cache.execute("SELECT key FROM suites")}
            if new := [sql for key, sql in by_key.items() if key not in known]:
                missing[db_id] = new
        return missing

    @contextmanager
    def building(self) -> Iterator[None]:
        """Let one process at a time make suites, of all that use the cache and lock files."""
        with (self._folder / "building.lock").open("ab") as file:
            # On file systems without locks, two may make the same.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _load_or_make(self, db_id: str, sql: str) -> Suite:
        suite = self._load(db_id, sql)
        if suite is None and self._read_only:
            missing = f"a question about {db_id} has no test databases in {self._folder}: {sql[:200]}"
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
        with self._cache(db_id) as cache:
            found = cache.execute("SELECT suite FROM suites WHERE key = ?", (_key(sql),)).fetchall()
        if not found:
            return None
        kept = json.loads(zlib.decompress(cast("bytes", found[0][0])))
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
        with self._cache(db_id) as cache:
            cache.execute("INSERT OR REPLACE INTO suites VALUES (?, ?)", (_key(sql), zlib.compress(kept.encode())))

    @contextmanager
    def _cache(self, db_id: str) -> Iterator[apsw.Connection]:
        """Open the cache of one database for a moment, so that no handle stays open."""
        file = self._file(db_id)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            cache = apsw.Connection(str(file))
            try:
                cache.set_busy_timeout(_BUSY_MS)
                cache.execute(_SCHEMA)
                yield cache
            finally:
                cache.close()
        except (OSError, apsw.Error) as error:
            fix = "Delete it, or set SQLENV_CACHE_DIR to a directory of your own"
            raise DataError(f"the cache of test databases {file} cannot be used: {error}. {fix}") from error

    def _new_file(self, db_id: str) -> Path:
        return self._folder / f"{fingerprint(self._path(db_id))}.sqlite"

    def _path(self, db_id: str) -> Path:
        try:
            return self._databases[db_id]
        except KeyError:
            raise DataError(f"no database {db_id!r}; there are {len(self._databases)}") from None


def fingerprint(path: Path) -> str:
    """Return a name for a database file's content: its size and blocks at equal distances. Raises DataError.

    Small files are read whole; of a large one a change is seen because SQLite counts changes in the first block.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        step = max(_BLOCK_BYTES, size // _HASHED_BLOCKS)
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_BLOCK_BYTES))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


def _key(sql: str) -> str:
    return hashlib.sha256(sql.encode()).hexdigest()[:32]
