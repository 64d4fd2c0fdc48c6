"""What was learned of each database, kept on disk: a server of a thousand databases starts without opening them.

A fact is a text about one database file under a key: what its gold queries gave, its schema with the rows counted, its
fingerprint. To learn them takes queries over all of the data; to recall them, none.

Promises:
- A fact is about the file as it is: it is kept with the file's size and times, from before it was learned, and one
  about an earlier state is never recalled. The key must name all else that it depends on.
- It is a cache: several threads and processes may use it, and deleting it is safe. Where it cannot be read or written
  everything is as without it and takes longer; that is said once, as a warning in the log.
- It does not grow without end: what was learned more than `KEPT_DAYS` ago is forgotten, and learned again.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import apsw

from env_server.cache import CACHE_VARIABLE
from env_server.errors import DataError
from env_server.settings import DisplaySettings, SandboxSettings

VERSION = 1
"""Of what facts mean: another one where curation, schemas or fingerprints come out differently."""
KEPT_DAYS = 90
_DAY_S = 86_400
_BUSY_MS = 10_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts(
    database TEXT, key TEXT, state TEXT, day INTEGER, fact TEXT, PRIMARY KEY (database, key)
) WITHOUT ROWID
"""
_RECALL = "SELECT fact FROM facts WHERE database = ? AND key = ? AND state = ?"
_REMEMBER = "INSERT OR REPLACE INTO facts(database, key, state, day, fact) VALUES (?, ?, ?, ?, ?)"
_FORGET = "DELETE FROM facts WHERE day < ?"

_LOG = logging.getLogger(__name__)


def fact_key(kind: str, *settings: SandboxSettings | DisplaySettings | str) -> str:
    """Return a key that is another one when any of the settings is."""
    return f"{kind} {sha256(repr(settings).encode()).hexdigest()[:16]}"


class Catalogue:
    """Facts about database files, in a file of the cache directory; None keeps nothing."""

    def __init__(self, cache_dir: Path | None) -> None:
        # Not called as databases are: the cache directory may be a folder of data, too.
        name = f"catalogue-v{VERSION}-sqlite{apsw.sqlite_lib_version()}.facts"
        self._file = None if cache_dir is None else cache_dir / name
        self._tidied = False
        self._warned = False

    def of(self, database: Path) -> DatabaseFacts:
        """Return the facts about a database file as it is now. Raises DataError when it cannot be looked at."""
        try:
            status = database.stat()
            place = str(database.resolve())
        except OSError as error:
            raise DataError(f"{database} cannot be read: {error.strerror}") from error
        return DatabaseFacts(self, place, f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")

    def select(self, *values: str) -> str | None:
        """Return the fact of a database, a key and a state; None where there is none."""
        if self._file is None or not self._file.is_file():
            return None
        try:
            with self._connection(apsw.SQLITE_OPEN_READONLY) as facts:
                found = facts.execute(_RECALL, values).fetchone()
        except apsw.Error as error:
            self._warn(error)
            return None
        return None if found is None else str(found[0])

    def insert(self, database: str, key: str, state: str, fact: str) -> None:
        """Keep a fact, instead of an earlier one under its key."""
        if self._file is None:
            return
        today = int(time.time() // _DAY_S)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._connection(apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE) as facts:
                facts.execute(_SCHEMA)
                if not self._tidied:
                    facts.execute(_FORGET, (today - KEPT_DAYS,))
                    self._tidied = True
                facts.execute(_REMEMBER, (database, key, state, today, fact))
        except (OSError, apsw.Error) as error:
            self._warn(error)

    def _connection(self, flags: int) -> closing[apsw.Connection]:
        """Open the file for a moment, so that no handle is there when a process forks."""
        connection = apsw.Connection(str(self._file), flags=flags)
        connection.set_busy_timeout(_BUSY_MS)
        return closing(connection)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            fix = f"Delete it, or set {CACHE_VARIABLE} to a directory of your own"
            _LOG.warning("%s cannot be used: %s. Databases are read again at each start. %s", self._file, error, fix)


class DatabaseFacts:
    """What is known about one database file, in the state in which it was when it was asked for."""

    def __init__(self, catalogue: Catalogue, place: str, state: str) -> None:
        self._catalogue = catalogue
        self._place = place
        self._state = state

    def recall(self, key: str) -> str | None:
        """Return what is known under a key; None where nothing is."""
        return self._catalogue.select(self._place, key, self._state)

    def remember(self, key: str, fact: str) -> None:
        """Keep what was learned; not recalled where the file has changed since it was asked for."""
        self._catalogue.insert(self._place, key, self._state, fact)
