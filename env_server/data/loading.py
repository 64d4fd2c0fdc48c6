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
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from env_server.cache import Cache, default_cache_dir
from env_server.data.curation import Progress, curate
from env_server.data.folder import read_folder
from env_server.data.layout import BIRD, SPIDER, read_layout
from env_server.data.raw import RawDataset
from env_server.data.synthetic import build_scrambled, build_synthetic
from env_server.dataset import Dataset
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.sql.sandbox import limit_memory
from env_server.types import AnswerMode

DEFAULT_SPEC = "synthetic"
GENERATED = ("synthetic", "scrambled")
ANSWERS = "answers:"
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
