"""Logprobs of a policy's own tokens without the waste: what TRL's fused head returns, from less work.

Most of an episode is not the policy's: the prompt, what the environment says, and padding to the longest row of a
batch. TRL's forward pass reads all of it in every row, and off a GPU its head scores all of it, too. `read_less` has a
model answer the same calls, `model(input_ids, attention_mask, labels, fused_lm_head=True)`, so:

1. Each row is cut to its own tokens, up to the last one that is scored. Rows that score nothing are not read.
2. What all rows begin with, the system prompt at least, is read once; their attention goes to the same keys and values.
3. Rows of like length are read together, in as few passes as padding is worth.
4. The head sees the positions alone whose labels are not -100.
5. On a CPU, in bfloat16, attention is written out instead of left to PyTorch's kernel (`attention`).

Promises: logprobs, entropies and gradients are those of TRL's own pass to rounding, zero where nothing is scored, and
connected to the weights even if nothing is scored at all. Positions count from a row's own first token, as engines
count them. Where this does not hold, or is not known to, the call goes TRL's way: `read_less` returns why for a model,
and a call with more than ids, mask and labels (images, a mixture of experts' router) is passed on.

All of it happens within one call of the model, so that whatever wraps the model (PEFT, DDP, FSDP, DeepSpeed, autocast)
stays in charge. Where a layer's pass is a collective, ranks must agree on their number: `one_pass` says so.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from trainer.training.attention import blockwise_attention

IGNORED = -100
"""The label of what is not scored."""
PASS_TOKENS = 96
"""What one more pass through the layers costs beside its tokens, in tokens: weights are rounded and gradients added."""
MOST_TOKENS = 8_192
"""Of a pass that keeps nothing for a backward pass."""
TILE_WORDS_CPU, TILE_WORDS = 8_192, 32_768
"""Words of a tile of logits; on a CPU a tile should stay in its cache."""
_READ = {"input_ids", "attention_mask", "labels"}


def passes_are_collectives(accelerator: Accelerator) -> bool:
    """Whether ranks must take the same number of passes: layers are shared out among them (FSDP, DeepSpeed)."""
    whole = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    return accelerator.distributed_type not in whole


@dataclass(frozen=True, slots=True)
class Head:
    """What turns hidden states into logprobs, as TRL's fused head is told."""

    temperature: float
    in_float32: bool
    outputs: tuple[str, ...]
    softcap: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a call are read."""

    starts: list[int]
    """Each row's first own token."""
    ends: list[int]
    """One past the last position from which a token is scored; the start where none is."""
    shared: int
    """Tokens at the beginning that all rows share and that are read once."""
    passes: list[list[int]]
    """Rows that are read together."""


def read_less(
    model: PreTrainedModel,
    *,
    temperature: float,
    in_float32: bool = False,
    outputs: tuple[str, ...] = ("log_probs", "entropy"),
    one_pass: bool = False,
) -> str:
    """Have a model with TRL's fused head read no more than is scored; returns why not, or "" where it does."""
    config = model.config
    if config.get_text_config(decoder=True) is not config:
        return f"{config.model_type} reads more than text"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        return f"{config.model_type} looks ahead"
    reads_cache = {"past_key_values", "use_cache"} <= inspect.signature(
        type(model.base_model).forward
    ).parameters.keys()
    if not reads_cache:
        return f"{config.model_type} keeps no keys and values"
    shares = not one_pass and all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    head = Head(
        temperature, in_float32, outputs, getattr(config, "final_logit_softcapping", None), _logit_scale(config)
    )
    stock = model.forward

    # The signature stays the original one: `generate` checks its arguments against it.
    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        given = {name for name, value in kwargs.items() if value is not None and value is not False}
        if not fused_lm_head:
            return stock(*args, **kwargs)
        reading = None
        if not args and given == _READ:
            # A layer that is computed again in the backward pass reads no keys and values of others.
            again = self.is_gradient_checkpointing and self.training and torch.is_grad_enabled()
            tensors = (kwargs[name].cpu() for name in ("input_ids", "attention_mask", "labels"))
            reading = plan(*tensors, share=shares and not again, one_pass=one_pass)
        if reading is None:
            return stock(*args, **kwargs, fused_lm_head=True)
        with blockwise_attention(self, kwargs["input_ids"].device):
            return _score(self, kwargs["input_ids"], kwargs["labels"], reading, head)

    model.forward = types.MethodType(forward, model)
    return ""


def plan(input_ids: Tensor, attention_mask: Tensor, labels: Tensor, *, share: bool, one_pass: bool) -> Reading | None:
    """Decide how to read the rows; None where a row's own tokens are not in one piece."""
    own, scored = attention_mask.bool(), labels[:, 1:] != IGNORED
    columns = torch.arange(own.shape[1])
    starts, lengths = own.int().argmax(1), own.sum(1)
    if not torch.equal(own, (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])):
        return None
    some = scored.any(1)
    firsts = scored.int().argmax(1)
    ends = torch.where(some, scored.shape[1] - scored.flip(1).int().argmax(1), starts)
    rows = some.nonzero().flatten().tolist()
    if not rows:
        # One token is read, so that the result hangs on the weights.
        ends[0] = starts[0] + 1
        return Reading(starts.tolist(), ends.tolist(), 0, [[0]])
    shared = 0
    if share and len(rows) > 1:
        most = int((firsts - starts)[some].min())
        begun = input_ids.gather(1, starts[:, None] + torch.arange(most))[some]
        shared = int((begun == begun[0]).all(0).cumprod(0).sum())
        if (len(rows) - 1) * shared <= PASS_TOKENS:
            shared = 0
    left = (ends - starts - shared).tolist()
    by_length = sorted(rows, key=lambda row: left[row])
    passes = [by_length]
    if not one_pass:
        most = input_ids.numel() if torch.is_grad_enabled() else MOST_TOKENS
        cuts = cut([left[row] for row in by_length], most)
        passes = [by_length[begin:end] for begin, end in cuts]
    return Reading(starts.tolist(), ends.tolist(), shared, passes)


def cut(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut ascending lengths into the passes that cost least: padded tokens, and PASS_TOKENS for each.

    A pass has at most `most` tokens, unless it is a single row.
    """
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        options = []
        for begin in range(end - 1, -1, -1):
            tokens = (end - begin) * lengths[end - 1]
            if tokens > most and end - begin > 1:
                break
            options.append((best[begin][0] + tokens + PASS_TOKENS, begin))
        best.append(min(options))
    cuts = []
    end = len(lengths)
    while end:
        begin = best[end][1]
        cuts.append((begin, end))
        end = begin
    return cuts[::-1]


def _score(
    model: PreTrainedModel, input_ids: Tensor, labels: Tensor, reading: Reading, head: Head
) -> FusedCausalLMOutput:
    """Read the rows so, and put what is scored in its place."""
    shared = reading.shared
    keys_and_values: list[tuple[Tensor, Tensor]] = []
    if shared:
        row = reading.passes[0][0]
        begin = reading.starts[row]
        cache = DynamicCache(config=model.config)
        model.base_model(
            input_ids=input_ids[row : row + 1, begin : begin + shared], past_key_values=cache, use_cache=True
        )
        keys_and_values = [(layer.keys, layer.values) for layer in cache.layers]
    mask = labels[:, 1:] != IGNORED
    states: list[Tensor] = []
    places: list[Tensor] = []
    for rows in reading.passes:
        width = max(reading.ends[row] - reading.starts[row] for row in rows) - shared
        # What is past a row's end is read and not used: nothing before it looks there.
        index = torch.tensor([reading.starts[row] + shared for row in rows], device=input_ids.device)[:, None]
        index = index + torch.arange(width, device=input_ids.device)
        ends = torch.tensor([reading.ends[row] for row in rows], device=input_ids.device)[:, None]
        here = torch.tensor(rows, device=input_ids.device)[:, None].expand_as(index)
        inside = index < ends
        index = index.clamp(max=labels.shape[1] - 2)
        options: dict[str, Any] = {"use_cache": False}
        if shared:
            many = len(rows)
            beginning = [(k.expand(many, -1, -1, -1), v.expand(many, -1, -1, -1)) for k, v in keys_and_values]
            options = {"use_cache": True, "past_key_values": DynamicCache(beginning)}
        hidden = model.base_model(input_ids=input_ids[here, index], **options).last_hidden_state
        scored = inside & mask[here, index]
        states.append(hidden[scored.to(hidden.device)])
        places.append(torch.stack((here[scored], index[scored])))
    place = torch.cat(places, 1)
    per_token = _head(model, torch.cat(states), labels[:, 1:][*place], head)
    whole = [
        None if one is None else one.new_zeros(mask.shape).index_put(tuple(place.to(one.device)), one)
        for one in per_token
    ]
    log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = whole
    assert log_probs is not None
    mask = mask.to(log_probs.device)
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / mask.sum().clamp(min=1),
        log_probs=log_probs,
        entropy=entropy,
        log_sum_sq_probs=log_sum_sq_probs,
        mean_logits=mean_logits,
        is_top1=is_top1,
        label_mask=mask,
    )


def _head(model: PreTrainedModel, hidden: Tensor, targets: Tensor, head: Head) -> Sequence[Tensor | None]:
    """TRL's kernel on these states, with the head where it is: shards are gathered, as TRL does."""
    layer = model.get_output_embeddings()
    weight, bias = layer.weight, getattr(layer, "bias", None)
    hidden, targets = hidden.to(weight.device), targets.to(weight.device)
    context: Any = nullcontext()
    if head.in_float32:
        hidden = hidden.float()
        context = torch.autocast(hidden.device.type, enabled=False)
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    words = TILE_WORDS_CPU if hidden.device.type == "cpu" else TILE_WORDS
    with context, maybe_gather_lm_head_ctx(weight, bias):
        per_token: Sequence[Tensor | None] = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, head.temperature, words, head.softcap, head.scale, head.outputs
        )
    return per_token


def _logit_scale(config: Any) -> float:
    """By what a model multiplies its logits, under the names that TRL's head knows."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling if config.model_type == "hyperclovax" else 1 / scaling)
