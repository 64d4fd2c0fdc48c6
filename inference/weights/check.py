"""What shows that the servers generate with the trainer's weights.

1. **Every tensor arrives.** The first push puts one number in the place of every weight, over the same path as every
   other: whatever a server then computes with that is not that number, its transport left behind, and is named
   (`in_vllm`). An adapter is checked by the modules that it reached instead. Exact, for every tensor of every
   tensor-parallel rank.
2. **The values are right.** After each push a server generates a few tokens, and its logprobs of them are compared with
   the trainer's own. How far two implementations of one policy are apart depends on the model and its dtype, so later
   gaps are measured by the first: a warning at GROWTH times that (`strict`: an error), an error beyond LARGEST_GAP and
   where something is not finite.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from inference.hf.engine import evaluating
from inference.vllm.api import ReplicaError, VLLMServer
from inference.weights.gather import reshard
from inference.weights.transport import CONSTANT, WeightSyncError

logger = logging.getLogger(__name__)

PROBE_TOKENS = 32
"""That a server generates after each push."""
PROBE_TEMPERATURE = 2.0
"""A trained policy is sure of most of its tokens, and those show no change of the weights; at this one they do."""
GROWTH = 5.0
"""How many times the first push's gap counts as noise: it is the root mean square of few tokens, some of which stand
out."""
FIRST_BOUND = 0.25
"""For the first push's gap, in nats; bfloat16 on both sides gives 0.02 to 0.1."""
HARMLESS = 1e-3
"""A gap, in nats, that changes no importance ratio by more than a thousandth; never worth a warning."""
LARGEST_GAP = 1.0
"""In nats: importance ratios of e and more."""

MOST_NAMED = 3
_EXPECT = "sqlenv_expect_constant"

Logprobs = Callable[[tuple[int, ...], tuple[int, ...], float], Tensor]
"""The trainer's logprobs of tokens after a prompt, at a temperature; shape (tokens,), as it computes them for the
loss."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server generated after the probe."""

    url: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the root mean square, in nats, of how far a server's logprobs are from the trainer's.

    Raises WeightSyncError when they cannot be compared, or are not finite.
    """
    if len(ours) != len(theirs) or not ours:
        raise WeightSyncError(f"the trainer has logprobs for {len(ours)} tokens and the server for {len(theirs)}")
    for whose, values in (("trainer", ours), ("server", theirs)):
        broken = [at for at, value in enumerate(values) if not math.isfinite(value)]
        if broken:
            raise WeightSyncError(
                f"the {whose}'s logprob is {values[broken[0]]} at token {broken[0]} ({len(broken)} of {len(values)})"
            )
    return math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True)) / len(ours))


async def expect_constant(server: VLLMServer, deadline_s: float) -> None:
    """Announce CONSTANT: unless other weights follow within the deadline, the server ends. Raises EngineError."""
    try:
        await server.call_workers(_EXPECT, constant=CONSTANT, deadline_s=deadline_s)
    except ReplicaError as error:
        if _EXPECT not in str(error):
            raise
        raise WeightSyncError(f"{error}; start the server with `sqlenv inference`") from error


async def left_behind(server: VLLMServer) -> list[str]:
    """Return what is not CONSTANT in a server, by vLLM's names, a few at most. Raises EngineError."""
    found = sorted({name for worker in await server.call_workers("sqlenv_missing_weights") for name in worker})
    return found if len(found) <= MOST_NAMED else [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more"]


class GapMonitor:
    """Judges each push's gap by the first one's."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._bound = FIRST_BOUND
        self._is_first = True

    def judge(self, found: float) -> None:
        """Log a warning, or raise WeightSyncError, when a gap is too large."""
        if found > LARGEST_GAP:
            raise WeightSyncError(f"logprobs differ by {found:.3g} nats (root mean square), {LARGEST_GAP:g} at most")
        if found > self._bound:
            text = f"logprobs differ by {found:.3g} nats (root mean square), where up to {self._bound:.3g} is noise"
            if self._strict:
                raise WeightSyncError(text)
            logger.warning(
                "after this weight push %s: trainer and server may drift apart (--weight_sync_check strict stops here)",
                text,
            )
        if self._is_first:
            self._is_first, self._bound = False, max(HARMLESS, GROWTH * found)


def token_logprobs(
    model: nn.Module, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Return the model's own logprobs of `token_ids` after `prompt_ids`, under softmax(logits / temperature).

    Shape (tokens,), float32, without gradients. Temperature 0 counts as 1, as in `Completion`. One forward pass in eval
    mode; every module has its former mode afterwards. Under FSDP and ZeRO-3 every process calls.
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
    return logprobs.gather(1, ids[0, len(prompt_ids) :, None].to(logprobs.device))[:, 0]
