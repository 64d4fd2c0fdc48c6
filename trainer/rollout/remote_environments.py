"""Environments on servers: `--env ws://host:8000,ws://other:8000`.

Guarantees:
- An episode survives its server. Environments are deterministic, so when one dies, refuses or does not answer, the
  episode is rebuilt on another by a reset and its actions so far, each observation compared with the recorded one,
  and goes on: no generated token is lost. Where they differ, the error is loud: the servers hold different data.
- A server is used only when it serves the data, the answer mode and the step budget that this run asks for. That is
  checked at the start, and again for each new session, by what its handshake says.
- Every call has a deadline, below the rollout's own; what fails is a typed error, and so a reason in the episode's row.
- A socket outlives its episode, and the loop that the episode was played on. Sessions go to the server with the least
  in flight.
- A failing server is logged once, in one line, and so is its return.

The sockets live on a thread of their own: the trainer computes for minutes between two batches, and pings must be
answered meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from env_server.cache import Cache, default_cache_dir
from env_server.client.connection import Connection, Server, Timeouts
from env_server.client.errors import (
    DeadlineError,
    FixTheCallError,
    RemoteActionError,
    RetryableError,
    ServerDrainingError,
    ServerRefusesError,
)
from env_server.client.loop_thread import LoopThread
from env_server.client.pool import SessionPool
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset, Question
from env_server.errors import NoEpisodeError
from env_server.settings import EnvSettings
from env_server.types import (
    AnswerMode,
    Ready,
    ReadyStatus,
    ResetRequest,
    ServedData,
    SQLAction,
    SQLObservation,
    SQLState,
)

_LOG = logging.getLogger(__name__)

SEARCH_SHARE = 0.75
"""Of the time that a call has left, how much a search for another server may take: its error says how each failed."""

Request = Callable[[Connection], Awaitable[SQLObservation]]


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Deadlines in seconds."""

    connect_s: float = 5.0
    """To open a connection, and to ask a server what it serves."""
    request_s: float = 30.0
    """To answer one request; far above the server's own deadline for a query."""
    call_s: float = 55.0
    """For a reset or a step with all that it takes: finding a server, rebuilding the episode. Below the rollout's."""


class DifferentDataError(ServerRefusesError):
    """A server does not serve what this run asks for."""


class DifferentObservationError(FixTheCallError):
    """A rebuilt episode was not the one that was played: the servers do not hold the same data."""


class RemoteEnvironments:
    """Environments on the servers that `urls` names. Sessions may be used from any thread and any event loop.

    `dataset`, `settings` and `answer_mode` say what every server must serve. Raises ClientError when one serves
    something else, or none can be reached.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        dataset: Dataset,
        settings: EnvSettings | None = None,
        answer_mode: AnswerMode = AnswerMode.VALUE,
        token: str | None = None,
        deadlines: RemoteSettings | None = None,
    ) -> None:
        self._wanted = served_data(dataset, answer_mode, settings or EnvSettings(), Cache(default_cache_dir()))
        self._deadlines = deadlines or RemoteSettings()
        timeouts = Timeouts(self._deadlines.connect_s, self._deadlines.request_s)
        self._pool = SessionPool(urls, token, timeouts, check=self._check_session, notice=_LOG.warning)
        self._thread = LoopThread("sqlenv-remote")
        try:
            self._thread.call(self._pool.probe(self._check))
        except BaseException:
            self._thread.close()
            raise

    @asynccontextmanager
    async def session(self) -> AsyncIterator[RemoteSession]:
        """Open a session; it takes its slot on a server at the first reset."""
        episode = _Episode(self._pool, self._deadlines.call_s)
        try:
            yield RemoteSession(episode, self._thread)
        finally:
            await self._thread.wait_for(episode.release())

    def prepare(self, questions: Iterable[Question]) -> None:
        """Do nothing: a server has made what judging takes before it is ready."""

    @contextmanager
    def blocking(self) -> Iterator[BlockingSession]:
        """Open a session for code without async."""
        episode = _Episode(self._pool, self._deadlines.call_s)
        try:
            yield BlockingSession(episode, self._thread)
        finally:
            self._thread.call(episode.release())

    def close(self) -> None:
        """Close the sockets; closing twice is allowed."""
        if not self._thread.closed:
            self._thread.call(self._pool.aclose())
            self._thread.close()

    async def _ready(self, server: Server) -> Ready:
        from env_server.client.ready import fetch_ready  # httpx takes a fifth of a second to import

        return await fetch_ready(server, self._pool.token, self._deadlines.connect_s, self._pool.tls)

    async def _check(self, server: Server) -> None:
        ready = await self._ready(server)
        if ready.status is ReadyStatus.DRAINING:
            raise ServerDrainingError(server.name, "it is about to stop, and takes no sessions")
        if difference := _difference(ready.data, self._wanted):
            raise DifferentDataError(server.name, difference)

    async def _check_session(self, connection: Connection) -> None:
        if connection.serves not in (None, self._wanted.version_tag):
            # Behind a load balancer, another server may answer.
            difference = _difference((await self._ready(connection.server)).data, self._wanted)
            raise DifferentDataError(
                connection.server.name,
                difference
                or "the server that answered now serves something else than the one that answered at the "
                "start; start all servers behind this address with the same --data, --answer_mode and --step_budget",
            )


class RemoteSession:
    """One episode at a time, for the rollout client."""

    def __init__(self, episode: _Episode, thread: LoopThread) -> None:
        self._episode = episode
        self._thread = thread

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        """Start an episode. Raises ClientError."""
        return await self._thread.wait_for(self._episode.reset(question_id, episode_id))

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return await self._thread.wait_for(self._episode.step(action))


class BlockingSession:
    """One episode at a time, for scripted players; ids of episodes are as `SQLEnvironment` makes them."""

    def __init__(self, episode: _Episode, thread: LoopThread) -> None:
        self._episode = episode
        self._thread = thread

    def reset(self, *, question_id: str) -> SQLObservation:
        """Start an episode. Raises ClientError."""
        return self._thread.call(self._episode.reset(question_id, f"{question_id}#0"))

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return self._thread.call(self._episode.step(action))

    @property
    def state(self) -> SQLState:
        """The episode's id and step count. Raises NoEpisodeError."""
        return self._episode.state


class _Episode:
    """The record of an episode, and the session that it is played on. Lives on the pool's loop."""

    def __init__(self, pool: SessionPool, call_s: float) -> None:
        self._pool = pool
        self._call_s = call_s
        self._connection: Connection | None = None
        self._start = ResetRequest()
        self._actions: list[SQLAction] = []
        self._seen: list[SQLObservation] = []
        # A cancelled call may still be unwinding when the next one, or the release, is begun.
        self._one_call = asyncio.Lock()

    @property
    def state(self) -> SQLState:
        if not self._seen:
            raise NoEpisodeError("no episode: call reset first")
        return SQLState(episode_id=self._start.episode_id or "", step_count=self._seen[-1].step_count)

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        self._start = ResetRequest(question_id=question_id, episode_id=episode_id)
        self._actions, self._seen = [], []
        return await self._call(lambda connection: connection.reset(self._start), "reset")

    async def step(self, action: SQLAction) -> SQLObservation:
        if not self._seen:
            raise NoEpisodeError("no episode: call reset first")
        observation = await self._call(lambda connection: connection.step(action), "step")
        self._actions.append(action)
        return observation

    async def release(self) -> None:
        """Release the session."""
        async with self._one_call:
            connection, self._connection = self._connection, None
            if connection is not None:
                self._pool.release(connection)

    async def _call(self, request: Request, kind: str) -> SQLObservation:
        deadline = asyncio.get_running_loop().time() + self._call_s
        timeout = asyncio.timeout_at(deadline)
        try:
            async with self._one_call, timeout:
                observation = await self._survive(request, deadline)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            where = ", ".join(server.name for server in self._pool.servers)
            raise DeadlineError(where, f"no answer to a {kind} in {self._call_s:g} s, on any server") from error
        self._seen.append(observation)
        return observation

    async def _survive(self, request: Request, deadline: float) -> SQLObservation:
        """Make the request where the episode is, or, when that fails, where it can be rebuilt."""
        if self._connection is not None:
            try:
                return await self._pool.resume(self._connection, request)
            except RemoteActionError:
                raise
            except BaseException as error:
                self._connection = None
                if not isinstance(error, RetryableError):
                    raise
        timeout_s = SEARCH_SHARE * (deadline - asyncio.get_running_loop().time())
        self._connection, observation = await self._pool.open(partial(self._rebuild, request), timeout_s)
        return observation

    async def _rebuild(self, request: Request, connection: Connection) -> SQLObservation:
        """Play again what was played, if anything was, then make the request."""
        if self._seen:
            self._compare(connection.server, 0, await connection.reset(self._start))
            for number, action in enumerate(self._actions, start=1):
                self._compare(connection.server, number, await connection.step(action))
        return await request(connection)

    def _compare(self, server: Server, number: int, observation: SQLObservation) -> None:
        if observation != self._seen[number]:
            raise DifferentObservationError(
                server.name,
                f"episode {self._start.episode_id} was moved here, and step {number} shows something else than where "
                "it began; the servers do not hold the same data",
            )


def _difference(served: ServedData, wanted: ServedData) -> str:
    """What a server has to change, in one sentence; "" when it serves what is wanted."""
    for name in ("answer_mode", "step_budget"):  # first: the mode decides which questions there are
        theirs, ours = (str(getattr(data, name)).lower() for data in (served, wanted))
        if theirs != ours:
            fix = f"start it with --{name} {ours}, or give this run --{name} {theirs}"
            return f"it plays with --{name} {theirs}, and this run with {ours}; {fix}"
    if served.fingerprint != wanted.fingerprint:
        ours, theirs = (f"{data.name} with {data.questions} questions" for data in (wanted, served))
        what = f"it serves the data set {theirs}, and this run plays {ours}"
        if ours == theirs:
            what = f"its data set {theirs} differs from this run's in questions or databases"
        return f"{what}; give both the same --data, and the same files"
    return ""
