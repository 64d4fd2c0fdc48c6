"""An engine without a model, for benchmarks and tests of the rollout client: its tokens come from a function.

Invariants:
1. A turn takes `step_s` for each of its tokens, however many run beside it: decoding is bound by memory, not by the
   size of the batch. Reading a prompt takes no time, and neither does the network.
2. The same session and turn get the same tokens and logprobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Self

from env_server.dataset import Dataset, Question
from env_server.settings import EnvSettings
from env_server.types import ActionType, AnswerMode
from inference.engine import (
    Completion,
    EngineClosedError,
    EngineError,
    FinishReason,
    Sampling,
    Session,
    check_request,
)
from trainer.chat.actions import format_action
from trainer.chat.format import ChatFormat
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.players import OraclePlayer, play


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for turn number `turn`, from 0, of the session `key`."""

    key: int
    turn: int
    prompt_ids: tuple[int, ...]
    seed: int


Policy = Callable[[TurnRequest], Sequence[int]]
"""Returns the ids of a turn, its end included where it has one."""


class SimulatedEngine:
    """An `Engine` that says what `policy` returns. A turn ends with one of `stop_ids`, or at its limit of tokens."""

    def __init__(self, policy: Policy, *, stop_ids: Sequence[int], step_s: float = 0.0) -> None:
        self.policy = policy
        self.step_s = step_s
        self.stop_ids = frozenset(stop_ids)
        self.policy_version = 0
        self.closed = False

    def session(self, key: int) -> Session:
        """Open a session."""
        return _Session(self, key)

    async def aclose(self) -> None:
        """Fail the requests that are outstanding, at the end of their turn, and later ones."""
        self.closed = True


class _Session:
    def __init__(self, engine: SimulatedEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._turns = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """There is nothing to leave."""

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        engine = self._engine
        check_request(prompt_ids, sampling)
        request = TurnRequest(self._key, self._turns, prompt_ids, seed)
        ids = tuple(engine.policy(request))[: sampling.max_new_tokens]
        if not ids:
            raise EngineError(f"the policy has no tokens for turn {request.turn} of session {request.key}")
        await asyncio.sleep(engine.step_s * len(ids))
        if engine.closed:
            raise EngineClosedError("the engine is closed")
        self._turns += 1
        # Logprobs that look like some, each its token's own: -0.02 to -1.27.
        logprobs = tuple(-0.02 - (token * 2_654_435_761 % 1_000) / 800 for token in ids)
        reason = FinishReason.STOP if ids[-1] in engine.stop_ids else FinishReason.LENGTH
        return Completion(ids, logprobs, reason, engine.policy_version)


class ScriptedPolicy:
    """Session `key` says the turns of script number `key`, modulo their count; a script that is used up, an ANSWER."""

    def __init__(self, chat: ChatFormat, scripts: Sequence[Sequence[str]]) -> None:
        self._scripts = [[chat.renderer.turn_ids(text) for text in script] for script in scripts]
        self._last = chat.renderer.turn_ids(format_action(ActionType.ANSWER, "1"))

    def __call__(self, request: TurnRequest) -> Sequence[int]:
        """Return a turn's ids."""
        turns = self._scripts[request.key % len(self._scripts)]
        return turns[request.turn] if request.turn < len(turns) else self._last


LONG_SCRIPT = (*[format_action(ActionType.QUERY, "SELECT 1" + ", 1" * 42)] * 6, format_action(ActionType.ANSWER, "1"))
"""An episode of seven turns; a query is some 90 tokens, and so is its result."""


def oracle_scripts(dataset: Dataset, questions: Sequence[Question]) -> list[list[str]]:
    """Return the texts of the oracle's turns on each question."""
    local = LocalEnvironments(dataset, EnvSettings(), AnswerMode.VALUE)
    with closing(local), local.blocking() as environment:
        played = [play(environment, question, OraclePlayer(question, AnswerMode.VALUE)) for question in questions]
    return [[turn.text for turn in episode.turns] for episode, _ in played]
