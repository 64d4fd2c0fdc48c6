"""Which files of a folder hold its questions, and what they say: JSON, JSON Lines or a table.

    questions.json, questions.jsonl    or the only .json or .jsonl file there, whatever it is called
    questions.csv, questions.tsv       a column `question`, a column `sql`, and the optional keys as further columns
    questions-suggested.jsonl          read beside it, or alone: what `sqlenv data suggest` wrote

A table that is called questions and has no such columns is a table of the database. In a table of questions an empty
cell is a key that is left out, and columns under other names are passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from env_server.data.csv_table import CSV_SUFFIXES, of_width, read_records
from env_server.data.database_files import visible
from env_server.data.json_files import QuestionFile, read_json_file
from env_server.errors import DataError

QUESTIONS_STEM = "questions"
REQUIRED_KEYS = ("question", "sql")
OPTIONAL_KEYS = ("database", "id", "evidence", "split")
SUGGESTED_FILE = "questions-suggested.jsonl"
_JSON_SUFFIXES = (".json", ".jsonl")
_NEW_FILE = f"{QUESTIONS_STEM}.jsonl"
_LISTED = 8


def is_question_table(path: Path) -> bool:
    """Tell whether a table holds questions: it is called so, and has the columns. Raises DataError."""
    if path.stem.casefold() != QUESTIONS_STEM or path.suffix.lower() not in CSV_SUFFIXES:
        return False
    _, header = next(read_records(path), (0, []))
    return set(REQUIRED_KEYS) <= {_key(cell) for cell in header}


def question_files(folder: Path) -> list[Path]:
    """Return the folder's files of questions; none where it has none. Raises DataError when there is no telling."""
    files = [file for file in visible(folder) if file.is_file()]
    suggested = [file for file in files if file.name == SUGGESTED_FILE]
    json_files = [file for file in files if file.suffix.lower() in _JSON_SUFFIXES and file not in suggested]
    tables = [file for file in files if is_question_table(file)]
    named = [file for file in json_files if file.stem.lower() == QUESTIONS_STEM] + tables
    chosen = named or json_files
    if len(chosen) > 1:
        among = sorted({*json_files, *tables})
        names = ", ".join(file.name for file in among[:_LISTED])
        kind = f"{len(among)} files of questions" if tables else f"{len(among)} JSON files"
        raise DataError(f"{folder} holds {kind} ({names}). Call the one with the questions {_NEW_FILE}")
    return chosen + suggested


def read_question_files(folder: Path) -> list[QuestionFile]:
    """Read the folder's questions. Raises DataError when there are none."""
    files = [_read(path) for path in question_files(folder)]
    if not files:
        raise DataError(
            f'{folder} holds no questions. Write {_NEW_FILE} with lines like {{"question": "How many orders are '
            'there?", "sql": "SELECT COUNT(*) FROM orders"}, or let SQLEnv propose some: '
            f"sqlenv data suggest {folder}"
        )
    if not any(file.entries for file in files):
        raise DataError(f'{files[0].path} holds no question. Add some: {{"question": "...", "sql": "SELECT ..."}}')
    return files


def _read(path: Path) -> QuestionFile:
    return read_json_file(path) if path.suffix.lower() in _JSON_SUFFIXES else _read_table(path)


def _read_table(path: Path) -> QuestionFile:
    records = read_records(path)
    _, header = next(records)
    keys = [_key(cell) for cell in header]
    known = [i for i, key in enumerate(keys) if key in (*REQUIRED_KEYS, *OPTIONAL_KEYS)]
    if twice := next((keys[i] for i in known if keys.count(keys[i]) > 1), ""):
        raise DataError(f"{path}, line 1: two columns are called {twice}. Rename or remove one of them")
    lines: list[int] = []
    entries: list[dict[str, str]] = []
    for line, cells in of_width(path, records, len(keys)):
        lines.append(line)
        entries.append(_entry(keys, known, cells))
    return QuestionFile(path, entries, "", lines)


def _entry(keys: Sequence[str], known: Sequence[int], cells: Sequence[str]) -> dict[str, str]:
    return {keys[i]: cells[i] for i in known if cells[i].strip()}


def _key(cell: str) -> str:
    return cell.strip().casefold()
