"""The client of an environment server for code without async: notebooks, scripts, the terminal.

    with SyncSQLEnvClient("ws://localhost:8000") as environment:
        observation = environment.reset(split="train", seed=1)
        observation = environment.step(SQLAction(action_type="SAMPLE", argument="singers"))

The same calls, arguments and errors as `async_client`. The session lives on a thread of its own, so the calls work
where a loop is already running, as in Jupyter, and keepalive pings are answered between two cells.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from env_server.client.async_client import SQLEnvClient
from env_server.client.connection import Timeouts
from env_server.client.loop_thread import LoopThread
from env_server.dataset import Split
from env_server.types import SQLAction, SQLObservation, SQLState


class SyncSQLEnvClient:
    """`SQLEnvClient`, blocking."""

    def __init__(
        self,
        servers: str | Iterable[str],
        token: str | None = None,
        timeouts: Timeouts | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._client = SQLEnvClient(servers, token, timeouts, patience_s)
        self._thread = LoopThread("sqlenv-client")

    @property
    def server(self) -> str | None:
        """The server that the session is on, None without a session."""
        return self._client.server

    def connect(self) -> Self:
        """Open a session where there is none. Raises ClientError."""
        self._thread.call(self._client.connect())
        return self

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        question_id: str | None = None,
        split: Split = Split.ALL,
    ) -> SQLObservation:
        """Start an episode. Raises ClientError."""
        return self._thread.call(self._client.reset(seed, episode_id, question_id, split))

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action. Raises ClientError, and NoEpisodeError."""
        return self._thread.call(self._client.step(action))

    def state(self) -> SQLState:
        """Return the episode's id and step count. Raises as `step` does."""
        return self._thread.call(self._client.state())

    def close(self) -> None:
        """End the session and its thread; closing twice is allowed, going on afterwards is not."""
        if not self._thread.closed:
            self._thread.call(self._client.close())
            self._thread.close()

    def __enter__(self) -> Self:
        try:
            return self.connect()
        except BaseException:
            self._thread.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
