"""What all environments of one data set share, and how one is made.

Databases, variants and settings are shared; an `SQLEnvironment` of its own costs a few hundred bytes. Safe to use
from many threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from env_server.cache import default_cache_dir
from env_server.dataset import Dataset, Question
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import limit_memory
from env_server.test_suites.building import Progress, build_suites
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Suites
from env_server.types import AnswerMode


class EnvironmentFactory:
    """Makes environments over one data set. A context manager; `close` closes the databases.

    SQLite's memory is bounded in the whole process, as `settings.sandbox` says.

    `cache_dir` is where variants are kept, `default_cache_dir()` when None. In `value` mode none are used.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        cache_dir: Path | None = None,
    ) -> None:
        self.dataset = dataset
        self.settings = settings or EnvSettings()
        self.answer_mode = answer_mode
        limit_memory(self.settings.sandbox)
        self.pool = DatabasePool(dataset.databases, self.settings.sandbox)
        self.suites: Suites | None = None
        self._cache_dir = cache_dir or default_cache_dir()
        if answer_mode is AnswerMode.SQL and self.settings.judging.variants:
            self.suites = Suites(dataset.databases, self.settings.sandbox, self._cache_dir)
        self._judge = SQLJudge(self.pool, self.suites, self.settings.judging, self.settings.sandbox)

    def make(self, dataset: Dataset | None = None) -> SQLEnvironment:
        """Return a new environment; it is used by one thread at a time.

        It asks the questions of `dataset`, about databases of this one, where given.
        """
        return SQLEnvironment(
            self.dataset if dataset is None else dataset, self.pool, self.settings, self.answer_mode, self._judge
        )

    def build_suites(self, questions: Iterable[Question] | None = None, progress: Progress | None = None) -> None:
        """Make the variants that questions, all by default, lack in the cache; see `building`. Raises DataError.

        Others are made when an answer is first judged.
        """
        if self.suites is not None:
            asked = self.dataset.questions if questions is None else questions
            build_suites(self.dataset.databases, asked, self.settings.sandbox, self._cache_dir, progress=progress)

    def close(self) -> None:
        """Close the databases; environments made before then raise DataError."""
        self.pool.close()

    def __enter__(self) -> EnvironmentFactory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
