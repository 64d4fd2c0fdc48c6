"""SQLite's date functions without local time, which would make a result depend on the machine's time zone.

Promises: on a connection that was given to `refuse_local_time`, a date function whose modifier turns out to be
`localtime` or `utc` raises SQLError, wherever the modifier came from. Any other call gives what SQLite's own function
gives, which is ten times as fast: `statements.may_use_local_time` tells which statements can do with that.
"""

from __future__ import annotations

from collections.abc import Callable

import apsw

from env_server.dataset import SQLValue
from env_server.sql.statements import FIRST_MODIFIER, LOCAL_TIME, MAX_ARGUMENTS, no_local_time
from env_server.sql.vfs import VFS_NAME


def refuse_local_time(connection: apsw.Connection, encoding: str) -> None:
    """Replace the date functions of a connection, as long as it is open, where they are called with modifiers.

    `encoding` is that of its database, in SQLite's words.
    """
    own = apsw.Connection(":memory:", vfs=VFS_NAME)
    own.pragma("encoding", encoding)
    own.limit(apsw.SQLITE_LIMIT_LENGTH, connection.limit(apsw.SQLITE_LIMIT_LENGTH))
    for name, first in FIRST_MODIFIER.items():
        function = _without_local_time(name, first, own, encoding)
        # Without modifiers SQLite's own function goes on being called: the most specific one is.
        for count in range(first + 1, MAX_ARGUMENTS + 1):
            connection.create_scalar_function(name, function, count, deterministic=True, flags=apsw.SQLITE_INNOCUOUS)


def _without_local_time(name: str, first: int, own: apsw.Connection, encoding: str) -> Callable[..., SQLValue]:
    """Return the function, computed by SQLite on the connection `own`."""

    def function(*arguments: SQLValue) -> SQLValue:
        for modifier in arguments[first:]:
            if _words(modifier, encoding).lower() in LOCAL_TIME:
                raise no_local_time(f"'{_words(modifier, encoding)}'")
        places = ", ".join("?" * len(arguments))
        value: SQLValue = own.execute(f"SELECT {name}({places})", arguments).get
        return value

    return function


def _words(modifier: SQLValue, encoding: str) -> str:
    """A modifier as SQLite reads it: bytes as text, and no further than to a NUL."""
    text = modifier.decode(encoding, "replace") if isinstance(modifier, bytes) else str(modifier)
    return text.partition("\0")[0]
