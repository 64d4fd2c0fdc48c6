"""The same SQLEnvironment behind upstream's own `create_app`, in the virtual environment that `make openenv` makes.

    PYTHON -m benchmarks.env_server_upstream PORT DATA MAX_SESSIONS

Sessions share the data set and one pool of databases, as upstream's `SUPPORTS_CONCURRENT_SESSIONS` allows.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment

from env_server.data.loading import load_dataset
from env_server.dataset import Split
from env_server.environment import EnvironmentFactory
from env_server.types import SQLAction, SQLObservation, SQLState


def main(port: int, data: str, max_sessions: int) -> None:
    """Serve until stopped."""
    factory = EnvironmentFactory(load_dataset(data))

    class Upstream(Environment):  # type: ignore[misc]
        """An environment as upstream wants one."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._environment = factory.make()

        def reset(
            self,
            seed: int | None = None,
            episode_id: str | None = None,
            question_id: str | None = None,
            split: str = "all",
        ) -> SQLObservation:
            return self._environment.reset(seed, episode_id, question_id, Split(split))

        def step(self, action: SQLAction, timeout_s: float | None = None, **kwargs: Any) -> SQLObservation:
            return self._environment.step(action)

        @property
        def state(self) -> SQLState:
            return self._environment.state

    app = create_app(Upstream, SQLAction, SQLObservation, env_name="sqlenv", max_concurrent_envs=max_sessions)
    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
