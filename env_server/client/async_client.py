"""The client of an environment server: play episodes from another process, or another machine.

    async with SQLEnvClient("ws://localhost:8000") as environment:
        observation = await environment.reset(split="train", seed=1)
        observation = await environment.step(SQLAction(action_type="SAMPLE", argument="singers"))

`SQLEnvClient` speaks in SQLEnv's types. `EnvClient` speaks in plain dictionaries, with any OpenEnv server. Both take
one URL or several (ws, wss, http or https, with or without the /ws at the end); a host name with several addresses
stands for as many servers. Each client holds one session, on the server with the least in flight; clients that are
given the same `SessionPool` share the count, and the sockets.

Promises: every wait has a deadline, and every failure is a `ClientError` that says whether to try again
(`env_server.client.errors`). `reset` begins a new episode on the session there is; where that is gone or was never
had, on a new one, on another server if need be. `step` and `state` belong to an episode and are never sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from env_server.client.connection import Connection, Timeouts
from env_server.client.errors import ProtocolError, RemoteActionError, RetryableError
from env_server.client.session_pool import SessionPool
from env_server.dataset import Split
from env_server.errors import NoEpisodeError
from env_server.types import SQLAction, SQLObservation, SQLState


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answers to `reset` and `step`. `reward` is None where the server gives none."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    metadata: dict[str, Any] = field(default_factory=dict)


class EnvClient:
    """A session on some OpenEnv server. An async context manager; one call at a time, one event loop.

    `patience_s` is how long `connect` and `reset` go on looking for a server that takes the session; without it each
    is tried once. `servers` may be a pool that other clients use too; its token and deadlines are then the pool's.
    """

    def __init__(
        self,
        servers: str | Iterable[str] | SessionPool,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._owns_pool = not isinstance(servers, SessionPool)
        self._pool = servers if isinstance(servers, SessionPool) else SessionPool(servers, token, timeouts)
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

    async def reset(self, **arguments: Any) -> Reply:
        """Start an episode; `arguments` are the server's own, such as `seed` and `episode_id`. Raises ClientError."""

        if self._connection is not None:
            try:
                return await self._ask("reset", arguments)
            except RetryableError:
                pass  # the session is gone, and a reset needs nothing of it
        self._connection, reply = await self._pool.begin(partial(begin_episode, arguments=arguments), self._patience_s)
        return reply

    async def step(self, action: Mapping[str, Any]) -> Reply:
        """Take an action: its fields as the server names them. Raises ClientError, and NoEpisodeError."""
        return await self._ask("step", action)

    async def state(self) -> dict[str, Any]:
        """Return the state that the server shows: `episode_id` and `step_count`. Raises as `step` does."""
        return await self._request("state")

    async def close(self) -> None:
        """End the session; with a pool of its own, close its sockets. Closing twice is allowed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.release(connection)
        if self._owns_pool:
            await self._pool.aclose()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Reply:
        return reply_of(await self._request(kind, data), self.server or "")

    async def _request(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = self._connection
        if connection is None:
            raise NoEpisodeError("no session, so no episode: call reset first")
        if connection.busy:
            raise RuntimeError("a session answers one request at a time; wait for the one before")
        try:
            return await connection.request(kind, data)
        except RemoteActionError:
            raise
        except BaseException as error:
            self._connection = None
            if isinstance(error, RetryableError):
                self._pool.lost(connection, error)
            else:
                self._pool.release(connection)
            raise

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class SQLEnvClient:
    """A session on a SQLEnv server, in SQLEnv's types; arguments and behaviour are those of `EnvClient`."""

    def __init__(
        self,
        servers: str | Iterable[str] | SessionPool,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._client = EnvClient(servers, token, timeouts, patience_s)

    @property
    def server(self) -> str | None:
        """The server that the session is on, None without a session."""
        return self._client.server

    async def connect(self) -> Self:
        """Open a session where there is none. Raises ClientError."""
        await self._client.connect()
        return self

    async def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question_id: str | None = None,
        split: Split = Split.ALL,
    ) -> SQLObservation:
        """Start an episode, as `SQLEnvironment.reset` does. Raises ClientError."""
        reply = await self._client.reset(**reset_arguments(seed, episode_id, question_id, split))
        return observation_of(reply, self.server or "")

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return observation_of(await self._client.step(action_fields(action)), self.server or "")

    async def state(self) -> SQLState:
        """Return the episode's id and step count. Raises as `step` does."""
        state = await self._client.state()
        try:
            return SQLState.model_validate(state)
        except ValidationError as error:
            raise ProtocolError(self.server or "", f"its state is not SQLEnv's: {state}") from error

    async def close(self) -> None:
        """End the session; closing twice is allowed."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def begin_episode(connection: Connection, arguments: Mapping[str, Any]) -> Reply:
    """Send a reset on the connection. Raises ClientError."""
    return reply_of(await connection.request("reset", arguments), connection.server.name)


async def reset_on(connection: Connection, arguments: Mapping[str, Any]) -> SQLObservation:
    """Send a reset to a SQLEnv server. Raises ClientError."""
    return observation_of(await begin_episode(connection, arguments), connection.server.name)


async def step_on(connection: Connection, action: SQLAction) -> SQLObservation:
    """Send a step to a SQLEnv server. Raises ClientError."""
    server = connection.server.name
    return observation_of(reply_of(await connection.request("step", action_fields(action)), server), server)


def reset_arguments(
    seed: int | None = None, episode_id: str | None = None, question_id: str | None = None, split: Split = Split.ALL
) -> dict[str, Any]:
    """Return what a reset carries: only what is not left to the server."""
    given = {"seed": seed, "episode_id": episode_id, "question_id": question_id}
    return {name: value for name, value in given.items() if value is not None} | (
        {} if split is Split.ALL else {"split": split.value}
    )


def action_fields(action: SQLAction) -> dict[str, Any]:
    """Return what a step carries."""
    return action.model_dump(exclude_defaults=True)


def reply_of(data: Mapping[str, Any], server: str) -> Reply:
    """Read the `data` of an observation frame. Raises ProtocolError."""
    observation, reward = data.get("observation"), data.get("reward")
    done, metadata = data.get("done", False), data.get("metadata") or {}
    if (
        not isinstance(observation, dict)
        or not (reward is None or isinstance(reward, int | float))
        or not isinstance(done, bool)
        or not isinstance(metadata, dict)
    ):
        raise ProtocolError(server, f"its observation is not OpenEnv's; it has the keys {sorted(data)}")
    return Reply(observation, None if reward is None else float(reward), done, metadata)


def observation_of(reply: Reply, server: str) -> SQLObservation:
    """Read SQLEnv's observation. Raises ProtocolError when the server plays another environment."""
    fields = {"metadata": reply.metadata, **reply.observation, "reward": reply.reward or 0.0, "done": reply.done}
    try:
        return SQLObservation.model_validate(fields)
    except ValidationError as error:
        raise ProtocolError(
            server, f"it plays another environment than SQLEnv, or another version of it: {error.errors()[0]['msg']}"
        ) from error


async def _nothing(connection: Connection) -> None:
    """No work: a session that is only opened."""
