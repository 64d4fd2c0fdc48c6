"""A policy's `generation_config.json`, made such that the policy can be saved.

Transformers loads settings that contradict each other with a warning, and refuses to save them: a `temperature` without
`do_sample`, which many checkpoints have. Rollouts do not go by these settings; only whoever uses the policy later does.
"""

from __future__ import annotations

import copy
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import GenerationConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def repair_generation_settings(model: nn.Module) -> str | None:
    """Change what transformers would not save, as little as can be; returns a sentence on it, None where nothing is.

    Settings of sampling get `do_sample: true`, unless the file says false or the temperature is 0: then they go.
    Where that is not enough, the special tokens alone are left.
    """
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    config = getattr(model, "generation_config", None)
    if config is None or not _refusal(config):
        return None
    repaired, change = copy.deepcopy(config), ""
    if config.do_sample is None and (config.temperature is None or config.temperature > 0):
        repaired.do_sample, change = True, "do_sample is set to true"
    elif config.do_sample is not True:
        dropped = [name for name in SAMPLING if getattr(config, name) is not None]
        for name in dropped:
            setattr(repaired, name, None)
        change = f"{', '.join(dropped)} {'is' if len(dropped) == 1 else 'are'} left out"
    if _refusal(repaired):
        tokens: dict[str, Any] = {name: getattr(config, name, None) for name in TOKENS}
        kept = {name: value for name, value in tokens.items() if not (isinstance(value, int) and value < 0)}
        repaired, change = GenerationConfig(**kept), "its special tokens alone are kept"
    model.generation_config = repaired
    return f"the policy's generation_config.json could not be saved again with the trained policy; {change}"


def _refusal(config: GenerationConfig) -> str:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return str(error)
    return ""
