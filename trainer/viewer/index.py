"""The index of all episodes that are shown: what can be filtered, a full-text index, and where each episode lies.

It is derived from the files of episodes and kept in the user's cache, one for each set of paths that was opened; it
can be deleted at any time. The episodes themselves stay in their files and are read from there.

Promises:

1. `update` reads what is new in each file and nothing else; a file that was cut off or replaced is read again.
2. A transaction holds the episodes and how far the file was read: a killed viewer leaves nothing half done, and two
   viewers of the same runs do not count an episode twice.
3. Readers never wait for `update`, and see what it has written so far.
4. A line that is no episode ends the reading of its file, is named in `errors`, and hurts no other file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import apsw
from pydantic_core import from_json

from env_server.cache import default_cache_dir
from env_server.errors import SQLEnvError
from trainer.eval.failure_kinds import failure_kind
from trainer.rollout.episodes import EpisodeRecord
from trainer.viewer.growing import News, Place, read_news

VERSION = 3
"""Of the tables and of what fills them, the kinds of failure among it; an index of another one is made anew."""
CHUNK = 2_000_000
"""Bytes of a file that one transaction takes."""
BUSY_MS = 10_000
UNUSED_DAYS = 30
"""An index that nobody has opened for so long is deleted."""
_DAY_S = 86_400

_TABLES = f"""
CREATE TABLE files (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE NOT NULL, inode INTEGER NOT NULL, place INTEGER NOT NULL, tail BLOB NOT NULL,
  error TEXT NOT NULL DEFAULT ''
);
CREATE TABLE episodes (
  id INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL, step INTEGER,
  question_id TEXT, db_id TEXT, question TEXT, hardness TEXT, family TEXT, outcome TEXT, kind TEXT, reward REAL,
  steps INTEGER, tokens INTEGER, prompt_tokens INTEGER, parse_rate REAL,
  given_steps INTEGER
);
CREATE INDEX by_file ON episodes (file, step);
CREATE INDEX by_question ON episodes (question_id);
CREATE VIRTUAL TABLE words USING fts5(
  text, content='', contentless_delete=1, tokenize="unicode61 remove_diacritics 2"
);
PRAGMA user_version = {VERSION};
"""
_INSERT = f"INSERT INTO episodes VALUES ({', '.join('?' * 18)})"
_FIELDS = frozenset(field.name for field in fields(EpisodeRecord))


class IndexFileError(SQLEnvError):
    """The index cannot be written; the text names the variable that moves it."""


def index_path(given: Sequence[Path]) -> Path:
    """Return where the index of a set of paths is kept."""
    name = hashlib.sha256("\n".join(sorted(str(path.resolve()) for path in given)).encode()).hexdigest()[:24]
    return default_cache_dir() / "viewer" / f"{name}.sqlite"


class Index:
    """An index on the disk. `update` is for one thread at a time, all else for any."""

    def __init__(self, path: Path) -> None:
        """Open it, or make it. Raises IndexFileError."""
        self.path = path
        self._unread: dict[Path, str] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _delete_unused(path)
            self._writer = _open(path)
        except (OSError, apsw.Error) as error:
            raise IndexFileError(
                f"{path} cannot be written ({error}); SQLENV_CACHE_DIR names another folder"
            ) from error

    def close(self) -> None:
        """Close it."""
        self._writer.close()

    def update(self, paths: Sequence[Path]) -> Iterator[Path]:
        """Bring the index up to these files; yields a file's path after each part of it that was new."""
        self._forget(paths)
        for path in paths:
            while (more := self._read_on(path)) is not None:
                yield path
                if not more:
                    break

    def files(self) -> dict[Path, int]:
        """Return the files that have been looked into, with their numbers."""
        return {Path(path): number for number, path in self.rows("SELECT id, path FROM files")}

    @property
    def errors(self) -> dict[Path, str]:
        """What was wrong with a file, where something was."""
        broken = {Path(path): error for path, error in self.rows("SELECT path, error FROM files WHERE error <> ''")}
        return broken | self._unread

    def rows(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return what a statement selects."""
        connection = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(BUSY_MS)
            return list(connection.execute(statement, values))
        finally:
            connection.close()

    def record(self, number: int) -> tuple[int, int | None, EpisodeRecord] | None:
        """Read an episode, with its file's number and its training step; None where there is none of this number."""
        found = self.rows(
            "SELECT f.id, f.path, e.start, e.size FROM episodes e JOIN files f ON f.id = e.file WHERE e.id = ?",
            (number,),
        )
        if not found:
            return None
        file_number, path, start, size = found[0]
        try:
            with Path(path).open("rb") as file:
                file.seek(start)
                step, record = parse_episode(file.read(size))
        except (OSError, ValueError):
            return None  # the file is another one by now, and `update` will find out
        return file_number, step, record

    def _read_on(self, path: Path) -> bool | None:
        """Take in the next part of a file; returns whether there is more, or None when there was nothing new."""
        with _transaction(self._writer):
            statement = "SELECT id, error, inode, place, tail FROM files WHERE path = ?"
            number, broken, *place = next(self._writer.execute(statement, (str(path),)), (0, "", 0, 0, b""))
            try:
                news = read_news(path, Place(*place), CHUNK)
            except FileNotFoundError:
                return None
            except OSError as problem:
                self._unread[path] = problem.strerror or str(problem)
                return None
            self._unread.pop(path, None)
            if number and not news.restarted and (broken or not news.lines):
                return None
            if news.restarted:
                self._clear(number)
            if not number:
                self._writer.execute("INSERT INTO files (path, inode, place, tail) VALUES (?, 0, 0, x'')", (str(path),))
                number = self._writer.last_insert_rowid()
            error = self._insert(number, news)
            self._writer.execute(
                "UPDATE files SET inode = ?, place = ?, tail = ?, error = ? WHERE id = ?",
                (news.place.inode, news.place.offset, news.place.tail, error, number),
            )
        return news.more and not error

    def _insert(self, number: int, news: News) -> str:
        """Add the episodes of the lines up to the first that is none; return what is wrong with that one."""
        first = next(self._writer.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM episodes"))[0]
        rows: list[tuple[Any, ...]] = []
        texts: list[tuple[int, str]] = []
        start, error = news.start, ""
        for line in news.lines:
            try:
                step, record = parse_episode(line)
                rows.append((first + len(rows), number, start, len(line), step, *_columns(record)))
                texts.append((rows[-1][0], _text(record)))
            except ValueError as problem:
                error = f"byte {start}: {problem}"
                break
            start += len(line)
        self._writer.executemany(_INSERT, rows)
        self._writer.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", texts)
        return error

    def _forget(self, paths: Sequence[Path]) -> None:
        """Take out the files that are no longer there."""
        kept = {str(path) for path in paths}
        for number, path in list(self._writer.execute("SELECT id, path FROM files")):
            if path not in kept:
                with _transaction(self._writer):
                    self._clear(number)
                    self._writer.execute("DELETE FROM files WHERE id = ?", (number,))

    def _clear(self, number: int) -> None:
        self._writer.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM episodes WHERE file = ?)", (number,))
        self._writer.execute("DELETE FROM episodes WHERE file = ?", (number,))


def parse_episode(line: bytes) -> tuple[int | None, EpisodeRecord]:
    """Read a line of a file of episodes: the training step, where it has one, and the record. Raises ValueError."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise ValueError("a line is a JSON object")
    step = row.pop("step", None)
    if unknown := row.keys() - _FIELDS:
        raise ValueError(f"an episode has no {', '.join(sorted(unknown))}")
    try:
        return step, EpisodeRecord(**row)
    except TypeError as error:
        raise ValueError(f"this is no episode: {error}") from error


def _columns(record: EpisodeRecord) -> tuple[Any, ...]:
    """What is filtered and listed, in the order of the table. Raises ValueError."""
    try:
        kind = failure_kind(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a turn of episode {record.episode_id} cannot be read: {error!r}") from error
    return (
        record.question_id,
        record.db_id,
        record.question,
        record.hardness,
        record.family,
        record.outcome,
        None if kind is None else kind.value,
        record.reward,
        record.steps,
        record.tokens,
        record.prompt_tokens,
        record.parse_rate,
        record.given_steps,
    )


def _text(record: EpisodeRecord) -> str:
    """What the search looks into."""
    parts = [record.question, record.question_id, record.db_id, record.failure]
    for turn in record.turns:
        parts += (turn["text"], turn["result"], turn["error"])
    return "\n".join(parts)


def _open(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(BUSY_MS)
    # The index can be made again: a machine that stops may cost it, a process that stops does not.
    list(connection.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL"))
    version = next(connection.execute("PRAGMA user_version"))[0]
    if version not in (0, VERSION):
        connection.close()
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        return _open(path)
    with _transaction(connection):
        if next(connection.execute("PRAGMA user_version"))[0] == 0:
            list(connection.execute(_TABLES))
    return connection


@contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    """Hold the only right to write from the beginning on: what is read is what is built upon."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _delete_unused(path: Path) -> None:
    """Touch this index, and delete those that nobody has opened for long."""
    path.touch()
    for other in path.parent.glob("*.sqlite"):
        if time.time() - other.stat().st_mtime > UNUSED_DAYS * _DAY_S:
            for suffix in ("", "-wal", "-shm"):
                other.with_name(other.name + suffix).unlink(missing_ok=True)
