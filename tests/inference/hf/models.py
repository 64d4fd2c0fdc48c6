"""Tiny random models of several architectures, for the tests of decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, STOP, PAD = 97, 1, 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
}


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def build(architecture: Callable[[], PreTrainedModel] = qwen3) -> PreTrainedModel:
    torch.manual_seed(7)
    model = architecture().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than the default init: a wrong position or mask shows
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model
