"""A policy's model and tokenizer, loaded: to be played, exported or trained.

What a name stands for is `trainer.policy.resolve_policy`'s to say. An adapter is loaded beside its base and not merged
into it: that is the computation that trained it, and the one that vLLM makes. Merging rounds the sum to the dtype of
the base, which in bfloat16 is another policy.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import GRPOConfig, ModelConfig, SFTConfig
from trl.trainer.utils import create_model_from_path

from inference.adapters import NamedPolicy, width_of
from inference.missing import hint
from inference.precision import measure_precision
from inference.weight_files import WeightFileError, check_weights
from trainer.policy import PolicyError, resolve_policy

ADAPTER_NAME = "default"
"""What PEFT and TRL call the adapter that is trained."""


def init_kwargs(model_config: ModelConfig, config: GRPOConfig | SFTConfig) -> dict[str, Any]:
    """What `from_pretrained` is told of the policy that is trained, quantisation apart; `--model_init_kwargs` win."""
    return {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
        "trust_remote_code": config.trust_remote_code,
        **(config.model_init_kwargs or {}),
    }


def load_tokenizer(model_config: ModelConfig, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer: an adapter's own where it has one, else its base's. Raises PolicyError."""
    policy = resolve_policy(str(model_config.model_name_or_path), model_config.model_revision)
    with _loading(policy):
        return tokenizer_of(policy, trust_remote_code=trust_remote_code)


def load_policy(
    name: str,
    revision: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer; an adapter comes as a PeftModel, beside its base.

    `device` is the GPU by default, where there is one. `dtype` is that of the base, by default bfloat16 on a GPU and
    the faster of bfloat16 and float32 on a CPU, of which `say` gets a line. Raises PolicyError.
    """
    policy = resolve_policy(name, revision)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is None and device == "cpu":
        measured = measure_precision(width_of(policy.base))
        dtype = getattr(torch, measured.dtype)
        say(f"--dtype {measured.dtype}: {measured}")
    dtype = dtype or torch.bfloat16
    with _loading(policy):
        tokenizer = tokenizer_of(policy, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            policy.base.location, revision=policy.base.revision, dtype=dtype, trust_remote_code=trust_remote_code
        )
        if policy.adapter is not None:
            model = _adapted(model, policy, is_trainable=False)
    return model.to(device), tokenizer


def base_config(policy: NamedPolicy, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the configuration of the checkpoint, or of an adapter's base. Raises PolicyError."""
    place = policy.base
    with _loading(policy):
        return AutoConfig.from_pretrained(place.location, revision=place.revision, trust_remote_code=trust_remote_code)


def load_base(
    policy: NamedPolicy, config: GRPOConfig | SFTConfig, quantization: BitsAndBytesConfig | None = None
) -> PreTrainedModel:
    """Load a checkpoint, or an adapter's base, as TRL would by its name. Raises PolicyError.

    Takes `config.model_init_kwargs` away: TRL would say that it ignores them beside a model that is there.
    """
    given = {**(config.model_init_kwargs or {}), "revision": policy.base.revision}
    config.model_init_kwargs = None
    if quantization is not None:
        given["quantization_config"] = quantization
    if config.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        given["device_map"] = None  # each rank has a whole model, or a part that is not by layers
    with _loading(policy):
        return create_model_from_path(policy.base.location, **given)


def load_to_continue(
    policy: NamedPolicy,
    config: GRPOConfig | SFTConfig,
    quantization: BitsAndBytesConfig | None = None,
    *,
    lora_dropout: float,
) -> PeftModel:
    """Load an adapter on its base, to go on training it. Raises PolicyError.

    It alone is saved: TRL keeps a copy of it beside it, "ref", for a KL term, and with that in a checkpoint,
    transformers would restore the copy alone, and go on from the adapter as it was at the start.
    """
    base = load_base(policy, config, quantization)
    with _loading(policy):
        model = _adapted(base, policy, is_trainable=True, lora_dropout=lora_dropout)
    model.save_pretrained = partial(model.save_pretrained, selected_adapters=[ADAPTER_NAME])
    return model


def tokenizer_of(policy: NamedPolicy, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer. Raises what transformers raises."""
    place = policy.tokenizer
    return AutoTokenizer.from_pretrained(place.location, revision=place.revision, trust_remote_code=trust_remote_code)


def _adapted(base: PreTrainedModel, policy: NamedPolicy, *, is_trainable: bool, lora_dropout: float = 0.0) -> PeftModel:
    assert policy.adapter is not None
    place = policy.adapter.ref
    config = LoraConfig.from_pretrained(place.location, revision=place.revision)
    config.lora_dropout = lora_dropout
    return PeftModel.from_pretrained(
        base, place.location, ADAPTER_NAME, is_trainable=is_trainable, config=config, revision=place.revision
    )


@contextmanager
def _loading(policy: NamedPolicy) -> Iterator[None]:
    """Raise what goes wrong in loading as one line."""
    try:
        for place in {policy.base, policy.ref}:
            if Path(place.location).is_dir():
                check_weights(Path(place.location))
        yield
    except (WeightFileError, pickle.UnpicklingError) as error:
        text = str(error) if isinstance(error, WeightFileError) else "its weights are no pickle of tensors"
        adapter = f", an adapter on {policy.base.location!r}," if policy.adapter is not None else ""
        raise PolicyError(f"the policy {policy.name!r}{adapter} cannot be loaded: {text}") from error
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())
        if policy.adapter is not None:
            remedy = "" if Path(policy.base.location).is_dir() else f" ({policy.adapter.remedy})"
            raise PolicyError(
                f"the policy {policy.name!r}, an adapter on {policy.base.location!r}, cannot be loaded: {text}{remedy}"
            ) from error
        where = "is not a checkpoint"
        if not Path(policy.name).is_dir():
            where = f"is no folder here, and no model on the Hub{hint(policy.name)}"
        raise PolicyError(f"the policy {policy.name!r} {where}: {text}") from error


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def repair_generation_settings(model: nn.Module) -> str | None:
    """Change what transformers would not save; returns a sentence on it, None where nothing is.

    Settings of sampling without `do_sample` get it; where that is not enough, the special tokens alone are left.
    """
    if isinstance(model, PeftModel):
        model = model.get_base_model()
    config = getattr(model, "generation_config", None)
    if config is None or not _refusal(config):
        return None
    repaired, change = copy.deepcopy(config), "do_sample is set to true"
    repaired.do_sample = True
    if config.do_sample is False or config.temperature == 0 or _refusal(repaired):
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
