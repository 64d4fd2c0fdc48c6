"""Suites by question, kept on disk, so that a question's suite is made once per machine.

They are made before they are needed (`building`), or when first asked for; a server only reads them. `Suites.of` may be
called from any thread and any number of processes. Each is an entry of the cache (`env_server.cache`), named after the
database's file and the gold query, so that a changed database gets new suites.
A database that can have no test databases (see `profile`) has empty suites that say why; a damaged one is an error.
"""

from __future__ import annotations

import json
import threading
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

from env_server.cache import CACHE_VARIABLE, Cache, identity, key_of
from env_server.dataset import Gold, Question, rows_from_json, rows_to_json
from env_server.errors import DataError, NoVariantsError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import Sandbox
from env_server.test_suites.profile import read_profile
from env_server.test_suites.suite import Strictness, Suite, SuiteDatabase, SuiteMaker

KEPT_SUITES = 128
"""Suites kept in memory, the most recently used ones; one is about 130 kB."""
_KEPT_MAKERS = 4
KIND = "test-databases"


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

    def building(self) -> AbstractContextManager[None]:
        """Let one process at a time make suites, of all that use the cache and lock files."""
        return self._cache.lock(KIND)

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
        self._cache.made(KIND, self._name(db_id, sql), lambda path: _write(path, packed))

    def _name(self, db_id: str, sql: str) -> str:
        return key_of(self._identity(db_id), sql)

    def _path(self, db_id: str) -> Path:
        try:
            return self._databases[db_id]
        except KeyError:
            raise DataError(f"no database {db_id!r}; there are {len(self._databases)}") from None


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
