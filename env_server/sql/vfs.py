"""The file layer under the sandbox: a fixed clock, no file but the database, and bounded temporary space.

Guarantees:

- `now` and CURRENT_TIMESTAMP are always `FIXED_NOW` (UTC), on every server and in every run.
- The only named file that can be opened is a main database, read-only. No statement can create a file,
  whatever it gets past the layers above.
- What SQLite would spill to a temporary file (large sorts, DISTINCT, materialised subqueries) stays in memory
  and is charged, by bytes written, to the spill budget of the statement that runs on the thread. The count
  depends on the statement and the data alone, so the refusal is the same on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import apsw

VFS_NAME = "sqlenv-sandbox"
FIXED_NOW = datetime(2026, 1, 1, tzinfo=UTC)

_UNIX_EPOCH_JULIAN_DAY = 2440587.5
_SECONDS_PER_DAY = 86_400


class SpillBudget(threading.local):
    """Bytes of temporary space that the running statement of this thread may still write; 0 outside of one."""

    left = 0

    def charge(self, amount: int) -> None:
        """Take `amount` bytes; raises apsw.FullError when they are not there."""
        if amount > self.left:
            self.left = 0
            raise apsw.FullError("temporary space is used up")
        self.left -= amount


class SpillFile:
    """An anonymous temporary file in memory; the methods are those that SQLite asks of a file."""

    def __init__(self, spill_budget: SpillBudget) -> None:
        self._spill_budget = spill_budget
        self._data = bytearray()

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        """Return up to `amount` bytes at `offset`; short at the end of the file."""
        return bytes(memoryview(self._data)[offset : offset + amount])

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        """Write at `offset`, filling a gap with zeros; raises apsw.FullError past the spill budget."""
        end = offset + len(data)
        self._spill_budget.charge(len(data) + max(0, offset - len(self._data)))
        if offset > len(self._data):
            self._data.extend(bytes(offset - len(self._data)))
        self._data[offset:end] = data

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        """Cut the file to `newsize` bytes."""
        del self._data[newsize:]

    def xFileSize(self) -> int:  # noqa: N802
        """Return the size in bytes."""
        return len(self._data)

    def xClose(self) -> None:  # noqa: N802
        """Free the memory."""
        self._data = bytearray()

    def xSync(self, flags: int) -> None:  # noqa: N802
        """Nothing to do: the file never outlives its statement."""

    def xLock(self, level: int) -> None:  # noqa: N802
        """Nothing to do: the file has one user."""

    def xUnlock(self, level: int) -> None:  # noqa: N802
        """Nothing to do: the file has one user."""

    def xCheckReservedLock(self) -> bool:  # noqa: N802
        """Return False: the file has one user."""
        return False

    def xFileControl(self, op: int, ptr: int) -> bool:  # noqa: N802
        """Return False: no operation is understood, so SQLite uses its defaults."""
        return False


class SandboxVFS(apsw.VFS):
    """The operating system's files, less everything that a sandbox must not reach."""

    def __init__(self) -> None:
        super().__init__(VFS_NAME, base="", maxpathname=4096)
        self.spill_budget = SpillBudget()

    def xCurrentTimeInt64(self) -> int:  # noqa: N802
        """Return FIXED_NOW in milliseconds of the Julian day."""
        return round(self.xCurrentTime() * _SECONDS_PER_DAY * 1000)

    def xCurrentTime(self) -> float:  # noqa: N802
        """Return FIXED_NOW as a Julian day."""
        return _UNIX_EPOCH_JULIAN_DAY + FIXED_NOW.timestamp() / _SECONDS_PER_DAY

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """Open a database read-only, or make a temporary file in memory; refuse everything else."""
        if name is None:
            flags[1] = flags[0]
            return SpillFile(self.spill_budget)  # type: ignore[return-value]
        if flags[0] & apsw.SQLITE_OPEN_MAIN_DB and flags[0] & apsw.SQLITE_OPEN_READONLY:
            return super().xOpen(name, flags)
        raise apsw.CantOpenError("the sandbox opens nothing but the database, read-only")

    @contextmanager
    def spill_allowance(self, limit: int) -> Iterator[None]:
        """Allow the statement that runs inside, on this thread, `limit` bytes of temporary space."""
        self.spill_budget.left = limit
        try:
            yield
        finally:
            self.spill_budget.left = 0


SANDBOX_VFS = SandboxVFS()
"""Registered with SQLite once, when this module is imported: SQLite finds it by name."""
