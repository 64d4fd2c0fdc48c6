"""Attention on a CPU in bfloat16, in blocks that stay in a core's cache: faster than PyTorch's kernel for it.

That kernel takes a third of a training step's time over rows of a few hundred tokens. Here scores are written out in
bfloat16, block by block, and multiplied by the processor's own matrix instructions; the heads that share keys and
values are one product with them, nothing is repeated, and keys that no query of a block sees are left out. The backward
pass computes scores again, as FlashAttention does (Dao et al., arXiv:2205.14135), so none are kept. It rounds where
transformers' `eager` does: scores and probabilities to bfloat16, sums in float32.

`blockwise_attention` has a model attend so within its block, where it pays: on a CPU, in bfloat16 (autocast, or the
weights'), instead of `sdpa`. Everything else goes the model's own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sdpa_blockwise"
SCORES_AT_ONCE = 1_000_000
"""Of all heads of a block: 2 MB, about what a core's second-level cache holds."""
LEAST_QUERIES = 32
"""Of a block: fewer make matrices that are too thin."""
_ALL = slice(None)


@contextmanager
def blockwise_attention(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
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
    width, size, length = query.shape[2], query.shape[3], key.shape[2]
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    mask = attention_mask
    if mask is None and width == length and getattr(module, "is_causal", True):
        mask = torch.ones(1, 1, width, length, dtype=torch.bool).tril()
    if (
        dtype != torch.bfloat16
        or dropout
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
        inputs = scaled, key.to(dtype), value.to(dtype), mask
        attended: Tensor = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    return attended.transpose(1, 2).contiguous(), None


class _Attention(torch.autograd.Function):
    """softmax(query key^T) value, of scaled queries, all of one dtype; True in the mask is what is seen."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for block in _blocks(query, key, mask):
            asked, keys, values = query[block.queries], key[block.keys], value[block.keys]
            weights = _by_group(_weights(asked, keys, block.mask), keys)
            out[block.queries] = (weights @ values).view_as(asked)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mask = ctx.saved_tensors
        of_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        of_key, of_value = (torch.zeros(each.shape, dtype=torch.float32) for each in (key, value))
        for block in _blocks(query, key, mask):
            asked, keys, values = query[block.queries], key[block.keys], value[block.keys]
            incoming = _by_group(grad[block.queries], keys)
            weights = _weights(asked, keys, block.mask)
            of_value[block.keys] += _by_group(weights, keys).transpose(2, 3) @ incoming
            of_weights = (incoming @ values.transpose(2, 3)).view_as(weights)
            of_scores = _by_group(torch._softmax_backward_data(of_weights, weights, -1, weights.dtype), keys)
            of_query[block.queries] = (of_scores @ keys).view_as(asked)
            of_key[block.keys] += of_scores.transpose(2, 3) @ _by_group(asked, keys)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype), None


class _Block(NamedTuple):
    queries: tuple[slice, slice, slice]
    """Rows, heads and tokens."""
    keys: tuple[slice, slice, slice]
    mask: Tensor


def _blocks(query: Tensor, key: Tensor, mask: Tensor) -> Iterator[_Block]:
    """Rows and queries that are taken together, with the keys up to the last that one of them sees."""
    rows, heads, width, _ = query.shape
    length = key.shape[2]
    queries = width if heads * width * length <= SCORES_AT_ONCE else SCORES_AT_ONCE // (heads * length)
    queries = max(queries, LEAST_QUERIES)
    together = max(1, SCORES_AT_ONCE // (heads * min(queries, width) * length))
    seen = mask.any(0)[0]
    for first in range(0, width, queries):
        tokens = slice(first, first + queries)
        visible = seen[tokens].any(0).nonzero()
        last = int(visible[-1]) + 1 if len(visible) else length
        for row in range(0, rows, together):
            part = slice(row, row + together)
            block = (mask if mask.shape[0] == 1 else mask[part])[:, :, tokens, :last]
            yield _Block((part, _ALL, tokens), (part, _ALL, slice(last)), block)


def _by_group(of_heads: Tensor, key: Tensor) -> Tensor:
    """(rows, heads, tokens, n) as (rows, groups, heads of a group x tokens, n): what meets the same keys and values."""
    return of_heads.reshape(of_heads.shape[0], key.shape[1], -1, of_heads.shape[3])


def _weights(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """(rows, heads, tokens, keys), in the dtype of the queries."""
    scores = (_by_group(query, key) @ key.transpose(2, 3)).view(*query.shape[:3], key.shape[2])
    return scores.masked_fill_(~mask, torch.finfo(query.dtype).min).softmax(-1)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
