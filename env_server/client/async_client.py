"""The client of an environment server: play episodes from another process, or another machine.

    async with SQLEnvClient("ws://localhost:8000") as environment:
        observation = await environment.reset(split="train", seed=1)
        observation = await environment.step(SQLAction(action_type="SAMPLE", argument="singers"))

It takes one URL or several (ws, wss, http or https, with or without the /ws at the end); a host name with several
addresses stands for as many servers. A client holds one session, on one of them.

Promises: every wait has a deadline, and every failure is a `ClientError` that says whether to try again
(`env_server.client.errors`). `reset` begins a new episode on the session there is; where that is gone or was never
had, on a new one, on another server if need be. `step` and `state` belong to an episode and are never sent twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from env_server.client.connection import Connection, Timeouts
from env_server.client.errors import ProtocolError, RemoteActionError, RetryableError
from env_server.client.session_pool import SessionPool
from env_server.dataset import Split
from env_server.errors import NoEpisodeError
from env_server.types import SQLAction, SQLObservation, SQLState

T = TypeVar("T")


class SQLEnvClient:
    """A session on a SQLEnv server. An async context manager; one call at a time, one event loop.

    `patience_s` is how long `connect` and `reset` go on looking for a server that takes the session; without it each
    is tried once.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._pool = SessionPool(servers, token, timeouts)
        self._patience_s = patience_s
        self._connection: Connection | None = None

    @property
    def server(self) -> str | None:
        """The server that the session is on, None without a session."""
        return self._connection.server.name if self._connection else None

    async def connect(self) -> Self:
        """Open a session where there is none. Raises ClientError.

        Whether the server has one to give it tells only at the first request; `reset` then looks further.
        """
        if self._connection is None:
            self._connection, _ = await self._pool.begin(_nothing, self._patience_s)
        return self

    async def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question_id: str | None = None,
        split: Split = Split.ALL,
    ) -> SQLObservation:
        """Start an episode, as `SQLEnvironment.reset` does. Raises ClientError."""
        request = partial(reset_on, arguments=reset_arguments(seed, episode_id, question_id, split))
        if self._connection is not None:
            try:
                return await self._ask(request)
            except RetryableError:
                pass  # the session is gone, and a reset needs nothing of it
        self._connection, observation = await self._pool.begin(request, self._patience_s)
        return observation

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return await self._ask(partial(step_on, action=action))

    async def state(self) -> SQLState:
        """Return the episode's id and step count. Raises as `step` does."""
        state = await self._ask(_state_on)
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
            return await self._pool.go_on(connection, request)
        except RemoteActionError:
            raise
        except BaseException:
            self._connection = None
            raise

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def reset_on(connection: Connection, arguments: Mapping[str, Any]) -> SQLObservation:
    """Send a reset to a SQLEnv server. Raises ClientError."""
    return _observation_of(await connection.request("reset", arguments), connection.server.name)


async def step_on(connection: Connection, action: SQLAction) -> SQLObservation:
    """Send a step to a SQLEnv server. Raises ClientError."""
    data = await connection.request("step", action.model_dump(exclude_defaults=True))
    return _observation_of(data, connection.server.name)


def reset_arguments(
    seed: int | None = None, episode_id: str | None = None, question_id: str | None = None, split: Split = Split.ALL
) -> dict[str, Any]:
    """Return what a reset carries: only what is not left to the server."""
    given = {"seed": seed, "episode_id": episode_id, "question_id": question_id}
    return {name: value for name, value in given.items() if value is not None} | (
        {} if split is Split.ALL else {"split": split.value}
    )


async def _state_on(connection: Connection) -> dict[str, Any]:
    return await connection.request("state")


def _observation_of(data: Mapping[str, Any], server: str) -> SQLObservation:
    """Read the `data` of an observation frame. Raises ProtocolError."""
    beside = {"reward": data.get("reward") or 0.0, "done": data.get("done", False)}
    try:
        return SQLObservation.model_validate({"metadata": data.get("metadata") or {}, **data["observation"], **beside})
    except (KeyError, TypeError, ValidationError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"its reply holds {sorted(data)}"
        raise ProtocolError(
            server, f"it plays another environment than SQLEnv, or another version of it: {said}"
        ) from error


async def _nothing(connection: Connection) -> None:
    """No work: a session that is only opened."""
