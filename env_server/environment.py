"""SQLEnvironment: episodes in this process. The rules are in `env_server.episode`.

A step is planned, its query or verdict is run here, in the caller's thread, and its outcome applied. The environments
of an `EnvironmentFactory` share one data set and one pool of databases, and cost a few hundred bytes each. A single
environment is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from env_server.actions import Job, Outcome, query_outcome
from env_server.cache import default_cache_dir
from env_server.dataset import Dataset, Question
from env_server.episode import EpisodeEngine, Scores
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool, Databases, QueryJob, run_query
from env_server.sql.sandbox import limit_memory
from env_server.test_suites.judge import SQLJudge
from env_server.test_suites.store import Progress, Suites, build_suites
from env_server.types import AnswerMode, SQLAction, SQLObservation


class SQLEnvironment(EpisodeEngine):
    """Plays episodes over a data set and runs what their steps need.

    `databases` must hold the data set's. Where ANSWER carries a query, `sql_judge` judges it; when None, on the
    database alone. `EnvironmentFactory` puts it together.
    """

    def __init__(
        self,
        dataset: Dataset,
        databases: Databases,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        sql_judge: SQLJudge | None = None,
        scores: Scores | None = None,
    ) -> None:
        super().__init__(dataset, databases.schema, settings, answer_mode, scores)
        self._databases = databases
        self._sql_judge = sql_judge or SQLJudge(databases, settings=self._settings.judging)

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises NoEpisodeError before `reset`, EpisodeOverError after the end.

        What `databases` raises, but for SQLError, goes through; the step is then not taken.
        """
        step = self.plan(action)
        return self.apply(step, None if step.job is None else self._run(step.job))

    def _run(self, job: Job) -> Outcome:
        if not isinstance(job, QueryJob):
            return self._sql_judge.judge(job.question, job.answer)
        return query_outcome(run_query(self._databases, job), self._settings.display)


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
        """Make the variants that questions, all by default, lack in the cache. Raises DataError.

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
