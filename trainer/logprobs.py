"""Logprobs of the labelled tokens of a batch, from no more computation than they take.

Most of an episode is not the policy's: the prompt, the environment's replies, and padding to the longest row. TRL's
fused head returns logprobs of whole padded rows. `label_logprobs` returns the same from less:

1. Rows are trimmed to their own tokens, up to the last one with a label.
2. The prefix that all rows share goes through the layers once, and the rows attend to its KV cache.
3. On a CPU the shorter half of the rows goes first, in a pass of its own.
4. The LM head projects labelled positions alone (`compact_head`).

Guarantees: logprobs, entropies and gradients are those of TRL's pass to rounding, zero where nothing is labelled, and
connected to the weights even if nothing is labelled at all. Positions count from a row's own first token, as engines
count them. The model is called as TRL calls it, so its wrapper (PEFT, DDP, FSDP, DeepSpeed, autocast) stays in charge.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from trl.trainer.utils import FusedCausalLMOutput

IGNORED = -100
"""The label of a token that is not trained."""
LEAST_SHARED = 16
"""Tokens of a shared prefix that are worth a pass of their own."""
PER_TOKEN = ("log_probs", "entropy", "is_top1")
"""What TRL's trainers read of each token; None where the fused head was not asked for it."""


@contextmanager
def compact_head() -> Iterator[None]:
    """Have TRL's fused head project labelled positions alone on a CPU too, as it does where Triton runs.

    Elsewhere it projects every position, since a compiler would compile a program for each shape; a CPU compiles none.
    """
    before = trl.trainer.utils._use_triton
    trl.trainer.utils._use_triton = lambda device: device.type == "cpu" or before(device)
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = before


def trimmed(model: nn.Module, accelerator: Accelerator, most_rows: int | None = None) -> Callable[..., Any]:
    """The model for a loss of TRL's trainers to call; calls with more than ids, mask and labels are passed on.

    `most_rows`, of a pass with gradients: with more rows than that, passes are checkpointed, so that the activations of
    one exist at a time.
    """
    # Wrappers for several ranks expect one forward pass for each backward pass.
    one_pass = accelerator.distributed_type is not DistributedType.NO

    def forward(*, labels: Tensor, fused_lm_head: bool, **call: Any) -> Any:
        if call.keys() - {"input_ids", "attention_mask", "use_cache"}:  # images, packed rows, a router's loss
            with compact_head():
                return model(labels=labels, fused_lm_head=fused_lm_head, **call)
        return label_logprobs(
            model, call["input_ids"], call["attention_mask"], labels, one_pass=one_pass, most_rows=most_rows
        )

    def call_model(**call: Any) -> Any:
        return forward(**call) if call.get("fused_lm_head") else model(**call)

    return call_model


def label_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    labels: Tensor,
    *,
    one_pass: bool,
    most_rows: int | None = None,
) -> FusedCausalLMOutput:
    """What a model with TRL's fused head returns for these rows, each in one piece between its padding."""
    rows, device = len(input_ids), input_ids.device
    starts = attention_mask.int().argmax(1, keepdim=True)
    labels = labels.scatter(1, starts, IGNORED)  # nothing precedes a row's first token
    wanted = labels[:, 1:] != IGNORED
    columns = torch.arange(2, labels.shape[1] + 1, device=device)
    lengths = ((wanted * columns).amax(1) - starts[:, 0]).clamp(min=2)
    places = starts + torch.arange(int(lengths.max()), device=device)
    ids = functional.pad(input_ids, (0, places.shape[1])).gather(1, places)
    labels = functional.pad(labels, (0, places.shape[1]), value=IGNORED).gather(1, places)

    shared = 0 if one_pass or rows == 1 else _shared_prefix(model, ids, labels)
    cache = DynamicCache()
    if shared:
        prefix = ids[:1, :shared]
        with compact_head():
            model(input_ids=prefix, labels=torch.full_like(prefix, IGNORED), past_key_values=cache, fused_lm_head=True)

    def forward(part: Tensor) -> list[Tensor | None]:
        own = slice(shared, max(shared + 2, int(lengths[part].max())))
        options: dict[str, Any] = {}
        if shared:
            layers = [(layer.keys, layer.values) for layer in cache.layers]
            expanded = [tuple(each.expand(len(part), -1, -1, -1) for each in layer) for layer in layers]
            options["past_key_values"] = DynamicCache(expanded)
        with compact_head():  # also where a checkpointed pass is run again
            output = model(input_ids=ids[part, own], labels=labels[part, own], fused_lm_head=True, **options)
        found = labels[part, own][:, 1:] != IGNORED
        target = wanted[part]
        return [
            None if each is None else each.new_zeros(target.shape).masked_scatter(target, each[found])
            for each in (getattr(output, name) for name in PER_TOKEN)
        ]

    most = rows if most_rows is None or not torch.is_grad_enabled() else most_rows
    parts = [torch.arange(rows, device=device)]
    if not one_pass:
        half = -(-rows // 2) if device.type == "cpu" else rows
        parts = list(torch.split(lengths.argsort(stable=True), min(half, most)))
    passes = [checkpoint(forward, part, use_reentrant=False) if rows > most else forward(part) for part in parts]
    order = torch.cat(parts).argsort()
    whole = [None if each[0] is None else torch.cat(each)[order] for each in zip(*passes, strict=True)]
    log_probs, entropy, is_top1 = whole
    return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, is_top1=is_top1, label_mask=wanted)


def _shared_prefix(model: nn.Module, ids: Tensor, labels: Tensor) -> int:
    """Return how many tokens all rows begin with, before the first one that is scored; 0 where it saves nothing."""
    inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if (
        not isinstance(inner, PreTrainedModel)
        or inner.is_gradient_checkpointing  # a layer that is computed again reads no KV cache of others
        or "past_key_values" not in inspect.signature(type(inner.base_model).forward).parameters
        or any(type(layer) is not DynamicLayer for layer in DynamicCache(config=inner.config).layers)
    ):
        return 0
    first = int((labels != IGNORED).any(0).int().argmax())
    shared = min(int((ids == ids[:1]).all(0).cumprod(0).sum()), first - 1)
    return shared if shared >= LEAST_SHARED else 0
