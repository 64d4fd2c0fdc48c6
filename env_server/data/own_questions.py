"""Databases without questions, and the questions that a person types: a file or folder of their own, to look around in.

    read_databases("orders.csv")        one database, called like the file; also of a .tsv, .parquet, .sqlite or .db
    read_databases("shop/")             every database of a folder, as `env_server.data.folder` finds them

Files are only read; tables are imported into the cache. Nobody knows the answer to a typed question, so an ANSWER to it
is not judged (`Question.judged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from env_server.data.database_files import DATABASE_SUFFIXES, file_problem, is_database_name
from env_server.data.folder import find_sources
from env_server.data.question_files import is_question_table, question_files
from env_server.data.source_table import table_name
from env_server.data.tabular import TABLE_SUFFIXES, import_tables, is_table_file
from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.errors import DataError

TYPED = "typed"
"""The id of a typed question."""


def has_no_questions(path: Path) -> bool:
    """Tell whether the path is a file of data, or a folder that holds no file of questions. Raises DataError."""
    if path.is_dir():
        return not question_files(path)
    return is_table_file(path) or is_database_name(path)


def read_databases(path: Path, cache_dir: Path) -> dict[str, Path]:
    """Return the SQLite file of each database in a file or folder, by its name; tables are imported into `cache_dir`.

    Raises DataError when there is none, or when it cannot be used.
    """
    if path.is_dir():
        return {name: source.path(cache_dir) for name, source in find_sources(path).usable.items()}
    if not path.exists():
        raise DataError(f"{path} does not exist. Give a file or a folder that is there")
    if is_table_file(path):
        if is_question_table(path):
            raise DataError(f"{path} looks like questions, not a table. Give the folder that holds it and the tables")
        return {table_name(path): import_tables(path.stem, [path], cache_dir)}
    if not is_database_name(path):
        raise DataError(
            f"{path} is no table and no database. Give one of {', '.join(TABLE_SUFFIXES + DATABASE_SUFFIXES)}"
        )
    if problem := file_problem(path):
        raise DataError(problem)
    return {table_name(path): path}


def typed_question(text: str, databases: Mapping[str, Path], database: str | None = None) -> Dataset:
    """Return a data set of the question alone. Raises DataError where it is not clear which database is meant."""
    known = ", ".join(databases)
    if database is None and len(databases) != 1:
        raise DataError(f"there are {len(databases)} databases; say which one the question is about: {known}")
    db_id = database or next(iter(databases))
    if db_id not in databases:
        raise DataError(f"there is no database {db_id!r}; there is {known}")
    question = Question(TYPED, text, db_id, gold_sql="", hardness=Hardness.EASY, split=Split.EVAL, gold=Gold((), False))
    return Dataset(TYPED, (question,), {db_id: databases[db_id]})
