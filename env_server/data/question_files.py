"""Which files of a folder hold its questions, and what they say: JSON, JSON Lines or a table.

    questions.json, questions.jsonl    or the only .json or .jsonl file there, whatever it is called
    questions.csv, questions.tsv       a column `question`, a column `sql` or `answer`, and the optional keys as others
    questions-suggested.jsonl          read beside it, or alone: what `sqlenv data suggest` wrote

A key may have another name (`SYNONYMS`). A table that looks like questions (`is_question_table`) is never a table of
the database, where the agent would read the gold SQL: it is read as questions, or refused. In a table of questions an
empty cell is a key that is left out, and columns under other names are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from env_server.data.csv_table import CSV_SUFFIXES, of_width, read_records
from env_server.data.database_files import visible
from env_server.data.json_files import QuestionFile, read_json_file
from env_server.data.parquet_table import PARQUET_SUFFIXES, read_first_rows
from env_server.errors import DataError

QUESTIONS_STEM = "questions"
OPTIONAL_KEYS = ("answer", "database", "id", "evidence", "split")
SYNONYMS = {
    "sql": ("sql", "sql_query", "gold_sql", "gold_query", "gold", "query", "target", "completion", "output"),
    "question": ("question", "q", "prompt", "nl", "nl_question", "utterance", "text", "instruction", "input", "query"),
    "database": ("database", "db_id", "db"),
    "answer": ("answer", "answers", "a", "expected", "result"),
}
"""The names of a key, the preferred one first. Case does not matter, nor a blank or hyphen for an underscore."""
SUGGESTED_FILE = "questions-suggested.jsonl"
_DISTINCTIVE = ("question", "q", "prompt", "nl", "nl_question", "utterance")
"""Names of a question that a column of a database's table hardly has."""
_SQL = re.compile(r"\s*(?:--[^\n]*\n\s*)*\(*\s*(?:select|with)\b", re.IGNORECASE)
_SAMPLE = 20
_JSON_SUFFIXES = (".json", ".jsonl")
_NEW_FILE = f"{QUESTIONS_STEM}.jsonl"
_LISTED = 8


def is_question_table(path: Path) -> bool:
    """Tell whether a table looks like questions: it is called so and has such a column, or holds questions with SQL.

    Raises DataError for a table that is called so and cannot be read.
    """
    if path.suffix.lower() not in (*CSV_SUFFIXES, *PARQUET_SUFFIXES):
        return False
    called_so = path.stem.casefold() == QUESTIONS_STEM
    try:
        records = _first_records(path)
        names = [_name(cell) for cell in next(records, [])]
        columns = columns_of(names)
        if called_so and any(name in _DISTINCTIVE or "sql" in name for name in names):
            return True
        if {"question", "answer"} <= columns.keys() and len(columns) == len(names):
            return True  # nothing but what a question has
        if "sql" not in columns or not (called_so or "question" in columns):
            return False
        queries = [cells[columns["sql"]] for cells in records if len(cells) == len(names)]
        return any(map(_SQL.match, queries)) and all(_SQL.match(query) for query in queries if query.strip())
    except DataError:
        if called_so:
            raise
        return False  # reading it as a table will name the problem


def question_files(folder: Path) -> list[Path]:
    """Return the folder's files of questions; none where it has none. Raises DataError when there is no telling."""
    files = [file for file in visible(folder) if file.is_file()]
    suggested = [file for file in files if file.name == SUGGESTED_FILE]
    json_files = [file for file in files if file.suffix.lower() in _JSON_SUFFIXES and file not in suggested]
    tables = [file for file in files if is_question_table(file)]
    among = sorted([*json_files, *tables])
    chosen = [file for file in among if file.stem.casefold() == QUESTIONS_STEM] or among
    if len(chosen) > 1:
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
            'there?", "sql": "SELECT COUNT(*) FROM orders"} or {"question": "...", "answer": 42}, or let SQLEnv '
            "propose some: "
            f"sqlenv data suggest {folder}"
        )
    if not any(file.entries for file in files):
        raise DataError(f'{files[0].path} holds no question. Add some: {{"question": "...", "sql": "SELECT ..."}}')
    return files


def columns_of(names: Sequence[str]) -> dict[str, int]:
    """Map each key of a question to the place of the column or key that gives it, among those of these names."""
    plain = [_name(name) for name in names]
    found: dict[str, int] = {}
    for key in dict.fromkeys((*SYNONYMS, *OPTIONAL_KEYS)):
        places = (plain.index(name) for name in SYNONYMS.get(key, (key,)) if name in plain)
        if (place := next((place for place in places if place not in found.values()), None)) is not None:
            found[key] = place
    return found


def _read(path: Path) -> QuestionFile:
    if path.suffix.lower() in PARQUET_SUFFIXES:
        raise DataError(f"{path} looks like questions, which are not read from Parquet. Save it as {_NEW_FILE}")
    if path.suffix.lower() in CSV_SUFFIXES:
        return _read_table(path)
    file = read_json_file(path)
    return replace(file, entries=[_renamed(entry) for entry in file.entries])


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with its keys under their preferred names; Spider's `sql`, a parse tree, gives way to text."""
    given = {key: value for key, value in entry.items() if not isinstance(value, dict)}
    keys = list(given)
    names = {keys[place]: key for key, place in columns_of(keys).items()}
    return {names.get(key, key): value for key, value in entry.items() if key in names or key not in names.values()}


def _read_table(path: Path) -> QuestionFile:
    records = read_records(path)
    _, header = next(records)
    names = [_name(cell) for cell in header]
    columns = columns_of(names)
    if twice := next((names[i] for i in columns.values() if names.count(names[i]) > 1), ""):
        raise DataError(f"{path}, line 1: two columns are called {twice}. Rename or remove one of them")
    missing = ["question"] if "question" not in columns else []
    missing += ["sql or answer"] if not columns.keys() & {"sql", "answer"} else []
    if missing:
        raise DataError(
            f"{path}, line 1: the columns are {', '.join(header[:_LISTED])}, and there is no "
            f"{' and no '.join(missing)}. Add the column, or, if this is a table of the database, give the file "
            "another name"
        )
    lines: list[int] = []
    entries: list[dict[str, str]] = []
    for line, cells in of_width(path, records, len(names)):
        lines.append(line)
        entries.append({key: cells[i] for key, i in columns.items() if cells[i].strip()})
    return QuestionFile(path, entries, "", lines)


def _first_records(path: Path) -> Iterator[Sequence[str]]:
    """Yield the header of a table and its first rows."""
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return iter(read_first_rows(path, _SAMPLE))
    return (cells for _, cells in islice(read_records(path), 1 + _SAMPLE))


def _name(cell: str) -> str:
    return re.sub(r"[\s-]+", "_", cell.strip().casefold())
