"""Spider's layout on disk, read into a `RawDataset`. Nothing is executed and no database is opened.

A Spider folder holds question files and databases, as the release of Yu et al. (EMNLP 2018) unpacks:

    train_spider.json, train_others.json, dev.json     any of them; a list of {"db_id", "question", "query"}
    database/ID/ID.sqlite                              one file for each db_id

The databases may also be `.db` files, lie directly in the folder, and the folder may be called `databases` or
`test_database`. Other keys of a question are ignored. A question's id is its file and its place in it, as in
`train_spider-0042` (counted from 0), so it stays the same as long as the file does.

Train and evaluation never share a database. With a dev.json the official split is taken: every database that
dev.json names is for evaluation, all others for training. Without one, a hash of the db_id decides, so a
database stays on its side when others come or go.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from env_server.data.questions import Split
from env_server.data.raw import RawDataset, RawQuestion
from env_server.errors import DataError

TRAIN_FILES = ("train_spider.json", "train_others.json")
EVAL_FILE = "dev.json"
DATABASE_FOLDERS = ("database", "databases", "test_database")
DATABASE_SUFFIXES = (".sqlite", ".db")
EVAL_FRACTION = 0.25

_KEYS = ("db_id", "question", "query")


def read_spider(folder: Path) -> RawDataset:
    """Read a Spider folder. Questions keep the order of their files, train files first.

    A question whose database file is missing is kept; its db_id is then not in `databases`.
    Raises DataError, naming the file, the line and the fix, when the folder, a question file or all the
    databases are missing, and when a file is not UTF-8, not JSON or lacks a key.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Give the folder that holds {TRAIN_FILES[0]} and database/")
    files = [folder / name for name in (*TRAIN_FILES, EVAL_FILE) if (folder / name).is_file()]
    if not files:
        names = ", ".join((*TRAIN_FILES, EVAL_FILE))
        raise DataError(f"{folder} holds no question file. Put at least one of these there: {names}")
    entries = [(f"{file.stem}-{i:04d}", entry) for file in files for i, entry in enumerate(_read_entries(file))]
    if not entries:
        raise DataError(f"no question in {', '.join(map(str, files))}. Unpack the Spider release again")
    used = {entry["db_id"] for _, entry in entries}
    databases = {db_id: path for db_id, path in find_databases(folder).items() if db_id in used}
    if not databases:
        example = folder / DATABASE_FOLDERS[0] / entries[0][1]["db_id"] / (entries[0][1]["db_id"] + ".sqlite")
        raise DataError(f"{folder} holds none of the {len(used)} databases. Put them there as {example}")
    official = {entry["db_id"] for name, entry in entries if name.startswith(f"{Path(EVAL_FILE).stem}-")}
    splits = {i: Split.EVAL if i in official else Split.TRAIN for i in used} if official else split_databases(used)
    questions = (
        RawQuestion(question_id, entry["question"].strip(), entry["db_id"], entry["query"], splits[entry["db_id"]])
        for question_id, entry in entries
    )
    return RawDataset(name="spider", questions=tuple(questions), databases=databases)


def split_databases(db_ids: Iterable[str], eval_fraction: float = EVAL_FRACTION) -> dict[str, Split]:
    """Assign each database to TRAIN or EVAL by the SHA-256 of its id: about `eval_fraction` of them to EVAL.

    Each id is decided on its own, except that of two or more databases neither side is left empty: the one
    whose hash is nearest to the threshold then changes sides.
    """
    places = {db_id: _unit_hash(db_id) for db_id in db_ids}
    splits = {db_id: Split.EVAL if place < eval_fraction else Split.TRAIN for db_id, place in places.items()}
    if len(places) > 1 and len(set(splits.values())) == 1:
        nearest = min(places, key=lambda db_id: abs(places[db_id] - eval_fraction))
        splits[nearest] = Split.TRAIN if splits[nearest] is Split.EVAL else Split.EVAL
    return splits


def find_databases(folder: Path) -> dict[str, Path]:
    """Map db_id to its file, for every database in the known layouts; the first that is found counts."""
    found: dict[str, Path] = {}
    for root in (folder / name for name in DATABASE_FOLDERS):
        for entry in sorted(root.iterdir()) if root.is_dir() else ():
            for candidate in _candidates(entry):
                if candidate.is_file():
                    found.setdefault(candidate.stem, candidate)
    return found


def _candidates(entry: Path) -> Iterator[Path]:
    if entry.suffix in DATABASE_SUFFIXES:
        yield entry
    yield from (entry / (entry.name + suffix) for suffix in DATABASE_SUFFIXES)


def _unit_hash(db_id: str) -> float:
    """A number in [0, 1) that depends on nothing but the id."""
    return int.from_bytes(hashlib.sha256(db_id.encode()).digest()[:6]) / 2**48


def _read_entries(file: Path) -> list[dict[str, str]]:
    """Read one question file; every entry has the three keys, each a string that is not blank."""
    text = _read_text(file)
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{file}, line {error.lineno}, column {error.colno}"
        raise DataError(f"{place}: not JSON ({error.msg}). Correct the line, or unpack the file again") from error
    if not isinstance(entries, list):
        raise DataError(f"{file}, line 1: holds {_kind(entries)}, not a list of questions. Wrap it in [ ]")
    for index, entry in enumerate(entries):
        problem = _problem(entry)
        if problem:
            line = _line_of(text, index)
            raise DataError(f"{file}, line {line} (question {index}): {problem}. Correct or remove this question")
    return entries


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. Check that it exists and is readable") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}). Convert the file, "
            f"for example with iconv -f WINDOWS-1252 -t UTF-8"
        ) from error


def _problem(entry: object) -> str:
    """Say what is wrong with an entry; empty when nothing is."""
    if not isinstance(entry, dict):
        return f"is {_kind(entry)}, not an object with the keys {', '.join(_KEYS)}"
    for key in _KEYS:
        if key not in entry:
            return f'the key "{key}" is missing'
        if not isinstance(entry[key], str):
            return f'"{key}" is {_kind(entry[key])}, not a string'
        if not entry[key].strip():
            return f'"{key}" is blank'
        if any("\ud800" <= letter <= "\udfff" for letter in entry[key]):
            return f'"{key}" holds half of a surrogate pair, which is no character'
    return ""


def _kind(value: object) -> str:
    """Name a JSON value's type as JSON names it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _line_of(text: str, index: int) -> int:
    """Return the line, counted from 1, where element `index` of the JSON list in `text` begins."""
    decoder = json.JSONDecoder()
    position = text.index("[")
    for _ in range(index + 1):
        start = _skip(text, position + 1)
        position = _skip(text, decoder.raw_decode(text, start)[1])
    return text.count("\n", 0, start) + 1


def _skip(text: str, position: int) -> int:
    """Return the position of the next character that is not JSON's white space."""
    while text[position] in " \t\r\n":
        position += 1
    return position
