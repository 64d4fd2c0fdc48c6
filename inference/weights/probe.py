"""Compare the trainer's own logprobs with a server's.

`gap` is pure; the forward pass is in `token_logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from inference.hf.engine import evaluating
from inference.weights.gather import reshard
from inference.weights.transport import WeightSyncError


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a server's logprobs (theirs) are from the trainer's (ours), in nats."""

    ours: tuple[float, ...]
    differences: tuple[float, ...]
    """Theirs minus ours, token by token."""

    @property
    def rms(self) -> float:
        """The root mean square."""
        return math.sqrt(math.fsum(value * value for value in self.differences) / len(self.differences))

    def __str__(self) -> str:
        at = max(range(len(self.differences)), key=lambda index: abs(self.differences[index]))
        ours, theirs = self.ours[at], self.ours[at] + self.differences[at]
        return (
            f"logprobs differ by {abs(theirs - ours):.3g} at token {at} (trainer {ours:.4f}, server {theirs:.4f}) and "
            f"by {self.rms:.3g} in the root mean square"
        )


def gap(ours: Sequence[float], theirs: Sequence[float]) -> Gap:
    """Return how far apart they are. Raises WeightSyncError when they cannot be compared, or are not finite."""
    if len(ours) != len(theirs) or not ours:
        raise WeightSyncError(f"the trainer has logprobs for {len(ours)} tokens and the server for {len(theirs)}")
    for whose, values in (("trainer", ours), ("server", theirs)):
        broken = [at for at, value in enumerate(values) if not math.isfinite(value)]
        if broken:
            raise WeightSyncError(
                f"the {whose}'s logprob is {values[broken[0]]} at token {broken[0]} ({len(broken)} of {len(values)})"
            )
    return Gap(tuple(ours), tuple(b - a for a, b in zip(ours, theirs, strict=True)))


def token_logprobs(
    model: nn.Module,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    temperature: float = 1.0,
    *,
    autocast: bool = True,
) -> Tensor:
    """Return the model's own logprobs of `token_ids` after `prompt_ids`, under softmax(logits / temperature).

    Shape (tokens,), float32, with gradients where they are enabled. Temperature 0 counts as 1, as in `Completion`. One
    forward pass in eval mode; every module has its former mode afterwards. Under FSDP every process calls. `autocast`
    False leaves out the autocast that accelerate has put around the model.
    """
    if not prompt_ids or not token_ids:
        raise ValueError("a probe needs a prompt and at least one token after it")
    inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    device = next(inner.parameters()).device
    ids = torch.tensor([[*prompt_ids, *token_ids]], device=device)
    # Accelerate keeps beside a model what it put its autocast around.
    forward = inner if autocast else getattr(inner, "_original_forward", inner)
    with evaluating(inner):
        # The last position's logits predict what comes after the tokens.
        logits = forward(input_ids=ids, use_cache=False, logits_to_keep=len(token_ids) + 1).logits[0, :-1].float()
    if not torch.is_grad_enabled():
        reshard(inner)
    logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    return logprobs.gather(1, ids[0, len(prompt_ids) :, None].to(logprobs.device))[:, 0]
