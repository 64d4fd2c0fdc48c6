"""The FastAPI application of one worker, put together.

`create_app` makes everything that the worker's sessions share; it starts with the application and ends with it. The
server calls `app.state.service.drain()` before it stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import resources
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError

from env_server.catalogue import Catalogue
from env_server.data.fingerprint import served_data
from env_server.dataset import Dataset
from env_server.episodes import Episodes
from env_server.scores import Scores
from env_server.service import http, pages
from env_server.service.access import Access
from env_server.service.capacity import Capacity
from env_server.service.execution.cpu_budget import CpuBudget
from env_server.service.execution.databases import ServiceDatabases, SessionJobs
from env_server.service.execution.query_pool import QueryPool
from env_server.service.http import BodyLimit, ThrowAway
from env_server.service.logs import log
from env_server.service.metrics import Metrics
from env_server.service.session import Session
from env_server.service.settings import ServiceSettings
from env_server.service.socket import Sockets, SocketsFirst
from env_server.sql.sandbox import limit_memory

DESCRIPTION = (
    "An agent answers a question about a database that it cannot see, by DESCRIBE, SAMPLE, QUERY and ANSWER, with "
    "dense rewards. Episodes are played over the WebSocket /ws, which speaks OpenEnv's format."
)
API_VERSION = "1.0.0"
"""Of the interface; OpenEnv's tools know its profile by the first number."""
GAUGES_S = 1.0


class Service:
    """What the sessions of one worker share."""

    def __init__(self, settings: ServiceSettings, dataset: Dataset, capacity: Capacity, metrics: Metrics) -> None:
        self._settings = settings
        self._dataset = dataset
        self._capacity = capacity
        self._metrics = metrics
        self._environment_settings = settings.environment
        catalogue = Catalogue(settings.cache_dir)
        self.databases = ServiceDatabases(dataset.databases, self._environment_settings, catalogue)
        self._scores = Scores()
        self.query_pool = QueryPool(
            dataset.databases, self._environment_settings, settings.answer_mode, settings.cache_dir, settings.lanes
        )
        token = settings.token.get_secret_value() if settings.token is not None else None
        self.access = Access(token, settings.allowed_origins)
        served = served_data(dataset, settings.answer_mode, settings.environment, catalogue)
        self.data = served.model_dump(mode="json")
        self.sockets = Sockets(settings, self.access, capacity, metrics, self._new_session, served.version_tag)
        # All HTTP requests share one account.
        self.throw_away = ThrowAway(self._new_jobs(), self._new_episodes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the query pool and what runs in the background; end them."""
        await asyncio.to_thread(self.databases.learn_schemas)
        async with self.query_pool:
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

    async def drain(self) -> None:
        """Take no more sessions; return when the last one is gone, at the latest after `grace_s`."""
        log(logging.INFO, "draining", count=self.sockets.sessions, grace_s=self._settings.grace_s)
        self._capacity.close()
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
            "active_sessions": self._capacity.active(),
            "max_sessions": self._capacity.limit,
            "waiting": self._capacity.waiting(),
            "data": self.data,
        }

    def _admit(self, request: Request, *, page: bool = False) -> None:
        headers = request.headers
        sent = headers.get("authorization"), headers.get("origin"), headers.get("host")
        refusal = self.access.refusal(*sent, page=page)
        if refusal is not None:
            self._metrics.refused(refusal.reason)
            challenge = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
            raise HTTPException(refusal.status, refusal.text, challenge)

    def _new_episodes(self) -> Episodes:
        return Episodes(
            self._dataset,
            self.databases.schema,
            self._environment_settings,
            self._settings.answer_mode,
            self._scores,
        )

    def _new_jobs(self) -> SessionJobs:
        return SessionJobs(self.databases, self.query_pool.run, CpuBudget())

    def _new_session(self) -> Session:
        return Session(self._new_episodes(), self._new_jobs(), self._metrics)

    async def _gauge(self) -> None:
        while True:
            await asyncio.sleep(GAUGES_S)
            gauges: dict[str, float] = {
                "cache_entries": len(self.databases.outcomes),
                "cache_bytes": self.databases.outcomes.bytes,
            }
            for name, stats in self.query_pool.stats.items():
                gauges[f"{name}_waiting"] = stats.waiting
                gauges[f"{name}_running"] = stats.running
                self._metrics.set_lane_restarts(name, stats.restarts)
            self._metrics.set_gauges(**gauges)


def create_app(
    settings: ServiceSettings,
    dataset: Dataset,
    *,
    capacity: Capacity,
    metrics: Metrics,
    policies: Sequence[str] = (),
) -> FastAPI:
    """Return the application of one worker. `dataset` must be loaded for the settings' answer mode.

    `policies` are what the playground offers to let play; whoever names them adds the route by which they do.
    """
    limit_memory(settings.environment.sandbox)
    service = Service(settings, dataset, capacity, metrics)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
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
    app.include_router(http.router(service.throw_away, service.authorize, service.ready, metadata, metrics.render))
    app.include_router(pages.router(dataset, service.authorize_page, settings.answer_mode, policies))
    app.add_middleware(BodyLimit, max_bytes=settings.max_frame_bytes)
    app.add_middleware(SocketsFirst, sockets=service.sockets)
    return app
