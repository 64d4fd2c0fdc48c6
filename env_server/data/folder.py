"""A folder of your own: databases or tables, and questions with the SQL that answers them.

    shop.sqlite, crm.db, ...          SQLite files; each is a database that is called like its file
    orders.csv, items.parquet, ...    CSV, TSV and Parquet files; together they are one database, called like the folder
    questions.json or .jsonl          {"question": "How many orders are there?", "sql": "SELECT COUNT(*) FROM orders"}
    questions.csv                     the same as a table: a column `question`, a column `sql`, and so on

In place of `sql`, a question may have `answer`: a value, a list of values or a list of rows, as in 42, ["Oslo", "Rome"]
and [["Ada", 3], ["Bo", 2]]. Its order does not count, and a number stands for all that round to it. With both, the SQL
decides.

    keys.toml                         primary and foreign keys of the tables beside it (`env_server.data.tabular`)

Databases may also lie in folders inside: SQLite files as above, and the tables of each such folder make one database
that is called like it. Tables are imported once (`env_server.data.tabular`). Which files hold the questions:
`env_server.data.question_files`. A question may also have

    database    its database; needed when there are several
    id          its name; else its file and its place in it, as in questions-0007 (counted from 0)
    evidence    what one has to know to answer it, shown to the agent with the question
    split       "train" or "eval", in every question or in none

Without `split`, several databases are split by database, so that the schema of an evaluation question is unseen. The
questions about a single database are split among themselves, a quarter of them for evaluation, by a hash of the SQL, or
of the question where there is none: questions with the same SQL stay together, but the schema is seen in training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from env_server.data.cells import normal
from env_server.data.database_files import DATABASE_SUFFIXES, file_problem, is_database_name, visible
from env_server.data.json_files import QuestionFile, kind_of
from env_server.data.layout import BIRD, SPIDER
from env_server.data.question_files import OPTIONAL_KEYS, is_question_table, read_question_files
from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.source_table import is_text, table_name
from env_server.data.splits import split_databases, split_queries
from env_server.data.tabular import TABLE_SUFFIXES, import_tables, is_table_file
from env_server.dataset import Row, Split
from env_server.errors import DataError
from env_server.judging.answers import normalize_text

_LISTED = 8
Place = tuple[QuestionFile, int]
"""A question's file, and its place in it."""
_SPLITS = {"": None, "train": Split.TRAIN, "eval": Split.EVAL}


def read_folder(folder: Path, cache_dir: Path) -> RawDataset:
    """Read a folder; tables are imported into `cache_dir`. Questions keep the order of their file.

    Raises DataError, naming the file, the line and the fix, when something is missing or wrong.
    """
    sources = find_sources(folder)
    questions = read_questions(folder, sources)
    used = dict.fromkeys(question.db_id for question in questions)
    databases = {db_id: sources.usable[db_id].path(cache_dir) for db_id in used}
    return RawDataset(sources.name, tuple(questions), databases)


def read_questions(folder: Path, sources: Sources) -> list[RawQuestion]:
    """Read the questions about the databases of a folder, in the order of their files. Raises DataError."""
    places, questions = read_places(folder, sources)
    return _split(places, questions)


def read_places(folder: Path, sources: Sources) -> tuple[list[Place], list[RawQuestion]]:
    """Read the questions with their places; one that states no split has ALL. Raises DataError."""
    places = [(file, index) for file in read_question_files(folder) for index in range(len(file.entries))]
    questions = [_question(file, index, sources) for file, index in places]
    _refuse_repeated_ids(places, questions)
    return places, questions


def _refuse_benchmarks(folder: Path) -> None:
    """Raises DataError for a folder of Spider or BIRD, which would be read wrongly or not at all."""
    for layout in (SPIDER, BIRD):
        questions = any((folder / name).is_file() for name in layout.question_files)
        if questions and any((folder / name).is_dir() for name in layout.database_folders):
            raise DataError(f"{folder} looks like a release of {layout.name}. Load it as {layout.name}:{folder}")


@dataclass(frozen=True, slots=True)
class Source:
    """One database: a SQLite file, or the files of its tables."""

    name: str
    files: tuple[Path, ...]

    def path(self, cache_dir: Path) -> Path:
        """Return the SQLite file, imported where it must be."""
        if is_database_name(self.files[0]):
            return self.files[0]
        return import_tables(self.name, self.files, cache_dir)


@dataclass(frozen=True, slots=True)
class Sources:
    """The databases of a folder by name, and why others cannot be used; `name` is the data set's."""

    name: str
    usable: Mapping[str, Source]
    broken: Mapping[str, str]


def find_sources(folder: Path) -> Sources:
    """Find the databases. Raises DataError for no folder, two databases of one name, and none that can be used."""
    if not folder.is_dir():
        what = "is a file. Give the folder that holds it" if folder.exists() else "is not a folder"
        raise DataError(f"{folder} {what}")
    _refuse_benchmarks(folder)
    named = folder if folder.name not in ("", "..") else folder.resolve()
    name = normal(named.name) or "data"
    groups = [(name, folder), *((normal(inner.name), inner) for inner in visible(folder) if inner.is_dir())]
    usable: dict[str, Source] = {}
    broken: dict[str, str] = {}
    for group, place in groups:
        files = [file for file in visible(place) if file.is_file()]
        sources = [Source(table_name(file), (file,)) for file in files if is_database_name(file)]
        asked = [file for file in files if is_question_table(file)]
        if asked and place != folder:
            raise DataError(f"{asked[0]} looks like questions, which must not be a table. Move it to {folder}")
        tables = tuple(file for file in files if is_table_file(file) and file not in asked)
        for source in (*sources, *([Source(group, tables)] if tables else [])):
            if problem := _problem(source):
                broken[source.name] = problem
            elif source.name in usable:
                both = f"{usable[source.name].files[0]} and {source.files[0]}"
                raise DataError(f"two databases are called {source.name!r}, those of {both}. Rename one of them")
            else:
                usable[source.name] = source
    if not usable:
        wanted = f"Put SQLite files ({', '.join(DATABASE_SUFFIXES)}) or tables ({', '.join(TABLE_SUFFIXES)}) there"
        raise DataError(next(iter(broken.values()), f"{folder} holds no database. {wanted}"))
    return Sources(name, usable, broken)


def _problem(source: Source) -> str:
    first = source.files[0]
    if not is_text(source.name):
        return f"{str(first)!r}: a database cannot be called so, the name is not Unicode. Rename it"
    return file_problem(first) if is_database_name(first) else ""


def _question(file: QuestionFile, index: int, sources: Sources) -> RawQuestion:
    """Read one question. Its split is ALL where it states none."""
    entry = file.entries[index]
    answer: tuple[Row, ...] = ()
    required = ["question", "sql"]
    if entry.get("sql") is None and "answer" in entry:
        required.remove("sql")
        try:
            answer = stated_rows(entry["answer"])
        except ValueError as error:
            fix = 'Write a value, a list of values, or a list of rows: "answer": [["Ada", 3], ["Bo", 2]]'
            raise file.error(index, f'"answer" {error}', fix) from None
    text = file.strings(index, required, [key for key in OPTIONAL_KEYS if key not in ("id", "answer")])
    if text["split"] not in _SPLITS:
        raise file.error(index, f'"split" is {text["split"]!r}', 'Make it "train" or "eval"')
    db_id, sql = _db_id(file, index, normal(text["database"]), sources), text.get("sql", "")
    return RawQuestion(
        question_id=_id(file, index),
        text=text["question"].strip(),
        db_id=db_id,
        sql=sql if is_database_name(sources.usable[db_id].files[0]) else normal(sql),  # as their import is
        answer=answer,
        split=_SPLITS[text["split"]] or Split.ALL,
        evidence=text["evidence"],
    )


def stated_rows(answer: Any) -> tuple[Row, ...]:
    """Return the rows that a stated answer means: a value, a list of values, or a list of rows, as JSON or its text.

    A text that is a number or a list in JSON, as a cell of a table is, means that. Raises ValueError.
    """
    if isinstance(answer, str):
        try:
            read = json.loads(answer)
        except ValueError:
            read = answer
        # "007" and "true" stay the texts that they are.
        answer = (
            read if isinstance(read, list) or (isinstance(read, int | float) and not isinstance(read, bool)) else answer
        )
    rows = answer if isinstance(answer, list) else [answer]
    table = [tuple(row) if isinstance(row, list) else (row,) for row in rows]
    if len({len(row) for row in table}) > 1:
        raise ValueError("has rows of different lengths")
    for cell in (cell for row in table for cell in row):
        if isinstance(cell, dict | list) or (isinstance(cell, float) and not math.isfinite(cell)):
            raise ValueError(f"holds {kind_of(cell)} that is not a value")
    if table and not table[0]:
        raise ValueError("has rows without a value")
    return tuple(tuple(int(cell) if isinstance(cell, bool) else cell for cell in row) for row in table)


def _id(file: QuestionFile, index: int) -> str:
    given = file.entries[index].get("id")
    if isinstance(given, int) and not isinstance(given, bool):
        return str(given)
    if given is not None and not isinstance(given, str):
        raise file.error(index, f'"id" is {kind_of(given)}', "Make it a string or a whole number")
    return file.strings(index, (), ("id",))["id"] or f"{file.path.stem}-{index:04d}"


def _db_id(file: QuestionFile, index: int, named: str, sources: Sources) -> str:
    known = list(sources.usable)
    listed = ", ".join(known[:_LISTED]) + (", ..." if len(known) > _LISTED else "")
    if not named:
        if len(known) == 1:
            return known[0]
        raise file.error(index, f'the key "database" is missing, and there are {len(known)}', f"Name one of {listed}")
    if named not in sources.usable:
        if named in sources.broken:
            raise file.error(index, f"database {named!r} cannot be used", sources.broken[named])
        close = get_close_matches(named, known, n=1)
        fix = f"Did you mean {close[0]!r}?" if close else f"Name one of {listed}"
        raise file.error(index, f"there is no database {named!r}", fix)
    return named


def _refuse_repeated_ids(places: Sequence[Place], questions: Sequence[RawQuestion]) -> None:
    first: dict[str, Place] = {}
    for (file, index), question in zip(places, questions, strict=True):
        if question.question_id in first:
            earlier, place = first[question.question_id]
            where = "" if earlier is file else f" of {earlier.path.name}"
            problem = (
                f"the id {question.question_id!r} is also that of the question on line {earlier.line(place)}{where}"
            )
            raise file.error(index, problem, "Give each question an id of its own, or none of them any")
        first[question.question_id] = (file, index)


def _split(places: Sequence[Place], questions: Sequence[RawQuestion]) -> list[RawQuestion]:
    """Return the questions, each TRAIN or EVAL. Raises DataError when only some state it."""
    silent = [index for index, question in enumerate(questions) if question.split is Split.ALL]
    if not silent:
        return list(questions)
    if len(silent) < len(questions):
        problem = 'the key "split" is missing, though other questions have it'
        file, index = places[silent[0]]
        raise file.error(index, problem, "Give it to every question, or to none")
    by_database = split_databases({question.db_id for question in questions})
    if len(by_database) > 1:
        splits = [by_database[question.db_id] for question in questions]
    else:
        splits = split_queries([question.sql or normalize_text(question.text) for question in questions])
    return [replace(question, split=split) for question, split in zip(questions, splits, strict=True)]
