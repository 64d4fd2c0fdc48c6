"""Where episodes are played: the protocol of an environment session, the in-process environments, and the choice.

`LocalEnvironments` runs `SQLEnvironment` on a small thread pool: SQLite releases the interpreter lock while a
query runs, so one episode's slow SQL does not hold up another's turn.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Protocol

from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings
from env_server.test_suites.store import TITLE
from env_server.types import AnswerMode, SQLAction, SQLObservation
from sqlenv.progress import reported
from trainer.rollout.remote_environments import RemoteEnvironments

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from env_server.dataset import Dataset, Question


LOCAL = "local"
"""The value of `--env` for environments in this process."""


class EnvironmentSession(Protocol):
    """One environment that plays one episode at a time."""

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        """Start an episode. Raises SQLEnvError."""

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises SQLEnvError."""


class Environments(Protocol):
    """A source of environment sessions."""

    def session(self) -> AbstractAsyncContextManager[EnvironmentSession]:
        """Open a session; leaving the context releases it."""

    def close(self) -> None:
        """Release everything."""


class LocalEnvironments:
    """Environments in this process. `threads` bounds the queries that run at once."""

    def __init__(
        self,
        dataset: Dataset,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        threads: int = 4,
    ) -> None:
        self._factory = EnvironmentFactory(dataset, settings, answer_mode)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="sqlenv")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session over the shared databases."""
        yield _LocalSession(self._factory.make(), self._executor)

    @contextmanager
    def blocking(self) -> Iterator[SQLEnvironment]:
        """Yield an environment for code without async."""
        yield self._factory.make()

    def prepare(self, questions: Iterable[Question]) -> None:
        """Make what judging answers to the questions takes, and show how far that is. Raises DataError."""
        with reported(TITLE) as progress:
            self._factory.build_suites(questions, progress.update)

    def asking(self, dataset: Dataset) -> Environments:
        """Return environments that ask the questions of another data set about these databases, until `close`."""
        return _OtherQuestions(dataset, self._factory, self._executor)

    def close(self) -> None:
        """Wait for running queries and close the databases."""
        self._executor.shutdown(wait=True)
        self._factory.close()


class _OtherQuestions:
    """Environments over another one's databases; their owner closes them."""

    def __init__(self, dataset: Dataset, factory: EnvironmentFactory, executor: ThreadPoolExecutor) -> None:
        self._dataset = dataset
        self._factory = factory
        self._executor = executor

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        yield _LocalSession(self._factory.make(self._dataset), self._executor)

    def close(self) -> None:
        pass


class _LocalSession:
    """Moves the calls of one environment to the thread pool."""

    def __init__(self, environment: SQLEnvironment, executor: ThreadPoolExecutor) -> None:
        self._environment = environment
        self._executor = executor

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        def call() -> SQLObservation:
            return self._environment.reset(question_id=question_id, episode_id=episode_id)

        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def step(self, action: SQLAction) -> SQLObservation:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._environment.step, action)


AnyEnvironments = LocalEnvironments | RemoteEnvironments


def open_environments(
    env: str,
    token: str | None,
    dataset: Dataset,
    settings: EnvSettings,
    answer_mode: AnswerMode,
) -> AnyEnvironments:
    """The environments that `--env` names: LOCAL, or the URLs of servers. Raises ClientError."""
    if env == LOCAL:
        return LocalEnvironments(dataset, settings, answer_mode)
    return RemoteEnvironments(env, dataset, settings, answer_mode, token)
