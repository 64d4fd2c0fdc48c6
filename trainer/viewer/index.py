"""The episodes of all runs in view, in a temporary SQLite database: columns to filter by, a full-text index, and where
each episode is in its file, from which it is read when it is shown.

Guarantees:

1. `update` reads what was appended to each file, in complete lines; a file that has shrunk, as that of a resumed run,
   or that was replaced is read again.
2. Readers see what has been read so far, and wait for at most the insertion of one chunk.
3. A malformed line ends the reading of its file, is named in `errors`, and affects no other file.
4. What a user types is a value and never a part of a statement.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import apsw
from pydantic import BaseModel, Field
from pydantic_core import from_json

from trainer.eval.failure_kinds import failure_kind
from trainer.rollout.episodes import EpisodeRecord

CHUNK = 1_000_000
"""Bytes that are read at a time."""
LINES = 2**32
"""Numbers of episodes in one file: the same episode of the same file has the same number in every viewer."""
LISTED = (
    *("id", "file", "step", "question_id", "db_id", "question", "hardness", "family", "outcome", "kind", "reward"),
    *("steps", "tokens", "prompt_tokens", "parse_rate"),
)
"""What a list of episodes shows of each."""
FACETS = ("outcome", "kind", "db_id", "hardness")
_COLUMNS = ("seq", "start", "size", "given_steps", *LISTED)
_TABLES = f"""
CREATE TABLE episodes (id INTEGER PRIMARY KEY, {", ".join(name for name in _COLUMNS if name != "id")});
CREATE INDEX by_file ON episodes (file, step);
CREATE INDEX by_question ON episodes (question_id);
CREATE VIRTUAL TABLE words USING fts5(
  text, content='', contentless_delete=1, tokenize="unicode61 remove_diacritics 2"
);
"""
_INSERT = f"INSERT INTO episodes ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_TERM = re.compile(r'(-?)(?:"([^"]*)"|(\S+))')


class Order(StrEnum):
    """How a list is sorted; what was read last comes first among equals."""

    NEWEST = "newest"
    OLDEST = "oldest"
    REWARD_DOWN = "reward_down"
    REWARD_UP = "reward_up"
    STEPS_DOWN = "steps_down"
    TOKENS_DOWN = "tokens_down"


_ORDERS = {
    Order.NEWEST: "seq DESC",
    Order.OLDEST: "seq",
    Order.REWARD_DOWN: "reward DESC, seq DESC",
    Order.REWARD_UP: "reward, seq DESC",
    Order.STEPS_DOWN: "steps DESC, seq DESC",
    Order.TOKENS_DOWN: "tokens DESC, seq DESC",
}


class Filter(BaseModel):
    """Which episodes, in what order, and which part of the list; None and "" leave a condition out."""

    source: list[str] = []
    label: list[str] = []
    outcome: str = ""
    kind: str = ""
    """A kind of failure, or "any" for all that failed."""
    db_id: str = ""
    hardness: str = ""
    question_id: str = ""
    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""
    order: Order = Order.NEWEST
    offset: int = Field(default=0, ge=0, lt=2**62)
    limit: int = Field(default=100, ge=0, le=500)


@dataclass(slots=True)
class _Reading:
    """How far a file has been read."""

    number: int
    inode: int = 0
    offset: int = 0
    lines: int = 0
    malformed: str = ""
    unreadable: str = ""


class Index:
    """An index of files of episodes. `update` is for one thread at a time, all else for any."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._db = apsw.Connection("")  # a file of SQLite's own, which it deletes
        self._db.execute("PRAGMA journal_mode = MEMORY; PRAGMA synchronous = OFF; PRAGMA cache_size = -100000")
        self._db.execute(_TABLES)
        self._files: dict[Path, _Reading] = {}
        self._numbers, self._seq = count(1), count(1)

    def update(self, paths: Sequence[Path]) -> Iterator[None]:
        """Bring the index up to date with these files; yields after each chunk that was new."""
        for path in self._files.keys() - set(paths):
            self._clear(self._files.pop(path))
        for path in paths:
            reading = self._files.get(path) or self._files.setdefault(path, _Reading(next(self._numbers)))
            while self._read_on(path, reading):
                yield

    def numbers(self) -> dict[Path, int]:
        """Return the files with their numbers."""
        return {path: reading.number for path, reading in self._files.copy().items()}

    def offsets(self) -> dict[Path, int]:
        """Return how many bytes of each file have been read."""
        return {path: reading.offset for path, reading in self._files.copy().items()}

    def errors(self) -> dict[Path, str]:
        """Return what was wrong with a file, where something was."""
        found = {path: reading.malformed or reading.unreadable for path, reading in self._files.copy().items()}
        return {path: error for path, error in found.items() if error}

    def rows(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> list[tuple[Any, ...]]:
        """Return what a statement selects."""
        with self._lock:
            return list(self._db.execute(statement, values))

    def record(self, number: int) -> tuple[int, int | None, EpisodeRecord] | None:
        """Read an episode, with its file's number and its training step; None where no episode has this number."""
        found = self.rows("SELECT file, start, size FROM episodes WHERE id = ?", (number,))
        path = next((p for p, reading in self._files.copy().items() if found and reading.number == found[0][0]), None)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                file.seek(found[0][1])
                return found[0][0], *_parse(file.read(found[0][2]))
        except (OSError, ValueError):
            return None  # the file was replaced, as `update` will find

    def search(self, files: Sequence[int], wanted: Filter) -> dict[str, Any]:
        """Return a page of the wanted episodes of these files, how many there are, and how many of each facet."""
        where, values = _where(files, wanted)
        ((total, right, reward),) = self.rows(
            f"SELECT COUNT(*), COALESCE(SUM(outcome = 'correct'), 0), AVG(reward) {where}", values
        )
        page = f"ORDER BY {_ORDERS[wanted.order]} LIMIT :limit OFFSET :offset"
        facets = {}
        for name in FACETS:  # of the episodes that the other conditions leave
            others, known = _where(files, wanted.model_copy(update={name: ""}))
            group = f"SELECT {name}, COUNT(*) {others} AND {name} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
            facets[name] = dict(self.rows(group, known))
        listed = self.listed(f"{where} {page}", values | {"limit": wanted.limit, "offset": wanted.offset})
        return {"total": total, "right": right, "reward": reward, "episodes": listed, "facets": facets}

    def listed(self, clauses: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what a list shows of the episodes that a statement from FROM on selects."""
        return [
            dict(zip(LISTED, row, strict=True)) for row in self.rows(f"SELECT {', '.join(LISTED)} {clauses}", values)
        ]

    def _read_on(self, path: Path, reading: _Reading) -> bool:
        """Read the next chunk of a file; returns whether there was something new."""
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                reading.unreadable = ""
                restarted = stat.st_ino != reading.inode or stat.st_size < reading.offset
                if restarted:
                    self._clear(reading)
                    reading.inode, reading.offset, reading.lines, reading.malformed = stat.st_ino, 0, 0, ""
                if reading.malformed or stat.st_size == reading.offset:
                    return restarted
                file.seek(reading.offset)
                text = file.read(CHUNK)
                if len(text) == CHUNK:
                    text += file.readline()
        except FileNotFoundError:
            return False
        except OSError as error:
            reading.unreadable = error.strerror or str(error)
            return False
        # Not `splitlines`, for which a carriage return ends a line as well; half a line may follow the last newline.
        lines = [line + b"\n" for line in text.split(b"\n")[:-1]]
        rows, words = [], []
        start, first = reading.offset, reading.number * LINES + reading.lines
        for number, line in enumerate(lines, first):
            try:
                step, record = _parse(line)
                row = (next(self._seq), start, len(line), record.given_steps, number, reading.number, step)
                rows.append((*row, *_columns(record)))
                words.append((number, _text(record)))
            except ValueError as error:
                reading.malformed = f"byte {start}: {error}"
                break
            start += len(line)
        with self._lock, self._db:
            self._db.executemany(_INSERT, rows)
            self._db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)
        reading.offset, reading.lines = start, reading.lines + len(rows)
        return bool(rows)

    def _clear(self, reading: _Reading) -> None:
        with self._lock:
            self._db.execute(
                "DELETE FROM words WHERE rowid IN (SELECT id FROM episodes WHERE file = ?)", (reading.number,)
            )
            self._db.execute("DELETE FROM episodes WHERE file = ?", (reading.number,))


def _parse(line: bytes) -> tuple[int | None, EpisodeRecord]:
    """Parse a line of a file of episodes: the training step, where it has one, and the record. Raises ValueError."""
    row = from_json(line)
    if not isinstance(row, dict):
        raise ValueError("a line is a JSON object")
    step = row.pop("step", None)
    try:
        return step, EpisodeRecord(**row)
    except TypeError as error:
        raise ValueError(f"this is no episode: {error}") from error


def _columns(record: EpisodeRecord) -> tuple[Any, ...]:
    """The values of LISTED after `step`. Raises ValueError."""
    try:
        kind = failure_kind(record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a turn of episode {record.episode_id} cannot be read: {error!r}") from error
    values = {"kind": None if kind is None else kind.value}
    return tuple(values[name] if name in values else getattr(record, name) for name in LISTED[3:])


def _text(record: EpisodeRecord) -> str:
    """What the search covers."""
    parts = [record.question, record.question_id, record.db_id, record.failure]
    for turn in record.turns:
        parts += (turn["text"], turn["result"], turn["error"])
    return "\n".join(parts)


def match_of(text: str) -> str:
    """Return a search as an expression of the full-text index; "" when it holds no word.

    Words are prefixes, and all must occur; what is in quotes must occur as it is, a word after a minus must not.
    """
    wanted: list[str] = []
    unwanted: list[str] = []
    for minus, quoted, word in _TERM.findall(text.replace("\0", " ")):  # a statement ends at a zero byte
        if re.search(r"\w", quoted or word):
            phrase = '"' + (quoted or word).replace('"', '""') + '"'
            (unwanted if minus else wanted).append(phrase if quoted else f"{phrase} *")
    if not wanted:
        return ""
    both = " AND ".join(wanted)
    return f"({both}) NOT ({' OR '.join(unwanted)})" if unwanted else both


def _where(files: Sequence[int], wanted: Filter) -> tuple[str, dict[str, Any]]:
    """Return the part of a statement from FROM to the end of WHERE, with its values."""
    parts = [f"file IN ({', '.join(map(str, map(int, files)))})"]
    values: dict[str, Any] = {
        name: getattr(wanted, name) for name in ("outcome", "kind", "db_id", "hardness", "question_id")
    }
    if wanted.kind == "any":
        parts.append("kind IS NOT NULL")
        values["kind"] = ""
    values = {name: value for name, value in values.items() if value}
    parts += [f"{name} = :{name}" for name in values]
    for name, condition in (
        ("min_step", "step >="),
        ("max_step", "step <="),
        ("min_reward", "reward >="),
        ("max_reward", "reward <="),
    ):
        if (bound := getattr(wanted, name)) is not None:
            parts.append(f"{condition} :{name}")
            values[name] = bound
    if match := match_of(wanted.text):
        parts.append("id IN (SELECT rowid FROM words WHERE words MATCH :match)")
        values["match"] = match
    elif wanted.text.strip():
        parts.append("0")  # punctuation alone is in no index
    return f"FROM episodes WHERE {' AND '.join(parts)}", values
