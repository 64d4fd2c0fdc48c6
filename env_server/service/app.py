"""The FastAPI application of one worker, put together.

`create_app` makes everything that the worker's sessions share; it starts with the application and ends with it. A stop
signal drains: no new sessions, running episodes get `grace_s` to end, while /ready and /metrics still answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError

from env_server.cache import Cache
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset
from env_server.episode import EpisodeEngine, Scores
from env_server.service import http, pages
from env_server.service.access import Access
from env_server.service.capacity import Capacity
from env_server.service.execution.executor import Executor
from env_server.service.http import BodyLimit, StatelessEnv
from env_server.service.logs import log, log_loop_errors
from env_server.service.metrics import Metrics
from env_server.service.session import Session
from env_server.service.settings import ServiceSettings
from env_server.service.socket import Sockets, WebSocketRouter
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import limit_memory

if TYPE_CHECKING:
    from env_server.service.mcp_tools import MCPTools

DESCRIPTION = (
    "An agent answers a question about a database that it cannot see, by DESCRIBE, SAMPLE, QUERY and ANSWER, with "
    "dense rewards. Episodes are played over the WebSocket /ws, which speaks OpenEnv's format."
)
API_VERSION = "1.0.0"
"""Of the interface; OpenEnv's tools know its profile by the first number."""
GAUGES_S = 1.0


class Service:
    """What the sessions of one worker share."""

    def __init__(self, settings: ServiceSettings, dataset: Dataset) -> None:
        self._settings = settings
        self._dataset = dataset
        self.capacity = Capacity(settings.slots, settings.queue_slots)
        self.metrics = Metrics()
        self.metrics.sessions_max.set(self.capacity.limit)
        self._environment_settings = settings.environment
        cache = Cache(settings.cache_dir)
        self.databases = DatabasePool(dataset.databases, settings.environment.sandbox, max_idle=1, cache=cache)
        self._scores = Scores()
        self.executor = Executor(
            dataset.databases,
            self._environment_settings,
            settings.answer_mode,
            settings.cache_dir,
            settings.query_workers,
        )
        token = settings.token.get_secret_value() if settings.token is not None else None
        self.access = Access(token, settings.allowed_origins)
        served = served_data(dataset, settings.answer_mode, settings.environment, cache)
        self.data = served.model_dump(mode="json")
        self.sockets = Sockets(
            settings, self.access, self.capacity, self.metrics, self._new_session, served.version_tag
        )
        self.stateless = StatelessEnv(self.executor.run, self._new_engine)
        self.mcp = self._mcp_tools()
        """None where the package `mcp` is not installed."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Play, and drain on stop signals."""
        with self._draining_on_signals():
            async with self.playing():
                yield

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Start the query processes and what runs in the background; end them."""
        log_loop_errors(asyncio.get_running_loop())
        await asyncio.to_thread(self.databases.read_schemas)
        async with self.executor:
            background = [asyncio.ensure_future(self.sockets.close_idle()), asyncio.ensure_future(self._gauge())]
            try:
                yield
            finally:
                for task in background:
                    task.cancel()
                for task in background:
                    with suppress(asyncio.CancelledError):
                        await task
                self.databases.close()

    @contextmanager
    def _draining_on_signals(self) -> Iterator[None]:
        """Have the first stop signal drain, and then stop the ASGI server, by its own handler; the second, at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return
        loop = asyncio.get_running_loop()
        handlers = {int(number): signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        seen: set[int] = set()
        drains: list[asyncio.Task[None]] = []

        def stop(number: int) -> None:
            handler = handlers[number]
            if callable(handler):
                handler(number, None)

        async def drain(number: int) -> None:
            await self.drain()
            stop(number)

        def on_signal(number: int) -> None:
            # A terminal sends SIGINT to all processes, and the supervisor SIGTERM to its workers: together one stop.
            if number in seen:
                log(logging.WARNING, "ending_at_once")
                stop(number)
            elif not drains:
                drains.append(asyncio.ensure_future(drain(number)))
            seen.add(number)

        for number in handlers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for task in drains:
                task.cancel()
            for number, handler in handlers.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    async def drain(self) -> None:
        """Take no more sessions; return when the last one is gone, at the latest after `grace_s`."""
        log(logging.INFO, "draining", count=self.sockets.sessions, grace_s=self._settings.grace_s)
        self.capacity.close()
        await self.sockets.drain(self._settings.grace_s)

    async def authorize(self, request: Request) -> None:
        """Let a request in, or raise HTTPException; a FastAPI dependency."""
        self._admit(request)

    async def authorize_page(self, request: Request) -> None:
        """Let a request for what only the playground reads in, or raise HTTPException; a FastAPI dependency."""
        self._admit(request, page=True)

    def ready(self) -> dict[str, Any]:
        """Return the load, over all workers."""
        return {
            "status": "draining" if self.sockets.draining else "ready",
            "active_sessions": self.metrics.total("sessions"),
            "max_sessions": self.metrics.total("sessions_max"),
            "waiting": self.metrics.total("sessions_waiting"),
            "data": self.data,
        }

    def _admit(self, request: Request, *, page: bool = False) -> None:
        headers = request.headers
        sent = headers.get("authorization"), headers.get("origin"), headers.get("host")
        rejection = self.access.check(*sent, page=page)
        if rejection is not None:
            self.metrics.refused.labels(rejection.reason).inc()
            challenge = {"WWW-Authenticate": "Bearer"} if rejection.status == 401 else None
            raise HTTPException(rejection.status, rejection.text, challenge)

    def _new_engine(self) -> EpisodeEngine:
        return EpisodeEngine(
            self._dataset,
            self.databases.schema,
            self._environment_settings,
            self._settings.answer_mode,
            self._scores,
        )

    def _mcp_tools(self) -> MCPTools | None:
        if find_spec("mcp") is None:
            return None
        # It takes half a second to import.
        from env_server.service.mcp_tools import MCPTools

        settings = self._settings
        idle_s = settings.idle_timeout_s
        return MCPTools(
            *(self._new_session, self.capacity, self.metrics, settings.answer_mode, idle_s, settings.workers)
        )

    def _new_session(self) -> Session:
        return Session(self._new_engine(), self.executor.run, self.metrics)

    async def _gauge(self) -> None:
        while True:
            await asyncio.sleep(GAUGES_S)
            if self.mcp is not None:
                self.mcp.close_idle()
            self.metrics.cache_entries.set(len(self.executor.cache))
            self.metrics.cache_bytes.set(self.executor.cache.size)
            for name, pool in self.executor.pools.items():
                self.metrics.pool_waiting.labels(name).set(pool.waiting)
                self.metrics.pool_running.labels(name).set(pool.running)
                self.metrics.pool_restarts.labels(name).set(pool.restarts)
            if (parent := parent_process()) is not None and not parent.is_alive():
                log(logging.ERROR, "parent_died")
                os.kill(os.getpid(), signal.SIGTERM)
                return


def create_app(settings: ServiceSettings, dataset: Dataset, *, policies: Sequence[str] = ()) -> FastAPI:
    """Return the application of one worker. `dataset` must be loaded for the settings' answer mode.

    `policies` are what the playground offers to let play; whoever names them adds the route by which they do.
    """
    limit_memory(settings.environment.sandbox)
    service = Service(settings, dataset)

    mcp = service.mcp.endpoint() if service.mcp is not None else None

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service.running(), mcp.running() if mcp is not None else nullcontext():
            yield

    documented = settings.docs or settings.token is None
    app = FastAPI(
        title="SQLEnv",
        version=API_VERSION,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url="/docs" if documented else None,
        redoc_url=None,
        openapi_url="/openapi.json" if documented else None,
        exception_handlers={RequestValidationError: http.invalid_request},
    )
    app.state.service = service
    metadata = {
        "name": "sqlenv",
        "description": DESCRIPTION,
        "readme_content": resources.files("env_server").joinpath("service/about.md").read_text(encoding="utf-8"),
        "version": version("sqlenv"),
        "author": "the SQLEnv authors",
        "documentation_url": None,
    }
    app.include_router(
        http.router(service.stateless, service.authorize, service.ready, metadata, service.metrics.render, mcp)
    )
    app.include_router(pages.router(dataset, service.authorize_page, settings.answer_mode, policies))
    app.add_middleware(BodyLimit, max_bytes=settings.max_frame_bytes)
    app.add_middleware(WebSocketRouter, sockets=service.sockets)
    return app
