"""SQLEnvironment: episodes for whoever plays in this process. The rules are in `episodes`.

A step is planned, its query or verdict is run here, in the caller's thread, and its outcome applied. Many environments
share one data set and one pool of databases; a single environment is used by one thread at a time.
"""

from __future__ import annotations

from env_server.dataset import Dataset
from env_server.episodes import Episodes
from env_server.jobs import Job, QueryJob
from env_server.outcomes import Outcome, query_outcome
from env_server.scores import Scores
from env_server.settings import EnvSettings
from env_server.sql.pool import Databases, run_query
from env_server.test_suites.judge import QueryJudge, SQLJudge
from env_server.types import AnswerMode, SQLAction, SQLObservation


class SQLEnvironment(Episodes):
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
        sql_judge: QueryJudge | None = None,
        scores: Scores | None = None,
    ) -> None:
        super().__init__(dataset, databases.schema, settings, answer_mode, scores)
        self._databases = databases
        self._sql_judge: QueryJudge = sql_judge or SQLJudge(databases, settings=self._settings.judging)

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
