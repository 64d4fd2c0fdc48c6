"""Decoding with `transformers` generate, whole prompts at a time: what works with every model.

Synchronous and free of shared state. Rows of one batch differ in temperature, token limit and seed, so the choice of
each token is made here, in a logits processor that leaves `generate` one token to pick, and each row stops by its own
rule. The model's own `generation_config` plays no part. See `decoding` for what is promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from inference.hf.decoding import Decoded, Row, decoded, draw, uniforms


@torch.no_grad()
def decode(
    model: PreTrainedModel, rows: Sequence[Row], *, stop_ids: Collection[int], pad_id: int
) -> list[Decoded | None]:
    """Generate for every row until a stop token or the row's limit; None for a row that was cancelled.

    The model must be in eval mode. Raises EngineError when the model's logits are not numbers.
    """
    width = max(len(row.prompt_ids) for row in rows)
    limit = max(row.max_new_tokens for row in rows)
    device = model.device
    padding = [width - len(row.prompt_ids) for row in rows]
    ids = [[pad_id] * pad + list(row.prompt_ids) for pad, row in zip(padding, rows, strict=True)]
    mask = [[0] * pad + [1] * len(row.prompt_ids) for pad, row in zip(padding, rows, strict=True)]
    chooser = _Chooser(rows, limit, device)
    config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, use_cache=True, pad_token_id=pad_id, eos_token_id=sorted(stop_ids)
    )
    with _configured(model, config):
        output = model.generate(
            input_ids=torch.tensor(ids, device=device),
            attention_mask=torch.tensor(mask, device=device),
            logits_processor=LogitsProcessorList([chooser]),
            stopping_criteria=StoppingCriteriaList([_RowStop(rows, width, device)]),
        )
    tokens = output[:, width:].tolist()
    logprobs = chooser.logprobs()
    return [
        _result(row, row_tokens, row_logprobs, stop_ids)
        for row, row_tokens, row_logprobs in zip(rows, tokens, logprobs, strict=True)
    ]


class _Chooser(LogitsProcessor):  # type: ignore[misc]  # transformers carries no types
    """Draws each row's next token and leaves `generate` no other choice; remembers the log-probabilities."""

    def __init__(self, rows: Sequence[Row], limit: int, device: torch.device) -> None:
        self._temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device)
        self._uniforms = _uniforms(rows, limit).to(device)
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        tokens, logprobs = draw(scores, self._temperatures, self._uniforms[:, len(self._logprobs)])
        self._logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def logprobs(self) -> list[list[float]]:
        """Every row's log-probabilities, one per step of the batch."""
        rows: list[list[float]] = torch.stack(self._logprobs, dim=1).tolist()
        return rows


class _RowStop(StoppingCriteria):  # type: ignore[misc]
    """Ends a row at its own limit, or once nobody wants it; stop tokens are `generate`'s own business."""

    def __init__(self, rows: Sequence[Row], width: int, device: torch.device) -> None:
        self._rows = rows
        self._width = width
        self._limits = torch.tensor([row.max_new_tokens for row in rows], device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        cancelled = torch.tensor([row.cancelled.is_set() for row in self._rows], device=self._limits.device)
        return (self._limits <= input_ids.shape[1] - self._width) | cancelled


def _result(row: Row, tokens: list[int], logprobs: list[float], stop_ids: Collection[int]) -> Decoded | None:
    """Cut what `generate` appended after the row's end."""
    if row.cancelled.is_set():
        return None
    length = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), row.max_new_tokens)
    length = min(length, row.max_new_tokens)
    return decoded(tokens[:length], logprobs[:length], stop_ids)


def _uniforms(rows: Sequence[Row], limit: int) -> Tensor:
    """Return (rows, limit) float64 random numbers, 0 beyond a row's own limit."""
    padded = np.zeros((len(rows), limit))
    for index, row in enumerate(rows):
        padded[index, : row.max_new_tokens] = uniforms(row)
    return torch.from_numpy(padded)


@contextmanager
def _configured(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Put the model's own generation config aside: `generate` fills in from it whatever the caller leaves unset."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
