"""One session: an environment, and what each of its client's frames is answered with. No sockets.

Promises:
- Every frame but `close` gets one reply, and no frame ends the session; replies come in the order of the frames.
- A step whose query needs a lane waits for it, without holding anything else up, and leaves the episode as it was when
  the wait is cancelled.
- Nothing of the gold is in a reply, but for the rewards and the verdict.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Protocol

from env_server.environment import SQLEnvironment
from env_server.errors import SQLEnvError
from env_server.service.execution.databases import Job, OutcomeCache, Pending, RunJob, SessionDatabases, finish
from env_server.service.protocol import (
    CloseRequest,
    FrameError,
    McpRequest,
    Request,
    ResetRequest,
    StateRequest,
    error_frame,
    mcp_frame,
    observation_frame,
    parse_frame,
    state_frame,
)
from env_server.types import ActionType, ErrorCode, SQLAction, SQLObservation

_ACTIONS = frozenset(ActionType)


class Observer(Protocol):
    """Is told what a session does; `Metrics` is one."""

    def step(self, action_type: str, outcome: str, seconds: float, lane: str) -> None:
        """One step was taken."""

    def frame_error(self, code: str) -> None:
        """A frame was answered with an error."""


class Session:
    """Answers the frames of one client, one at a time."""

    def __init__(
        self,
        environment: SQLEnvironment,
        databases: SessionDatabases,
        outcomes: OutcomeCache,
        run_job: RunJob,
        observer: Observer,
    ) -> None:
        self._environment = environment
        self._databases = databases
        self._outcomes = outcomes
        self._run_job = run_job
        self._observer = observer
        self.playing = False
        """Whether an episode has begun and is not over."""
        self._started = False

    def answer(self, frame: str | bytes) -> str | Awaitable[str] | None:
        """Answer a frame: the reply, None when the client wants to close, or a reply to wait for."""
        try:
            request = parse_frame(frame)
        except FrameError as error:
            self._observer.frame_error(error.code)
            return error.reply
        if isinstance(request, CloseRequest):
            return None
        return self._carry_out(request)

    def _carry_out(self, request: Request) -> str | Awaitable[str]:
        began = time.perf_counter()
        try:
            return self._attempt(request, began)
        except Pending as pending:
            return self._wait_for(pending.job, request, began)
        except SQLEnvError as error:
            return self._failed(error)

    async def _wait_for(self, job: Job, request: Request, began: float) -> str:
        try:
            return await finish(self._databases, self._run_job, job, lambda: self._attempt(request, began))
        except SQLEnvError as error:
            return self._failed(error)

    def _attempt(self, request: Request, began: float) -> str:
        match request:
            case SQLAction():
                self._databases.way = "none"
                hits = self._outcomes.hits
                observation = self._environment.step(request)
                way = "cached" if self._outcomes.hits > hits else self._databases.way
                self.playing = not observation.done
                self._observer.step(*_labels(request, observation), time.perf_counter() - began, way)
                return observation_frame(observation)
            case ResetRequest():
                observation = self._environment.reset(
                    request.seed, request.episode_id, request.question_id, request.split
                )
                self.playing = self._started = True
                return observation_frame(observation)
            case StateRequest():
                return state_frame(self._environment.state if self._started else None)
            case McpRequest():
                return mcp_frame(request.message)
        raise AssertionError(request)

    def _failed(self, error: Exception) -> str:
        self._observer.frame_error(ErrorCode.EXECUTION_ERROR)
        return error_frame(ErrorCode.EXECUTION_ERROR, str(error))


def _labels(action: SQLAction, observation: SQLObservation) -> tuple[str, str]:
    """Return what kind of action it was and how it came out, in words of our own."""
    kind = action.action_type.strip().upper()
    verdict = observation.metadata.get("verdict")
    if observation.error:
        outcome = "error"
    elif kind == ActionType.ANSWER and isinstance(verdict, str):
        outcome = verdict
    else:
        outcome = "ok"
    return kind if kind in _ACTIONS else "invalid", outcome
