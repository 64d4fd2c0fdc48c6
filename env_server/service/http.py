"""The HTTP routes: what OpenEnv's tools ask of a server, its load, and its metrics.

An episode lives on `/ws`. `POST /reset` and `POST /step` answer over an environment that is made for the request and
thrown away, as upstream's do: `/step` takes its action in an episode that was reset with seed 0.

Behind the token, when there is one: everything but `/health`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import to_json

from env_server.episode import EpisodeEngine
from env_server.errors import SQLEnvError
from env_server.service.execution.executor import ExecutionResult
from env_server.service.metrics import CONTENT_TYPE
from env_server.service.protocol import MAX_ERRORS, mcp_reply, observation_data, state_data
from env_server.service.session import Run
from env_server.types import ResetRequest, SQLAction, SQLObservation, SQLState, is_unicode

MAX_AT_ONCE = 16
"""Requests for `/reset` and `/step` that are carried out at once; more get 503."""
BESIDE = ("done", "reward", "metadata")
"""Fields of an observation that stand beside it on the wire."""

Authorized = Callable[..., Awaitable[None]]
ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]


class StepRequest(BaseModel):
    """The body of `POST /step`."""

    model_config = ConfigDict(extra="ignore")

    action: SQLAction
    timeout_s: float | None = Field(
        default=None, ge=0, description="accepted, not used: queries have a budget of steps"
    )
    request_id: str | None = Field(default=None, max_length=255, description="accepted, not used")

    @model_validator(mode="after")
    def _is_unicode(self) -> StepRequest:
        if not is_unicode([self.action.action_type, self.action.argument]):
            raise ValueError("the action must not hold half of a surrogate pair")
        return self


class StepReply(BaseModel):
    """The answer to `POST /reset` and `POST /step`."""

    observation: dict[str, Any]
    reward: float
    done: bool
    metadata: dict[str, Any]


class Health(BaseModel):
    """The process is alive."""

    status: str = "healthy"


def schemas() -> dict[str, Any]:
    """Return the JSON schemas of actions, observations and states, as they are on the wire."""
    observation = SQLObservation.model_json_schema()
    # OpenEnv's graders put reward and done back before they validate.
    observation["required"] = sorted(set(observation["properties"]) - set(BESIDE))
    return {
        "action": SQLAction.model_json_schema(),
        "observation": observation,
        "state": SQLState.model_json_schema(),
        "reset_observation": observation,
    }


class StatelessEnv:
    """Carries out requests in episodes of their own."""

    def __init__(self, run: Run, new_engine: Callable[[], EpisodeEngine]) -> None:
        self._run = run
        self._new_engine = new_engine
        self._running = 0

    def reset(self, request: ResetRequest) -> SQLObservation:
        """Start an episode. Raises HTTPException."""
        with self._counted():
            return _reset(self._new_engine(), request)

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take an action in a new episode. Raises HTTPException."""
        with self._counted():
            engine = self._new_engine()
            _reset(engine, ResetRequest(seed=0))
            step = engine.plan(action)
            if step.job is None:
                return engine.apply(step)
            result = self._run(step.job)
            result = result if isinstance(result, ExecutionResult) else await result
            return engine.apply(step, result.outcome)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Hold one of the places for a request, and word its errors for HTTP."""
        if self._running >= MAX_AT_ONCE:
            raise HTTPException(503, "too many requests at once; play episodes over /ws instead")
        self._running += 1
        try:
            yield
        except SQLEnvError as error:
            raise HTTPException(409, str(error)) from None
        finally:
            self._running -= 1


class _Forwarded(Response):
    """Hands an authorized request over to another application."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


def _reset(engine: EpisodeEngine, request: ResetRequest) -> SQLObservation:
    return engine.reset(request.seed, request.episode_id, request.question_id, request.split)


def router(
    stateless: StatelessEnv,
    authorized: Authorized,
    ready: Callable[[], dict[str, Any]],
    metadata: dict[str, Any],
    metrics: Callable[[], bytes],
    mcp: ASGIApp | None,
) -> APIRouter:
    """Return the routes. `ready` tells the load, `metrics` renders the metrics, and `mcp` answers clients of MCP."""
    routes = APIRouter()
    guarded = APIRouter(dependencies=[Depends(authorized)])
    known_schemas = to_json(schemas())

    @routes.get("/health", summary="Is the process alive?")
    async def health() -> Health:
        return Health()

    @guarded.get("/ready", summary="Can it take sessions, and how many?", responses={503: {"description": "draining"}})
    async def is_ready() -> JSONResponse:
        load = ready()
        return JSONResponse(load, 200 if load["status"] == "ready" else 503)

    @guarded.get("/metrics", summary="Counts, for Prometheus", response_class=Response)
    async def counts() -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE)

    @guarded.get("/metadata", summary="What this environment is")
    async def about() -> dict[str, Any]:
        return metadata

    @guarded.get("/schema", summary="JSON schemas of actions, observations and states", response_class=Response)
    async def schema() -> Response:
        return Response(known_schemas, media_type="application/json")

    @guarded.post("/reset", summary="The first observation of an episode that is thrown away")
    async def reset(request: Annotated[ResetRequest | None, Body()] = None) -> StepReply:
        observation = stateless.reset(request or ResetRequest())
        return StepReply(**observation_data(observation))

    @guarded.post("/step", summary="One action in an episode that is thrown away")
    async def step(request: StepRequest) -> StepReply:
        return StepReply(**observation_data(await stateless.step(request.action)))

    @guarded.get("/state", summary="The state of an environment that was never reset")
    async def state() -> dict[str, Any]:
        return state_data(None)

    @guarded.post("/mcp", summary="The actions as tools of the Model Context Protocol")
    async def tools(request: Request) -> Response:
        if mcp is not None and "text/event-stream" in request.headers.get("accept", ""):
            return _Forwarded(mcp)
        # Not an MCP client: OpenEnv's tools expect JSON-RPC.
        try:
            message = json.loads(await request.body())
        except (ValueError, RecursionError):
            error = {"code": -32700, "message": "the body is not JSON"}
            return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error})
        return JSONResponse(mcp_reply(message))

    routes.include_router(guarded)
    return routes


async def invalid_request(_request: Request, error: Exception) -> JSONResponse:
    """Answer a body that does not fit with what is wrong, and without the values that were sent."""
    assert isinstance(error, RequestValidationError)
    details = [
        {"loc": list(each["loc"]), "msg": each["msg"], "type": each["type"]} for each in error.errors()[:MAX_ERRORS]
    ]
    return JSONResponse({"detail": details}, 422)


class BodyLimit:
    """An ASGI application in front of another one: bodies over `max_bytes` are refused with 413."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            await JSONResponse({"detail": f"the body is larger than {self._max_bytes} bytes"}, 413)(
                scope, receive, send
            )
            return
        left = self._max_bytes

        async def bounded() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        await self._app(scope, bounded, send)
