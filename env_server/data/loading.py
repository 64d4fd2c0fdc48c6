"""A data set by its name: `load_dataset("synthetic")`, `load_dataset("spider:PATH")`, `load_dataset("my-shop")`.

    synthetic[:SEED]    generated databases with readable names, evaluated on unseen domains (the default)
    scrambled[:SEED]    generated databases with random names, for training only
    spider:PATH         a folder in Spider's layout (`env_server.data.layout`)
    bird:PATH           a folder in BIRD's layout
    PATH                a folder of your own: SQLite files or tables, and questions (`env_server.data.folder`)
    answers:NAME        any of them with its gold SQL hidden once the answers are known, as if nobody had written any

A name that is none of the others is a path when it holds a path separator or a folder is called so. Generated data
sets, and databases that were made from tables, are kept in a cache directory and are the same every time. Every gold
query is run at the first load (`env_server.data.curation`), under the settings of the environment that will play the
questions; what it gave is kept in the cache (`env_server.cache`), for the later ones.

Databases without questions, a file of them or a folder, are looked around in (`read_databases`), and asked about
(`typed_question`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from env_server.cache import Cache, default_cache_dir
from env_server.data.curation import Progress, curate
from env_server.data.database_files import DATABASE_SUFFIXES, file_problem, is_database_name
from env_server.data.folder import find_sources, read_folder
from env_server.data.layout import BIRD, SPIDER, read_layout
from env_server.data.question_files import is_question_table, question_files
from env_server.data.raw import RawDataset
from env_server.data.source_table import table_name
from env_server.data.synthetic import build_scrambled, build_synthetic
from env_server.data.tabular import TABLE_SUFFIXES, import_tables, is_table_file
from env_server.dataset import Dataset, Gold, Hardness, Question, Split
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.sql.sandbox import limit_memory
from env_server.types import AnswerMode

DEFAULT_SPEC = "synthetic"
GENERATED = ("synthetic", "scrambled")
ANSWERS = "answers:"
TYPED = "typed"
"""The id of a typed question."""
SYNTAX = "synthetic[:SEED], scrambled[:SEED], spider:PATH, bird:PATH, or the PATH of a folder of your own"


def load_dataset(
    spec: str = DEFAULT_SPEC,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Load and curate the data set that `spec` names.

    `answer_mode` and `settings` decide which golds can be answered. `cache_dir` is where generated data sets, imported
    tables and facts are kept, `default_cache_dir()` when None. Raises DataError when the name is unknown or the
    data cannot be used.
    """
    limits = settings or EnvSettings()
    limit_memory(limits.sandbox)
    cache = cache_dir or default_cache_dir()
    source = spec.removeprefix(ANSWERS)
    if source != spec and answer_mode is AnswerMode.SQL:
        raise DataError(f"{spec}: sql mode judges queries by the gold SQL, which {ANSWERS} hides. Use {source}")
    dataset = curate(
        read_source(source, cache),
        answer_mode=answer_mode,
        sandbox=limits.sandbox,
        display=limits.display,
        progress=progress,
        cache=Cache(cache),
    )
    if source == spec:
        return dataset
    hidden = tuple(replace(question, gold_sql="", duplicate_of="") for question in dataset.questions)
    return replace(dataset, name=spec, questions=hidden)


def check_readable(spec: str, cache_dir: Path | None = None) -> None:
    """Raise DataError where `spec` names nothing that can be read. Generates no data set, and runs no gold query."""
    source = spec.removeprefix(ANSWERS)
    name, _, argument = (part.strip() for part in source.partition(":"))
    if name in GENERATED:
        _seed(source, argument)
    else:
        read_source(source, cache_dir or default_cache_dir())


def read_source(spec: str, cache_dir: Path) -> RawDataset:
    """Read the data set that `spec` names, without trying its gold queries. Raises DataError."""
    name, _, argument = (part.strip() for part in spec.partition(":"))
    match name:
        case "synthetic":
            return build_synthetic(cache_dir, _seed(spec, argument))
        case "scrambled":
            return build_scrambled(cache_dir, _seed(spec, argument))
        case "spider" if argument:
            return read_layout(SPIDER, Path(argument).expanduser())
        case "bird" if argument:
            return read_layout(BIRD, Path(argument).expanduser())
    if is_folder(spec):
        return read_folder(Path(spec).expanduser(), cache_dir)
    raise DataError(f"{spec!r} names no data set and no folder. Known: {SYNTAX}")


def is_named(spec: str) -> bool:
    """Tell whether `spec` begins with the name of a data set, which counts whatever folders there are."""
    name, _, argument = (part.strip() for part in spec.removeprefix(ANSWERS).partition(":"))
    return name in GENERATED or (name in ("spider", "bird") and argument != "")


def is_folder(spec: str) -> bool:
    """Tell whether `spec` names a folder of one's own, or a file that is to be refused as one."""
    if is_named(spec) or not spec.strip():
        return False
    folder = Path(spec).expanduser()
    return folder.exists() if _has_separator(spec) else folder.is_dir()


def _has_separator(spec: str) -> bool:
    return any(separator in spec for separator in (os.sep, os.altsep) if separator)


def _seed(spec: str, argument: str) -> int:
    if not argument:
        return 0
    if argument.isascii() and argument.isdigit():
        return int(argument)
    raise DataError(f"{spec!r}: the seed {argument!r} is not a whole number. Known: {SYNTAX}")


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
    """Return a data set of the question alone; nobody knows the answer, so that an ANSWER is not judged.

    Raises DataError where it is not clear which database is meant.
    """
    known = ", ".join(databases)
    if database is None and len(databases) != 1:
        raise DataError(f"there are {len(databases)} databases; say which one the question is about: {known}")
    db_id = database or next(iter(databases))
    if db_id not in databases:
        raise DataError(f"there is no database {db_id!r}; there is {known}")
    question = Question(TYPED, text, db_id, gold_sql="", hardness=Hardness.EASY, split=Split.EVAL, gold=Gold((), False))
    return Dataset(TYPED, (question,), {db_id: databases[db_id]})
