"""Sandboxes on demand: opened when needed, kept when idle, one thread at a time each.

Guarantees: a leased sandbox has one holder; no more than `max_idle` idle ones are kept, over all databases, the
least recently used closed first; each database's schema is read once, and not at all where the cache has it. Every
method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from env_server.cache import Cache, identity, key_of
from env_server.errors import DataError, SQLError
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import QueryResult, Sandbox
from env_server.sql.schema import Schema, read_schema, schema_codec


class QueryJob(NamedTuple):
    """Run one statement and return at most `max_rows` of its rows."""

    db_id: str
    sql: str
    max_rows: int
    bounded_sql: str = ""
    """What to run instead where a cell is too large for the statement."""


class Databases(Protocol):
    """Runs statements on the databases of a data set; what an environment plays on."""

    def query(self, db_id: str, sql: str, max_rows: int) -> QueryResult:
        """Run one read-only statement and return at most `max_rows` of its rows. Raises SQLError, DataError."""

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema. Raises DataError."""


class DatabasePool:
    """The databases of a data set, open as sandboxes."""

    def __init__(
        self,
        databases: Mapping[str, Path],
        settings: SandboxSettings,
        max_idle: int = 64,
        cache: Cache | None = None,
    ) -> None:
        self._databases = dict(databases)
        self._settings = settings
        self._cache = cache or Cache(None)
        self._max_idle = max_idle
        self._lock = threading.Lock()
        self._idle: OrderedDict[Sandbox, str] = OrderedDict()
        self._schemas: dict[str, Schema] = {}
        self._closed = False

    @contextmanager
    def lease(self, db_id: str) -> Iterator[Sandbox]:
        """Lend a sandbox on the database for the `with` block. Raises DataError."""
        sandbox = self._take(db_id)
        try:
            yield sandbox
        finally:
            self._give_back(db_id, sandbox)

    def query(self, db_id: str, sql: str, max_rows: int) -> QueryResult:
        """Run one read-only statement and return at most `max_rows` of its rows. Raises SQLError, DataError."""
        with self.lease(db_id) as sandbox:
            return sandbox.query(sql, max_rows)

    def schema(self, db_id: str) -> Schema:
        """Return the database's schema, read once. Raises DataError."""
        known = self._schemas.get(db_id)
        if known is not None:
            return known
        # Rows are counted within the sandbox's bounds, so they decide what a schema says.
        key = key_of("schema", identity(self._path(db_id)), self._settings)
        text = self._cache.get(key)
        schema = self._read_schema(db_id) if text is None else schema_codec().validate_json(text)
        if text is None:
            self._cache.set(key, schema_codec().dump_json(schema).decode())
        return self._schemas.setdefault(db_id, schema)

    def read_schemas(self) -> None:
        """Read every schema; then `schema` opens no file. Raises DataError."""
        for db_id in self._databases:
            self.schema(db_id)

    def close(self) -> None:
        """Close every idle sandbox, and the leased ones as they come back. Leasing then raises DataError."""
        with self._lock:
            self._closed = True
            idle = list(self._idle)
            self._idle.clear()
        for sandbox in idle:
            sandbox.close()

    def _read_schema(self, db_id: str) -> Schema:
        try:
            with self.lease(db_id) as sandbox:
                return read_schema(sandbox)
        except SQLError as error:
            raise DataError(f"the schema of database {db_id!r} cannot be read: {error}") from error

    def _path(self, db_id: str) -> Path:
        path = self._databases.get(db_id)
        if path is None:
            raise DataError(f"no database {db_id!r}; there are {len(self._databases)}")
        return path

    def _take(self, db_id: str) -> Sandbox:
        path = self._path(db_id)
        with self._lock:
            if self._closed:
                raise DataError("the pool of databases is closed")
            for sandbox in reversed(self._idle):
                if self._idle[sandbox] == db_id:
                    del self._idle[sandbox]
                    return sandbox
        return Sandbox(path, self._settings)

    def _give_back(self, db_id: str, sandbox: Sandbox) -> None:
        with self._lock:
            if not self._closed:
                self._idle[sandbox] = db_id
            surplus = [] if not self._closed else [sandbox]
            while len(self._idle) > self._max_idle:
                surplus.append(self._idle.popitem(last=False)[0])
        for old in surplus:
            old.close()


def run_query(databases: Databases, job: QueryJob) -> QueryResult | SQLError:
    """Run a job's statement; what is wrong with the statement is returned. Raises DataError."""
    try:
        return databases.query(job.db_id, job.sql, job.max_rows)
    except SQLError as error:
        if error.kind == "size" and job.bounded_sql:
            return run_query(databases, job._replace(sql=job.bounded_sql, bounded_sql=""))
        return error
