"""A real server on loopback, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from env_server.dataset import Dataset
from env_server.service.app import Service, create_app
from env_server.service.settings import ServiceSettings
from env_server.settings import SandboxSettings
from env_server.sql.sandbox import limit_memory
from env_server.test_suites.store import build_suites
from env_server.types import AnswerMode


@pytest.fixture(scope="session", autouse=True)
def bounded_memory() -> None:
    """What every process that runs SQL does at its start."""
    limit_memory(SandboxSettings())


class RunningServer:
    """uvicorn on a free port; `service` may be touched through `call` alone, which runs on its event loop."""

    def __init__(self, settings: ServiceSettings, dataset: Dataset) -> None:
        app = create_app(settings, dataset)
        self.service: Service = app.state.service
        self.capacity, self.metrics = self.service.capacity, self.service.metrics
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.ws = f"ws://{self.address}/ws"
        self.http = f"http://{self.address}"
        options: dict[str, Any] = {"log_config": None, "ws": "websockets-sansio", "lifespan": "on"}
        config = uvicorn.Config(app, ws_max_size=settings.max_frame_bytes, ws_per_message_deflate=False, **options)
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        assert self._started.wait(30), "the server starts"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's event loop and return what it returns; awaits a coroutine."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    def stop(self) -> None:
        """Stop the server and wait for its thread."""
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._started.set()
        await serving


Serve = Callable[..., RunningServer]


def settings(folder: Path, **given: Any) -> ServiceSettings:
    return ServiceSettings(**{"messages_per_s": 0, "query_workers": (1, 1), "cache_dir": folder / "cache", **given})


@pytest.fixture
def serve(pets: Dataset, tmp_path: Path) -> Iterator[Serve]:
    """Start servers over the pets; keyword arguments are settings, `dataset` another data set."""
    with ExitStack() as stack:

        def start(dataset: Dataset = pets, **given: Any) -> RunningServer:
            chosen = settings(tmp_path, **given)
            if chosen.answer_mode is AnswerMode.SQL:
                sandbox = chosen.environment.sandbox
                build_suites(dataset.databases, dataset.questions, sandbox, chosen.cache_dir)
            server = RunningServer(chosen, dataset)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture(scope="session")
def server(pets: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server over the pets for the tests that need no settings of their own."""
    server = RunningServer(settings(tmp_path_factory.mktemp("server")), pets)
    yield server
    server.stop()
