"""What is kept: `Cache`, on disk, and `LRUCache`, in memory.

There is one cache on disk: generated data sets, imported tables, test databases, and facts that take queries to learn.

    CACHE_DIR/v1-sqlite3.50.4/KIND/NAME        an entry: a file or a folder

Guarantees:
- An entry never changes, but for a fact, which another one may replace. Its name is made from all that it depends on
  (`key_of`), so that another input, another version of SQLite or of SQLEnv (`VERSION`) has another entry. Of a file
  that is its `identity`.
- It is complete or absent, also after a failure and with several processes at once: it is written beside its place and
  renamed into it.
- Any number of threads and processes may use it, and deleting it is safe. A fact that cannot be kept is learned again
  each time, which is said once, as a warning in the log; where another entry cannot be kept, that is a DataError.
- Facts do not grow without end: those that are older than `KEPT_DAYS` are learned again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

import apsw
import platformdirs

from env_server.errors import DataError

VERSION = 2
"""Goes up when anything that is kept would come out differently: rows, labels, test databases, imported tables."""
CACHE_VARIABLE = "SQLENV_CACHE_DIR"
KEPT_DAYS = 90
FACTS = "facts"
_BLOCKS = 16
_BLOCK_BYTES = 16_384
_LOG = logging.getLogger(__name__)

K = TypeVar("K")
V = TypeVar("V")


def default_cache_dir() -> Path:
    """Return the directory in the environment variable SQLENV_CACHE_DIR, else the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("sqlenv"))


def key_of(*parts: object) -> str:
    """Return a name that is another one when any part is; parts have a telling `repr`."""
    return sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def identity(path: Path) -> str:
    """Return what a file is known by: its size, its time of change and blocks of its content. Raises DataError.

    A file of a quarter of a megabyte is read whole. Copies that keep the time of change are the same file.
    """
    try:
        status = path.stat()
        return _identity(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Check that it is readable") from error


@lru_cache(4096)
def _identity(path: Path, size: int, changed_ns: int, _: int) -> str:
    digest = sha256(f"{size} {changed_ns}".encode())
    with path.open("rb") as file:
        for offset in range(0, size, max(_BLOCK_BYTES, size // _BLOCKS)):
            file.seek(offset)
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


class Cache:
    """Entries below a directory; None keeps nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._root = directory and directory.absolute() / f"v{VERSION}-sqlite{apsw.sqlite_lib_version()}"
        self._tidied = False
        self._warned = False

    def path(self, kind: str, name: str) -> Path:
        """Return where an entry is, or would be."""
        if self._root is None:
            raise DataError(f"nothing is kept here, so there is no {kind}")
        return self._root / kind / name

    def has(self, kind: str, name: str) -> bool:
        """Tell whether there is an entry; one that cannot be read is none."""
        try:
            return self.path(kind, name).exists()
        except OSError:
            return False

    def made(self, kind: str, name: str, make: Callable[[Path], object]) -> Path:
        """Return the path of an entry; where there is none, `make` writes it, a file or a folder. Raises DataError."""
        target = self.path(kind, name)
        if self.has(kind, name):
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
                fresh = Path(scratch, "entry")
                make(fresh)
                try:
                    fresh.rename(target)
                except OSError:
                    if not target.is_dir():  # else another process was first
                        raise
        except (OSError, apsw.FullError, apsw.IOError, apsw.CantOpenError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            hint = f"Make room there, or set {CACHE_VARIABLE} to a directory of your own"
            raise DataError(f"{target.parent} cannot be written: {reason}. {hint}") from error
        return target

    def get(self, key: str) -> str | None:
        """Return a fact; None where it is not known."""
        if self._root is None:
            return None
        try:
            return self.path(FACTS, key).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    def set(self, key: str, fact: str) -> None:
        """Keep a fact, instead of an earlier one under its key."""
        if self._root is None:
            return
        self._tidy()
        with suppress(OSError):
            self.path(FACTS, key).unlink(missing_ok=True)
        try:
            self.made(FACTS, key, lambda path: path.write_text(fact, encoding="utf-8"))
        except DataError as error:
            if not self._warned:
                self._warned = True
                _LOG.warning("%s. Databases are read again at each start", error)

    @contextmanager
    def lock(self, kind: str) -> Iterator[None]:
        """Let one process at a time make entries of a kind, of all that use the cache and lock files."""
        with self.made(kind, ".lock", Path.touch).open("ab") as file:
            # On file systems without locks, two may make the same.
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _tidy(self) -> None:
        if self._tidied or self._root is None:
            return
        self._tidied = True
        oldest = time.time() - KEPT_DAYS * 86_400
        with suppress(OSError):
            for entry in (self._root / FACTS).iterdir():
                if entry.is_file() and entry.stat().st_mtime < oldest:
                    entry.unlink(missing_ok=True)


class LRUCache(Generic[K, V]):
    """Values by their keys, in memory; their sizes, 1 each by default, sum to at most `capacity`.

    The least recently used go first. Not for several threads at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0
        """The sum of the sizes."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value, from now on the most recently used; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int = 1) -> list[V]:
        """Keep a value, instead of the key's earlier one; return the values that are no longer kept."""
        dropped = [self._pop(key)] if key in self._entries else []
        self._entries[key] = (value, size)
        self.size += size
        while self.size > self._capacity:
            dropped.append(self._pop(next(iter(self._entries))))
        return dropped

    def clear(self) -> list[V]:
        """Keep nothing; return what was kept."""
        return [self._pop(key) for key in list(self._entries)]

    def _pop(self, key: K) -> V:
        value, size = self._entries.pop(key)
        self.size -= size
        return value
