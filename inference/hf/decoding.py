"""What decoding is asked for and what it gives: a row in, its tokens and log-probabilities out; and how one is drawn.

Two ways of decoding share this: `generate` reads whole prompts with `transformers`, `cached` keeps keys and values.

Invariants of both:

1. A row's tokens depend on its prompt, limit, temperature and seed, not on the rows beside it (up to rounding
   of the logits, which batching changes in the last bits). The same calls in the same order give bit-identical results.
2. `logprobs` are the float32 log-softmax of the temperature-scaled logits under exactly the row's prefix.
3. A token of probability 0 is never drawn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference.engine import EngineError, FinishReason


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `key` is its session's."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    key: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by any thread: nobody wants this row any more, and the batch no longer waits for it."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A row's result."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the distribution function; greedy where the temperature is 0.

    `logits` (rows, vocabulary), `temperatures` (rows,) float32 >= 0, `uniforms` (rows,) float64 in [0, 1).
    Returns tokens (rows,) int64 and their log-probabilities (rows,) float32, at temperature 1 for greedy rows.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    probs = logprobs.exp()
    # A parallel cumsum need not be monotone to the last bit, so tokens without mass are ruled out by name.
    mass = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
    total = mass.amax(dim=-1)
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = (mass > target[:, None]).int().argmax(dim=-1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), sampled)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def uniforms(row: Row) -> NDArray[np.float64]:
    """A row's random numbers, one for each token it may have, from a generator of its own seed.

    NumPy's generators mix all 64 bits of a seed; torch's CPU generator keeps the lower 32 only.
    """
    return np.random.default_rng(row.seed % 2**64).random(row.max_new_tokens)


def decoded(tokens: Sequence[int], logprobs: Sequence[float], stop_ids: Collection[int]) -> Decoded:
    """The result of a row that has ended. Raises EngineError when the model's logits were not numbers."""
    if not all(map(math.isfinite, logprobs)):
        raise EngineError("the model's logits are not finite; its weights or its precision are broken")
    finish = FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH
    return Decoded(tuple(tokens), tuple(logprobs), finish)
