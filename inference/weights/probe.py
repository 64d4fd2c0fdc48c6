"""Compare the trainer's own logprobs with a server's, to prove that the server holds the trainer's weights.

`compare` decides and is pure; the one forward pass is in `logprobs_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from inference.hf import evaluating
from inference.weights.gather import reshard


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logprobs of the same weights may lie apart; None is no limit."""

    largest: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """Return the tolerance for a policy computed in `dtype`.

        In float32 two implementations differ by rounding: 5e-4 is two orders of magnitude above what is seen on a
        CPU. In half precision single tokens may lie far apart, so the mean is bounded, by 0.1; that figure is not
        measured on a GPU.
        """
        if dtype in (torch.float16, torch.bfloat16):
            return cls(mean=0.1)
        return cls(largest=5e-4)


def compare(ours: Sequence[float], theirs: Sequence[float], tolerance: Tolerance) -> str:
    """Return "" when the server's logprobs are the trainer's within the tolerance, else a sentence that says why."""
    if len(ours) != len(theirs) or not ours:
        return f"the trainer has logprobs for {len(ours)} tokens and the server for {len(theirs)}"
    for whose, values in (("trainer", ours), ("server", theirs)):
        broken = [at for at, value in enumerate(values) if not math.isfinite(value)]
        if broken:
            return f"the {whose}'s logprob is {values[broken[0]]} at token {broken[0]} ({len(broken)} of {len(values)})"
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    largest, mean = max(differences), math.fsum(differences) / len(differences)
    limits = [(largest, tolerance.largest, "at most"), (mean, tolerance.mean, "a mean of at most")]
    exceeded = [(limit, word) for value, limit, word in limits if limit is not None and value > limit]
    if not exceeded:
        return ""
    limit, word = exceeded[0]
    at = differences.index(largest)
    beyond = sum(difference > limit for difference in differences)
    return (
        f"logprobs differ by {largest:.3g} at token {at} (trainer {ours[at]:.4f}, server {theirs[at]:.4f}) and by "
        f"{mean:.3g} on average, where {word} {limit:g} is allowed; {beyond} of {len(ours)} tokens are beyond that"
    )


def logprobs_of(
    model: nn.Module, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Return the model's own logprobs of `token_ids` after `prompt_ids`, under softmax(logits / temperature).

    Temperature 0 counts as 1, as in `Completion`. One forward pass in eval mode; every module has its former mode
    afterwards. Under FSDP every process calls.
    """
    if not prompt_ids or not token_ids:
        raise ValueError("a probe needs a prompt and at least one token after it")
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(inner.parameters()).device
    ids = torch.tensor([[*prompt_ids, *token_ids]], device=device)
    with evaluating(inner), torch.no_grad():
        # The last position's logits predict what comes after the tokens.
        logits = inner(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids) + 1).logits[0, :-1].float()
        reshard(inner)
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        tokens = ids[0, len(prompt_ids) :, None].to(logprobs.device)
        chosen: list[float] = logprobs.gather(1, tokens)[:, 0].tolist()
    return chosen
