"""How an environment is made: of data that is here, or on a server. What either takes is imported only for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from env_server.environment import EnvironmentFactory
    from env_server.settings import EnvSettings
    from env_server.types import AnswerMode
    from sqlenv.environment import Environment

URL_SCHEMES = ("ws://", "wss://", "http://", "https://")
TOKEN_VARIABLE = "SQLENV_TOKEN"


def make(
    data: str | os.PathLike[str] = "synthetic",
    *,
    answer_mode: AnswerMode | str | None = None,
    settings: EnvSettings | None = None,
    token: str | None = None,
) -> Environment:
    """Return an environment over `data`, whose episodes are played in this process; of a URL, see `connect`.

    `data` is a data set by its name, as `--data` takes it ("synthetic", "spider:PATH", a folder of your own), or a
    file (.csv, .tsv, .parquet, .sqlite, .db). A file, or a folder without questions, is looked around in, and can be
    asked about: `env.reset(question="...")`.

    `answer_mode` is what ANSWER carries, a "value" (the default) or "sql"; `settings` are the step budget, the rewards
    and the bounds. A server has its own of both. `token` is a server's, else SQLENV_TOKEN. Raises SQLEnvError.
    """
    from env_server.errors import SQLEnvError

    if not isinstance(data, str | os.PathLike):
        raise TypeError(
            f"make takes the name of a data set, a path or a URL, not {data!r}, of type {type(data).__name__}"
        )
    spec = os.fspath(data)
    if spec.startswith(URL_SCHEMES):
        if answer_mode is not None or settings is not None:
            raise SQLEnvError("the server decides answer_mode and settings: leave them out")
        return connect(spec, token=token)
    if token is not None:
        raise SQLEnvError(f"token is for servers, and {spec!r} is data: leave it out, or give ws://HOST:8000")
    return _here(spec, answer_mode, settings)


def connect(servers: str | Iterable[str], *, token: str | None = None) -> Environment:
    """Return an environment whose episodes are played on a server, one of `servers`: ws://HOST:8000.

    `token` is what `sqlenv serve` was started with, if with one; else the variable SQLENV_TOKEN. Raises ClientError.
    """
    from env_server.client import SyncSQLEnvClient
    from sqlenv.environment import Environment

    if not isinstance(servers, Iterable):
        raise TypeError(
            f"connect takes a URL such as ws://HOST:8000, not {servers!r}, of type {type(servers).__name__}"
        )
    client = SyncSQLEnvClient(servers, token or os.environ.get(TOKEN_VARIABLE))
    try:
        client.connect()
    except BaseException:
        client.close()
        raise
    return Environment(client.server or "", client, client.close)


def _here(spec: str, answer_mode: AnswerMode | str | None, settings: EnvSettings | None) -> Environment:
    from env_server.cache import default_cache_dir
    from env_server.data.loading import has_no_questions, is_named, load_dataset, read_databases
    from env_server.dataset import Dataset
    from env_server.environment import EnvironmentFactory
    from env_server.settings import EnvSettings
    from env_server.types import AnswerMode
    from sqlenv.environment import Environment, word_of

    if settings is not None and not isinstance(settings, EnvSettings):
        raise TypeError(f"make takes settings=sqlenv.EnvSettings(...), not {settings!r}")
    mode = AnswerMode.VALUE if answer_mode is None else word_of(AnswerMode, "answer_mode", answer_mode)
    limits = settings or EnvSettings()
    path = Path(spec).expanduser()
    if not is_named(spec) and has_no_questions(path):
        dataset = Dataset(path.name, (), read_databases(path, default_cache_dir()))
    else:
        dataset = load_dataset(spec, answer_mode=mode, settings=limits)
    factory = EnvironmentFactory(dataset, limits, mode)
    if factory.suites is not None:
        _build_suites(factory)
    return Environment(dataset.name, factory.make(), factory.close, factory)


def _build_suites(factory: EnvironmentFactory) -> None:
    from env_server.test_suites.store import TITLE
    from sqlenv.progress import reported

    with reported(TITLE) as progress:
        factory.build_suites(progress=progress.update)
