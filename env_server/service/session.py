"""One session: its episodes, and what each of its client's frames is answered with. No sockets.

Guarantees:
- Every frame but `close` gets one reply, and no frame ends the session; replies come in the order of the frames.
- A step whose query or verdict needs a query process waits for it and holds nothing else up; when there is none,
  the episode is as it was.
- Nothing of the gold is in a reply, but for the rewards and the verdict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from env_server.actions import ACTIONS, Job, Outcome
from env_server.episode import EpisodeEngine, PlannedStep
from env_server.errors import DataError, SQLEnvError
from env_server.service.execution.executor import ExecutionResult
from env_server.service.logs import log
from env_server.service.metrics import Metrics
from env_server.service.protocol import (
    ControlRequest,
    FrameError,
    error_frame,
    mcp_reply,
    observation_data,
    parse_frame,
    reply_frame,
    state_data,
)
from env_server.types import ErrorCode, ResetRequest, SQLAction, SQLObservation

Run = Callable[[Job], ExecutionResult | Awaitable[ExecutionResult]]
"""Runs a job; `Executor.run` is one."""


class Session:
    """Answers the frames of one client, one at a time."""

    def __init__(self, engine: EpisodeEngine, run: Run, metrics: Metrics) -> None:
        self._engine = engine
        self._run = run
        self._metrics = metrics
        self.playing = False
        """Whether an episode has begun and is not over."""
        self._started = False

    def answer(self, frame: str | bytes) -> str | Awaitable[str] | None:
        """Answer a frame: the reply, None when the client wants to close, or a reply to wait for."""
        try:
            match request := parse_frame(frame):
                case SQLAction():
                    return self._step(request)
                case ResetRequest():
                    return self._reset(request)
                case ControlRequest("close"):
                    return None
                case ControlRequest("state"):
                    return reply_frame("state", state_data(self._engine.state if self._started else None))
            return reply_frame("mcp", mcp_reply(request.message))
        except FrameError as error:
            self._metrics.frame_errors.labels(error.code).inc()
            return error.reply
        except SQLEnvError as error:
            return self._failed(error)

    def _reset(self, request: ResetRequest) -> str:
        observation = self._engine.reset(request.seed, request.episode_id, request.question_id, request.split)
        self.playing = self._started = True
        return reply_frame("observation", observation_data(observation))

    def _step(self, action: SQLAction) -> str | Awaitable[str]:
        began = time.perf_counter()
        step = self._engine.plan(action)
        if step.job is None:
            return self._apply(step, None, "none", began)
        result = self._run(step.job)
        if not isinstance(result, ExecutionResult):
            return self._wait_for(step, result, began)
        return self._apply(step, result.outcome, result.source, began)

    async def _wait_for(self, step: PlannedStep, awaited: Awaitable[ExecutionResult], began: float) -> str:
        try:
            result = await awaited
            return self._apply(step, result.outcome, result.source, began)
        except SQLEnvError as error:
            return self._failed(error)

    def _apply(self, step: PlannedStep, outcome: Outcome | None, source: str, began: float) -> str:
        observation = self._engine.apply(step, outcome)
        self.playing = not observation.done
        self._metrics.steps.labels(*_labels(step.kind, observation)).inc()
        self._metrics.step_seconds.labels(source).observe(time.perf_counter() - began)
        return reply_frame("observation", observation_data(observation))

    def _failed(self, error: SQLEnvError) -> str:
        if isinstance(error, DataError):
            log(logging.ERROR, "a database cannot be used", error=error)
        self._metrics.frame_errors.labels(ErrorCode.EXECUTION_ERROR).inc()
        return error_frame(ErrorCode.EXECUTION_ERROR, str(error))


def _labels(kind: str, observation: SQLObservation) -> tuple[str, str]:
    """Return the action's kind and its outcome, from fixed lists: the verdict where it ended the episode."""
    verdict = observation.metadata.get("verdict")
    outcome = verdict if isinstance(verdict, str) else "error" if observation.error else "ok"
    return kind if kind in ACTIONS else "invalid", outcome
