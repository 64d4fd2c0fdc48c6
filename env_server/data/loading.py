"""A data set by its name: `load_dataset("synthetic")`, `load_dataset("spider:/data/spider")`.

    synthetic[:SEED]    generated databases with readable names, evaluated on unseen domains (the default)
    scrambled[:SEED]    generated databases with random names, for training only
    spider:PATH         a folder in Spider's layout (`env_server.data.spider`)

Generated data sets are kept in a cache directory and are the same for the same seed. Every gold query is run at
load (`env_server.data.curation`), under the settings of the environment that will play the questions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs

from env_server.data.curation import Progress, curate
from env_server.data.questions import Dataset
from env_server.data.raw import RawDataset
from env_server.data.spider import read_spider
from env_server.data.synthetic import GENERATOR_VERSION, build_scrambled, build_synthetic
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode

DEFAULT_SPEC = "synthetic"
CACHE_VARIABLE = "SQLENV_CACHE_DIR"
SYNTAX = "synthetic[:SEED], scrambled[:SEED], spider:PATH"


def load_dataset(
    spec: str = DEFAULT_SPEC,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Load and curate the data set that `spec` names.

    `answer_mode` and `settings` decide which golds can be answered. `cache_dir` is where generated data sets are
    kept, `default_cache_dir()` when None. Raises DataError when the name is unknown or the data cannot be used.
    """
    limits = settings or EnvSettings()
    raw = _read(spec, cache_dir or default_cache_dir())
    return curate(raw, answer_mode=answer_mode, sandbox=limits.sandbox, display=limits.display, progress=progress)


def default_cache_dir() -> Path:
    """Return the directory in the environment variable SQLENV_CACHE_DIR, else the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("sqlenv"))


def _read(spec: str, cache_dir: Path) -> RawDataset:
    name, _, argument = (part.strip() for part in spec.partition(":"))
    match name:
        case "synthetic":
            return _generate(build_synthetic, name, _seed(spec, argument), cache_dir)
        case "scrambled":
            return _generate(build_scrambled, name, _seed(spec, argument), cache_dir)
        case "spider" if argument:
            return read_spider(Path(argument).expanduser())
    raise DataError(f"{spec!r} names no data set. Known: {SYNTAX}")


def _generate(build: Callable[[Path, int], RawDataset], name: str, seed: int, cache_dir: Path) -> RawDataset:
    directory = cache_dir / f"{name}-v{GENERATOR_VERSION}-seed{seed}"
    try:
        return build(directory, seed)
    except OSError as error:
        reason = f"{directory} cannot be written: {error.strerror}"
        raise DataError(f"{reason}. Set {CACHE_VARIABLE} to a directory of your own") from error


def _seed(spec: str, argument: str) -> int:
    if not argument:
        return 0
    if argument.isascii() and argument.isdigit():
        return int(argument)
    raise DataError(f"{spec!r}: the seed {argument!r} is not a whole number. Known: {SYNTAX}")
