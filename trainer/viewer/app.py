"""The web application: the page, and the library as JSON.

Promises:

1. Nothing is written, and nothing is read but what `sqlenv view` was given: a request names sources and numbers, never
   a path.
2. Only pages of this address reach it: a request for another host's name is refused, so that no page elsewhere can read
   along by a name that leads here.
3. The page cannot be made to run what is not ours: no inline script or style, nothing from another host, and texts of
   policies and databases are never parsed as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.middleware.trustedhost import TrustedHostMiddleware

from env_server.errors import SQLEnvError
from env_server.service.pages import LOCAL_NAMES, SECURITY_HEADERS
from trainer.eval.metrics import MEANINGS
from trainer.viewer.curves import KINDS
from trainer.viewer.library import Library, UnknownError
from trainer.viewer.query import Filter, Order

PAGE_LIMIT = 500
"""Episodes in one reply."""


class FiniteJSON(JSONResponse):
    """JSON, in which a number that is none is null."""

    def render(self, content: Any) -> bytes:
        """Encode it."""
        return super().render(_finite(content))


def create_app(library: Library) -> FastAPI:
    """Return the application; the library is started and closed by who made it."""
    app = FastAPI(title="sqlenv view", openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(LOCAL_NAMES))

    @app.middleware("http")
    async def protect(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(SECURITY_HEADERS)
        response.headers["Cache-Control"] = "no-store" if request.url.path.startswith("/api/") else "no-cache"
        return response

    @app.exception_handler(SQLEnvError)
    @app.exception_handler(OverflowError)  # a number that no index can hold
    async def refuse(_: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, UnknownError) else 422)

    _add_api(app, library)
    # The page's own files, and what it shares with the playground: its look and modules.
    app.mount("/playground", StaticFiles(packages=[("env_server.service", "playground")]))
    app.mount("/", StaticFiles(packages=[("trainer.viewer", "page")], html=True))
    return app


def _add_api(app: FastAPI, library: Library) -> None:
    """Add the routes. They are plain functions, so that a slow one runs in a thread and holds up nobody."""

    @app.get("/health")
    def health() -> Response:
        return FiniteJSON({"status": "healthy"})

    @app.get("/api/words")
    def words() -> Response:
        """What metrics and kinds of failure mean."""
        return FiniteJSON({"metrics": MEANINGS, "kinds": KINDS})

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
    def episodes(
        source: Annotated[Sequence[str], Query()] = (),
        label: Annotated[Sequence[str], Query()] = (),
        outcome: str = "",
        kind: str = "",
        db: str = "",
        hardness: str = "",
        question: str = "",
        text: str = "",
        min_step: int | None = None,
        max_step: int | None = None,
        min_reward: float | None = None,
        max_reward: float | None = None,
        order: Order = Order.NEWEST,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=0, le=PAGE_LIMIT)] = 100,
    ) -> Response:
        wanted = Filter(
            files=(),
            outcome=outcome,
            kind=kind,
            db_id=db,
            hardness=hardness,
            question_id=question,
            min_step=min_step,
            max_step=max_step,
            min_reward=min_reward,
            max_reward=max_reward,
            text=text,
        )
        return FiniteJSON(library.episodes(source, label, wanted, order, offset, limit))

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

    @app.get("/api/flags")
    def flags(source: str) -> Response:
        return FiniteJSON(library.flags(source))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
