"""The engine protocol: token ids in, token ids and logprobs out. Text is never re-tokenised.

An engine is shared by every episode of a run. An episode opens a `Session`, so that an engine may keep the
episode's prefix cached on one replica, or know how many episodes may still join a batch.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar


class EngineError(Exception):
    """Base of an engine's failures."""


class ContextOverflowError(EngineError):
    """A prompt and the tokens that may follow it exceed the context of whoever generates, which is `allowed` tokens.

    The caller must shorten the prompt.
    """

    def __init__(self, prompt: int, new: int, allowed: int) -> None:
        super().__init__(f"{prompt} prompt tokens and {new} new ones exceed the context of {allowed}")
        self.allowed = allowed


class EngineClosedError(EngineError):
    """The engine was closed while, or before, the request was made."""


class FinishReason(StrEnum):
    """Why generation ended: an end-of-turn token (included in `token_ids`), or the token limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. There is no top-p or top-k: truncation biases the ratio."""

    max_new_tokens: int
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One turn of the policy.

    `token_ids` and `logprobs` have the same length >= 1; `logprobs` are natural logarithms under the
    temperature-scaled distribution the tokens were drawn from (for greedy decoding: under temperature 1).
    `policy_version` counts the weight updates that the engine had received when it generated.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int


class Session(Protocol):
    """One episode's use of an engine; an async context manager."""

    async def __aenter__(self) -> Session:
        """Join the engine."""

    async def __aexit__(self, *exc: object) -> None:
        """Leave the engine."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Generate until an end-of-turn token or `sampling.max_new_tokens`.

        The same ids, sampling and seed give the same tokens as long as the weights are the same. Raises
        EngineError.
        """


class Engine(Protocol):
    """A source of completions."""

    def session(self, key: int) -> Session:
        """Open a session. `key` orders sessions (an episode's index) and is unique among the open ones."""

    async def aclose(self) -> None:
        """Release everything; outstanding requests fail with EngineClosedError."""


def check_request(
    prompt_ids: tuple[int, ...], sampling: Sampling, *, vocab_size: int | None = None, max_context: int | None = None
) -> None:
    """Refuse what would fail, or crash the device, in a batch that others share, as far as the bounds are known.

    Raises EngineError, ContextOverflowError.
    """
    if not prompt_ids:
        raise EngineError("the prompt is empty")
    if vocab_size is not None and (min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size):
        raise EngineError(f"the prompt holds ids outside the vocabulary of {vocab_size}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}")
    if not 0.0 <= sampling.temperature < math.inf:
        raise EngineError(f"temperature must be a finite number >= 0, not {sampling.temperature}")
    if max_context is not None and len(prompt_ids) + sampling.max_new_tokens > max_context:
        raise ContextOverflowError(len(prompt_ids), sampling.max_new_tokens, max_context)


class InLoop(Protocol):
    """What an engine has in one event loop while sessions are open."""

    loop: asyncio.AbstractEventLoop


StateT = TypeVar("StateT", bound=InLoop)


def in_running_loop(state: StateT | None) -> StateT | None:
    """Return an engine's state if it belongs to the running loop, and None if its own loop has ended.

    Raises EngineError when that loop is still there: an engine is used from one at a time.
    """
    if state is None or state.loop is asyncio.get_running_loop():
        return state
    if not state.loop.is_closed():
        raise EngineError("the engine has open sessions in another event loop")
    return None
