"""Small databases as SQLite file images in memory: made from a profile and rows, opened, and queried.

The queries that run here are a data set's own and what is derived from them, not an agent's; those go through the
sandbox. Work is bounded all the same, since a mutant may have lost its join condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import apsw

from env_server.dataset import Row
from env_server.errors import NoVariantsError
from env_server.sql.schema import quote_identifier
from env_server.sql.vfs import VFS_NAME
from env_server.test_suites.database_profile import DatabaseProfile, TablePlan

MAX_RESULT_ROWS = 500
_PAGE_BYTES = 512
_VM_STEPS = 300_000


class ImageBuilder:
    """Builds databases with a profile's schema."""

    def __init__(self, profile: DatabaseProfile) -> None:
        """Make the empty database. Raises NoVariantsError when the schema's own statements fail."""
        with _connected() as connection:
            connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            for statement in profile.statements:
                try:
                    connection.execute(statement)
                except apsw.Error as error:
                    raise NoVariantsError(
                        f"the schema cannot be rebuilt: {error}. It says: {statement[:200]}"
                    ) from error
            self.empty = connection.serialize("main")

    @contextmanager
    def building(self) -> Iterator[Building]:
        """Open a new database for rows to be put in."""
        with opened(self.empty) as connection:
            yield Building(connection)


class Building:
    """A database that is being filled."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection

    def insert(self, table: TablePlan, rows: Sequence[Row]) -> Sequence[Row]:
        """Store rows and return those that the table took, which is all but what its constraints refuse."""
        if not rows:
            return rows
        names = ", ".join(quote_identifier(column.name) for column in table.columns)
        marks = ", ".join("?" * len(table.columns))
        name = quote_identifier(table.name)
        before = self._connection.total_changes()
        self._connection.executemany(f"INSERT OR IGNORE INTO {name} ({names}) VALUES ({marks})", rows)
        if self._connection.total_changes() - before == len(rows):
            return rows
        return self._connection.execute(f"SELECT {names} FROM {name}").fetchall()

    def image(self) -> bytes:
        """Return the database's file."""
        return self._connection.serialize("main")


@contextmanager
def opened(image: bytes, *, reverse: bool = False) -> Iterator[apsw.Connection]:
    """Open an image. `reverse`: rows whose order no query asked for come the other way round."""
    with _connected() as connection:
        connection.deserialize("main", image)
        if reverse:
            connection.execute("PRAGMA reverse_unordered_selects = 1")
        connection.set_progress_handler(lambda: True, _VM_STEPS)
        yield connection


def run(connection: apsw.Connection, sql: str) -> tuple[Row, ...] | None:
    """Run one query and return up to `MAX_RESULT_ROWS + 1` rows; None when it fails or needs too many steps."""
    try:
        return tuple(islice(connection.cursor().execute(sql), MAX_RESULT_ROWS + 1))
    except apsw.Error:
        return None


@contextmanager
def _connected() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:", vfs=VFS_NAME, statementcachesize=0)
    try:
        yield connection
    finally:
        connection.close(True)
