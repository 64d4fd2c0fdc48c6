"""Attention of short rows on a CPU in bfloat16, several times as fast as PyTorch's kernel for it.

That kernel is made for long rows, and takes a third of a step's time over rows of a few hundred tokens. Here
the scores of a layer are written out, in bfloat16, and multiplied by the processor's own matrix instructions; the heads
that share keys and values are one product with them, and nothing is repeated. It rounds where transformers' `eager`
does: scores and probabilities to bfloat16, sums in float32.

`short_rows` has a model attend so within its block, where it pays: on a CPU, in bfloat16 (autocast, or the weights'),
instead of `sdpa`, and while a layer's scores are few. Everything else goes the model's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sdpa_of_short_rows"
MOST_SCORES = 12_000_000
"""Of all heads of a layer in one pass; they are kept for the backward pass, at most 24 MB a layer."""


@contextmanager
def short_rows(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Have the model attend so in this block, unless its layers are computed again in the backward pass, after it."""
    config = model.config
    again = model.is_gradient_checkpointing and model.training and torch.is_grad_enabled()
    if device.type != "cpu" or config._attn_implementation != "sdpa" or again:
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `sdpa` returns, with its arguments: queries of (rows, heads, tokens, size), and the same transposed."""
    rows, heads, width, size = query.shape
    groups, length = key.shape[1], key.shape[2]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    mask = attention_mask
    if mask is None and width == length and getattr(module, "is_causal", True):
        mask = torch.ones(1, 1, width, length, dtype=torch.bool).tril()
    if (
        dtype != torch.bfloat16
        or dropout
        or rows * heads * width * length > MOST_SCORES
        or mask is None
        or mask.dtype != torch.bool
        or mask.shape[1] != 1
        or kwargs.get("is_causal") is not None
        or kwargs.get("position_bias") is not None
    ):
        return sdpa_attention_forward(  # type: ignore[no-any-return]  # transformers carries no types
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    with torch.autocast("cpu", enabled=False):
        scaled = (query * (size**-0.5 if scaling is None else scaling)).to(dtype)
        scores = scaled.reshape(rows, groups, -1, size) @ key.to(dtype).transpose(2, 3)
        scores = scores.view(rows, heads, width, length).masked_fill_(~mask, torch.finfo(dtype).min)
        weights = scores.softmax(-1).view(rows, groups, -1, length)
        attended = (weights @ value.to(dtype)).view(rows, heads, width, size)
    return attended.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
