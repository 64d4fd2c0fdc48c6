"""How much memory training needs, in closed form, where the device that would measure it is not here.

The terms are what TRL 1.16, transformers 5 and torch 2.13 allocate, read in their source. No GPU has confirmed them;
on one, `trainer.training.dry_run` measures instead. An estimate is for the longest rows that a run allows: most steps
need less.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from trl import GRPOConfig, ModelConfig

GIB = 2**30
RUNTIME = GIB
"""Python with its libraries on a CPU; CUDA's context, workspaces and compiled kernels on a GPU."""
FRAGMENTATION = 0.05
"""What torch's allocator holds and cannot use, as a share of what is in use."""
TILE_POSITIONS, TILE_VOCABULARY, CPU_TILES = 4_096, 32_768, 6
"""The largest tile of logits in TRL's fused head; without Triton, its backward pass holds so many in float32."""
QUANTIZED = {4: 0.5 + 4 / 64, 8: 1.0}
"""Bytes of a weight, by its number of bits; 4 bits have a float32 scale per 64 weights (Dettmers et al., 2023)."""
OPTIMIZER_BYTES = {"sgd": 0.0, "adafactor": 0.05, "paged": 0.0, "8bit": 2.06, "bnb": 2.06, "torchao": 2.06}
"""Bytes of state per trained parameter, by a part of the optimizer's name; all others keep two numbers, as Adam.

Adafactor has a row and a column per matrix; a paged one is on the host; 8 bits have a float32 scale per 256.
"""


def optimizer_bytes(name: str, weight_bytes: float) -> float:
    """Bytes of an optimizer's state for each trained parameter of so many bytes."""
    return next((size for part, size in OPTIMIZER_BYTES.items() if part in name), 2.0 * weight_bytes)


def meta_model(config: PretrainedConfig, trust_remote_code: bool | None = None) -> nn.Module:
    """A model with shapes and no storage. Raises ValueError where the config is no causal language model."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model


def estimate(
    config: PretrainedConfig,
    adapter: PeftConfig | None,
    grpo: GRPOConfig,
    model_config: ModelConfig,
    *,
    prompt: int,
    width: int,
    generating: int,
    on_gpu: bool,
) -> dict[str, float]:
    """Bytes by part, for a micro-batch of rows of `width` tokens, `prompt` of them before the completion.

    `generating`: episodes that generate at once in this process, 0 where servers do. Training and generation take
    turns: see `peak`.
    """
    model = meta_model(config, grpo.trust_remote_code)
    parameters, head = sum(p.numel() for p in model.parameters()), model.get_output_embeddings()  # type: ignore[operator]
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
    normed = any(name.endswith("q_norm") for name, _ in model.named_modules())  # queries and keys, as in Qwen3
    if adapter is not None:
        model = get_peft_model(model, adapter)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    text = config.get_text_config(decoder=True)
    hidden, inner, layers, vocabulary = (
        text.hidden_size, text.intermediate_size, text.num_hidden_layers, text.vocab_size
    )  # fmt: skip
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    queries = text.num_attention_heads * head_size
    keys = (getattr(text, "num_key_value_heads", None) or text.num_attention_heads) * head_size

    dtype = str(config.dtype or "float32") if model_config.dtype in (None, "auto") else str(model_config.dtype)
    stored = 2 if dtype.removeprefix("torch.") in ("bfloat16", "float16", "half") else 4
    computed = 2 if grpo.bf16 or grpo.fp16 else stored
    bits = 4 if model_config.load_in_4bit else 8 if model_config.load_in_8bit else None
    full = adapter is None
    learned = stored if full else 4 if bits is None else 2  # adapters are float32, on a quantised base bfloat16
    rows, checkpointing = grpo.per_device_train_batch_size, grpo.gradient_checkpointing

    weights = parameters * stored - (linear * (stored - QUANTIZED[bits]) if bits else 0)
    weights += 0 if full else trained * learned
    weights += parameters * 2 if computed < stored and bits is None else 0  # autocast's copies, while a pass runs
    weights += parameters * stored if grpo.beta != 0 and full else 0  # the reference

    # What one layer keeps per token for its backward pass. A norm keeps its input in float32, the normalised state
    # when its weight is trained, and its output; attention queries, repeated keys and values, its output, and that
    # once more in the next layer's order, and before they are rounded queries and keys; the gated layer both halves,
    # the activated one and the product; adapters a copy of their input. SDPA keeps no matrix of scores.
    layer = 2 * (4 + full * stored + computed) * hidden + 5 * computed * queries + 4 * computed * inner
    layer += (4 + full * computed) * (queries + keys) if normed else 0
    layer += 4 * (queries + keys) if computed < stored else 0
    if not full:
        rounded = grpo.bf16 or grpo.fp16
        layer += computed * 3 * hidden if rounded else (computed < 4) * 4 * (3 * hidden + queries + inner)
    kept = layers * stored * hidden + 2 * layer if checkpointing else layers * layer
    mask = rows * width**2 * (1 + computed)

    completion = rows * (width - prompt)
    tile = min(completion, TILE_POSITIONS) * min(vocabulary, TILE_VOCABULARY)
    logits = tile * (computed + (0 if on_gpu else CPU_TILES * 4)) + completion * hidden * (4 + 2 * computed)

    cache = 2 * layers * keys * stored * generating * width
    forward = stored * 3 * (inner + queries) + 8 * hidden  # one layer over all contexts, since a turn prefills
    choice = 28 * vocabulary  # logits, their softmax and its sum, float32 and float64
    return {
        "runtime": float(RUNTIME),
        "weights": float(weights),
        "gradients": float(trained * learned),
        "optimizer": trained * optimizer_bytes(grpo.optim.value, learned),
        "activations": float(rows * width * (kept + (4 + 2 * stored) * hidden) + mask),
        "logits": float(logits + full * vocabulary * hidden * 4),  # and the head's gradient in float32
        "generation": float(cache + generating * (width * forward + choice)),
    }


def peak(parts: Mapping[str, float]) -> float:
    """Bytes at the peak of an estimate."""
    standing = sum(parts[name] for name in ("runtime", "weights", "gradients", "optimizer"))
    training = parts["activations"] + parts["logits"]
    return (standing + max(training, parts["generation"])) * (1 + FRAGMENTATION)


def main_memory() -> float:
    """Bytes of memory that this process may use."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float(min(there, int(text)) if text.isdigit() else there)
