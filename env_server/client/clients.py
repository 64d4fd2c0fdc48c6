"""The client of an environment server: play episodes from another process, or another machine.

    async with SQLEnvClient("ws://localhost:8000") as environment:
        observation = await environment.reset(split="train", seed=1)
        observation = await environment.step(SQLAction(action_type="SAMPLE", argument="singers"))

`SyncSQLEnvClient` is the same without async: for notebooks, scripts, the terminal. It takes one URL or several; a host
name with several addresses stands for as many servers. A client holds one session, on one of them.

Guarantees: every wait has a deadline, and every failure is a `ClientError` that says whether to try again
(`env_server.client.errors`). `reset` begins an episode on the session there is; where that is gone or was never opened,
on a new one, on another server if need be. `step` and `state` belong to an episode and are never sent twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pydantic import ValidationError

from env_server.client.connection import Connection, Timeouts
from env_server.client.errors import FixTheCallError, ProtocolError, RemoteActionError, RetryableError
from env_server.client.loop_thread import LoopThread
from env_server.client.pool import SessionPool
from env_server.dataset import Split
from env_server.errors import NoEpisodeError
from env_server.types import ResetRequest, SQLAction, SQLObservation, SQLState

P = ParamSpec("P")
T = TypeVar("T")


class SQLEnvClient:
    """A session on a SQLEnv server. An async context manager; one call at a time, one event loop.

    `timeout_s` is how long `connect` and `reset` go on looking for a server with a session free; without it each is
    tried once.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._pool = SessionPool(servers, token, timeouts)
        self._timeout_s = timeout_s
        self._connection: Connection | None = None

    @property
    def server(self) -> str | None:
        """The server that the session is on, None without a session."""
        return self._connection.server.name if self._connection else None

    async def connect(self) -> None:
        """Open a session where there is none. Raises ClientError.

        Whether the server has one free it says only at the first request; `reset` then looks further.
        """

        async def nothing(_: Connection) -> None:
            """Open it and no more."""

        if self._connection is None:
            self._connection, _ = await self._pool.open(nothing, self._timeout_s)

    async def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question_id: str | None = None,
        split: Split | str = Split.ALL,
    ) -> SQLObservation:
        """Start an episode, as `SQLEnvironment.reset` does. Raises ClientError."""
        try:
            request = ResetRequest(seed=seed, episode_id=episode_id, question_id=question_id, split=Split(split))
        except ValueError as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise FixTheCallError(self.server or "(any)", f"it takes no such reset: {why}") from error

        async def reset(connection: Connection) -> SQLObservation:
            return await connection.reset(request)

        if self._connection is not None:
            try:
                return await self._ask(reset)
            except RetryableError:
                pass  # the session is gone, and a reset needs nothing of it
        self._connection, observation = await self._pool.open(reset, self._timeout_s)
        return observation

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return await self._ask(lambda connection: connection.step(action))

    async def state(self) -> SQLState:
        """Return the episode's id and step count. Raises as `step` does."""
        state = await self._ask(lambda connection: connection.request("state"))
        if state.get("episode_id") is None:
            raise NoEpisodeError("no episode: call reset first")
        try:
            return SQLState.model_validate(state)
        except ValidationError as error:
            raise ProtocolError(self.server or "", f"its state is not SQLEnv's: {state}") from error

    async def close(self) -> None:
        """End the session; closing twice is allowed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
        await self._pool.aclose()

    async def _ask(self, request: Callable[[Connection], Awaitable[T]]) -> T:
        connection = self._connection
        if connection is None:
            raise NoEpisodeError("no session, so no episode: call reset first")
        if connection.busy:
            raise RuntimeError("a session answers one request at a time; wait for the one before")
        try:
            return await self._pool.resume(connection, request)
        except RemoteActionError:
            raise
        except BaseException:
            self._connection = None
            raise

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _blocking(
    method: Callable[Concatenate[SQLEnvClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncSQLEnvClient, P], T]:
    """Return the method of SyncSQLEnvClient for one of SQLEnvClient."""

    @wraps(method)
    def call(self: SyncSQLEnvClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.call(method(self._client, *args, **kwargs))

    return call


class SyncSQLEnvClient:
    """`SQLEnvClient`, blocking: the same calls, arguments and errors. A context manager.

    The session lives on a thread of its own, so the calls work where a loop is already running, as in Jupyter, and
    keepalive pings are answered between two cells.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._client = SQLEnvClient(servers, token, timeouts, timeout_s)
        self._thread = LoopThread("sqlenv-client")

    @property
    def server(self) -> str | None:
        """The server that the session is on, None without a session."""
        return self._client.server

    connect = _blocking(SQLEnvClient.connect)
    reset = _blocking(SQLEnvClient.reset)
    step = _blocking(SQLEnvClient.step)
    state = _blocking(SQLEnvClient.state)

    def close(self) -> None:
        """End the session and its thread; closing twice is allowed, going on afterwards is not."""
        if not self._thread.closed:
            self._thread.call(self._client.close())
            self._thread.close()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
