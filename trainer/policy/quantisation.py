"""Policies whose weights have few bits, with an adapter that is trained beside them (QLoRA, Dettmers et al., 2023).

`--load_in_4bit` and `--load_in_8bit` are bitsandbytes' work, on a GPU or a CPU; what is here makes it fit training.
"""

from __future__ import annotations

from torch import nn
from trl import ModelConfig


def keep_gradients(model: nn.Module, model_config: ModelConfig) -> None:
    """Keep gradients through weights of 4 bits right on a CPU.

    There, bitsandbytes packs a layer anew when it first runs in evaluation mode, as it does in each rollout, for a
    kernel that has no gradient, and never unpacks it: what is trained afterwards would get wrong gradients, with a mere
    warning.
    """
    if not model_config.load_in_4bit:
        return
    from bitsandbytes.nn import Linear4bit  # it is installed only with the extra

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.support_avx512bf16_for_cpu = False
