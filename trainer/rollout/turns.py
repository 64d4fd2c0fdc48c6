"""One generated turn of the policy: text, and before it a reasoning block that has a budget of its own.

Guarantees: a turn has at most `room` tokens, of which the text always gets its own. A reasoning block that is not over
when its budget is spent, or that the model ends its turn in, is closed; the closing tokens have no logprob and are
never trained on, and every token that the model generated was generated under the ids before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from inference.engine import Completion, FinishReason
from trainer.chat.format import ChatFormat

Generate = Callable[[tuple[int, ...], int, int], Awaitable[Completion]]
"""Generates after the turn's ids so far, at most so many tokens; the last number tells the parts of a turn apart."""


@dataclass(frozen=True, slots=True)
class GeneratedTurn:
    """A turn's ids and their logprobs, None where the model did not choose. `closed`: it ends with a stop token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    closed: bool
    policy_version: int

    @property
    def tokens(self) -> int:
        """How many of the ids the model chose."""
        return sum(logprob is not None for logprob in self.logprobs)


async def generate_turn(generate: Generate, chat: ChatFormat, max_text: int, room: int) -> GeneratedTurn:
    """Generate a turn of at most `room` tokens, `max_text` of them reserved for text. Raises what `generate` does."""
    if chat.thinking_tokens is None:
        return _turn(await generate((), room, 0))
    closing = len(chat.closing_ids)
    text = min(max_text, room)
    reasoning = room - text - closing
    if reasoning > 0:
        first = await generate((), reasoning, 0)
        ended = first.finish_reason is FinishReason.STOP
        if not chat.is_thinking(first.token_ids):
            if ended:
                return _turn(first)
            return _turn(
                await generate(first.token_ids, text, 1), first.token_ids, first.logprobs, first.policy_version
            )
        kept = len(first.token_ids) - ended  # an end of turn inside the reasoning block is dropped
        ids = (*first.token_ids[:kept], *chat.closing_ids)
        logprobs = (*first.logprobs[:kept], *(None,) * closing)
        return _turn(await generate(ids, text, 1), ids, logprobs, first.policy_version)
    if chat.renderer.opened_reasoning and room > closing:
        text = min(max_text, room - closing)
        return _turn(await generate(chat.closing_ids, text, 0), chat.closing_ids, (None,) * closing)
    return _turn(await generate((), text, 0))


def _turn(
    completion: Completion,
    before: tuple[int, ...] = (),
    logprobs: tuple[float | None, ...] = (),
    version: int | None = None,
) -> GeneratedTurn:
    return GeneratedTurn(
        (*before, *completion.token_ids),
        (*logprobs, *completion.logprobs),
        completion.finish_reason is FinishReason.STOP,
        completion.policy_version if version is None else min(version, completion.policy_version),
    )
