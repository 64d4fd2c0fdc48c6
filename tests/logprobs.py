"""A model's own logprobs, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from inference.weights.check import token_logprobs


def logprobs_of(
    model: nn.Module, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """The logprobs of the tokens after the prompt, as `token_logprobs` computes them."""
    with torch.no_grad():
        found: list[float] = token_logprobs(model, prompt_ids, token_ids, temperature).tolist()
    return found
