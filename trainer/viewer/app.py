"""The web application: the page, and the library as JSON.

Guarantees:

1. Nothing is written, and nothing is read but what `sqlenv view` was given: a request names sources and numbers, never
   a path.
2. Only pages of this address reach it: a request for another host's name is rejected, so that no page elsewhere can
   read along by a name that leads here.
3. The page cannot be made to run foreign code: no inline script or style, nothing from another host, and texts of
   policies and databases are never parsed as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.trustedhost import TrustedHostMiddleware

from env_server.errors import SQLEnvError
from env_server.service.pages import LOCAL_NAMES, SECURITY_HEADERS
from trainer.viewer.index import Filter
from trainer.viewer.library import Library, UnknownError


class FiniteJSON(JSONResponse):
    """JSON, in which a non-finite number is null."""

    def render(self, content: Any) -> bytes:
        """Encode it."""
        return super().render(_finite(content))


def create_app(library: Library) -> FastAPI:
    """Return the application; its caller starts and closes the library."""
    app = FastAPI(title="sqlenv view", openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOCAL_NAMES))

    @app.middleware("http")
    async def protect(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(SECURITY_HEADERS)
        response.headers["Cache-Control"] = "no-store" if request.url.path.startswith("/api/") else "no-cache"
        return response

    @app.exception_handler(SQLEnvError)
    @app.exception_handler(OverflowError)  # a number that SQLite cannot hold
    async def reject(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, UnknownError) else 422)

    # The routes are plain functions, so that a slow one runs in a thread and delays no other.
    @app.get("/health")
    def health() -> Response:
        return FiniteJSON({"status": "healthy"})

    @app.get("/api/words")
    def words() -> Response:
        return FiniteJSON(library.words())

    @app.get("/api/state")
    def state() -> Response:
        return FiniteJSON(library.state())

    @app.get("/api/curves")
    def curves(source: str) -> Response:
        return FiniteJSON(library.curves(source))

    @app.get("/api/failures")
    def failures(source: str) -> Response:
        return FiniteJSON(library.failures(source))

    @app.get("/api/episodes")
    def episodes(wanted: Annotated[Filter, Query()]) -> Response:
        return FiniteJSON(library.episodes(wanted))

    @app.get("/api/episodes/{number}")
    def episode(number: int) -> Response:
        return FiniteJSON(library.episode(number))

    @app.get("/api/episodes/{number}/gold")
    def gold(number: int) -> Response:
        return FiniteJSON(library.gold(number))

    @app.get("/api/compare")
    def compare(a: int, b: int) -> Response:
        return FiniteJSON(library.compare(a, b))

    @app.get("/api/differences")
    def differences(a: str, b: str) -> Response:
        return FiniteJSON(library.differences(a, b))

    # The page's own files, and what it shares with the playground: its look and modules.
    app.mount("/playground", StaticFiles(packages=[("env_server.service", "playground")]))
    app.mount("/", StaticFiles(packages=[("trainer.viewer", "page")], html=True))
    return app


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
