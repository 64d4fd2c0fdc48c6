"""What `sqlenv train` and `sqlenv warmup` do without a flag, where that is not TRL's default: one place, with reasons.

A flag or a key of `--config` always wins, and some defaults follow from what was given: who sets the number of epochs
gets no number of steps beside it. Pure, the look at the machine apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inference.launch.plan import PORT
from inference.precision import Precision, measure_precision
from trainer.rollout.rewards import REWARD_FUNCTIONS

EPISODES_PER_STEP = 64
"""Eight questions with eight episodes each: enough groups with both rights and wrongs in them, on any machine."""
WARMUP_EPISODES_PER_STEP = 16
"""Of supervised play; measured to teach a model of 135 million parameters the moves in 29 steps."""
MICRO_BATCH = 8
"""TRL's own: rows that one forward pass takes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank of this run computes with."""

    gpu: bool = False
    """True for CUDA."""
    cpu: bool = True
    """True when there is no accelerator of any kind."""
    bf16: bool = False
    """True when the hardware computes matrix products in bfloat16, on a CPU: clearly faster than in float32."""
    ranks: int = 1
    measured: Precision | None = None
    """Of a CPU, what that was told from."""

    @classmethod
    def here(cls, use_cpu: bool = False, width: int | None = None) -> Machine:
        """This process's; `use_cpu` leaves its accelerators alone. `width`: of the policy's hidden states."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if use_cpu or not torch.accelerator.is_available():
            measured = measure_precision(width)
            return cls(bf16=measured.dtype == "bfloat16", ranks=ranks, measured=measured)
        gpu = torch.cuda.is_available()
        return cls(gpu, False, not gpu or torch.cuda.is_bf16_supported(including_emulation=False), ranks)


def trains_adapter(given: Mapping[str, Any], machine: Machine) -> bool:
    """Whether LoRA is used, or all weights are trained; the same for `train` and `warmup`."""
    # On a GPU, an adapter trains about as well as all weights, in a quarter of the memory.
    return _switch(given.get("use_peft"), machine.gpu)


def machine_defaults(given: Mapping[str, Any], machine: Machine, lora: bool) -> dict[str, Any]:
    """Where to compute and in which precision; the same for `train` and `warmup`."""
    # A wait of the ranks is as long as the slowest one's work, such as curating a large data set; half an hour, the
    # usual bound, would end a run that is well. A rank that is gone is noticed by its broken connection.
    chosen: dict[str, Any] = {"ddp_timeout": 6 * 3_600}
    if machine.cpu:
        # TRL refuses to start without a GPU unless it is told that none is wanted.
        chosen["use_cpu"] = True
    if not given.get("fp16") and "bf16" not in given:
        # Autocast halves the memory of activations and is several times faster where the hardware is made for
        # bfloat16; elsewhere it is slower than float32. A T4 has float16 alone.
        chosen["bf16"] = machine.bf16
        if machine.gpu and not machine.bf16 and "fp16" not in given:
            chosen["fp16"] = True
    if machine.gpu and (lora or _quantised(given)):
        # The frozen base needs no more digits than autocast computes with. Weights that are trained stay in float32:
        # bfloat16 has eight bits, and rounds an update by a millionth away.
        chosen["dtype"] = "bfloat16" if machine.bf16 else "float16"
    return chosen


def adapter_defaults() -> dict[str, Any]:
    """LoRA's, when it is used."""
    return {
        # On every linear layer: attention alone learns less at any rank ("LoRA Without Regret", 2025).
        "lora_target_modules": "all-linear",
        # The logprobs of a step are computed again in training mode: with dropout, they would not be those that were
        # sampled under.
        "lora_dropout": 0.0,
    }


def train_defaults(given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """The defaults of `sqlenv train` for what was given."""
    lora = trains_adapter(given, machine)
    chosen = {
        **machine_defaults(given, machine, lora),
        **adapter_defaults(),
        "use_peft": lora,
        # Dropout of the base model would do to the logprobs what an adapter's does.
        "disable_dropout": True,
        # What the field trains small models with; an adapter wants ten times as much.
        "learning_rate": 1e-5 if lora else 1e-6,
        # The end of a run is not known to be one: a rate that falls to nothing makes longer runs incomparable.
        "lr_scheduler_type": "constant_with_warmup",
        # Adam's estimates are poor in its first steps; as a share, so that a run of a few steps gets to its rate.
        "warmup_steps": 0.05,
        # The whole episode: fifteen turns with their observations, of which 512 tokens hold two or three.
        "max_completion_length": 4096,
        # See `rewards.bound_without_answer` for why not 1 each.
        "reward_weights": [reward.weight for reward in REWARD_FUNCTIONS],
        # Scaled by its own spread, a group that is all wrong or all right counts as much for its noise in the smaller
        # rewards as a group that correctness divides counts for its answers: 42% of the
        # gradient's weight in the demo's first five steps.
        "scale_rewards": "batch",
        # transformers wants evaluation batches to fill with these; each question is played once (`evaluating`).
        "num_generations_eval": 1,
        # One push, of the policy when it is trained; see `trainer.export.hub`.
        "hub_strategy": "end",
        # Servers are the only way here.
        "vllm_mode": "server",
        # TRL's is that of environment servers here.
        "vllm_server_port": PORT,
        # TRL's default masks a whole sequence whose ratio is large, and so silently drops the long episodes.
        "vllm_importance_sampling_mode": "token_truncate",
        # A step takes from seconds to minutes; each is worth a line.
        "logging_steps": 1,
        # Something to go on from when a machine is taken away, without filling the disk.
        "save_steps": 50,
        "save_total_limit": 2,
        # A bare run ends: a few hundred updates are where small models have learnt most of what they will.
        "max_steps": -1 if "num_train_epochs" in given else 200,
    }
    if not given.keys() & {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation"}:
        # Whoever lowers the micro-batch, to save memory, still gets the same step.
        rows = int(given.get("per_device_train_batch_size", MICRO_BATCH)) * machine.ranks
        chosen["gradient_accumulation_steps"] = max(1, EPISODES_PER_STEP // max(1, rows))
    return chosen


def warmup_defaults(given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """The defaults of `sqlenv warmup` for what was given."""
    lora = trains_adapter(given, machine)
    chosen = {
        **machine_defaults(given, machine, lora),
        **adapter_defaults(),
        "use_peft": lora,
        # A few hundred episodes are a few dozen steps: small models need large ones, and an adapter larger ones still.
        "learning_rate": 3e-4 if lora else 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        # One pass: episodes on the same databases resemble each other.
        "num_train_epochs": 1.0,
        # Rows of like length side by side need little padding. More of them share more, and take more memory: the
        # longest episodes of a data set come together.
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "group_by_length",
        # As many tokens as the model's context has; TRL's own 1,024 are a short episode.
        "max_length": None,
        # It saves a GPU's memory at the price of a third more work, which a CPU feels more than the memory.
        "gradient_checkpointing": not machine.cpu,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    if not given.keys() & {"gradient_accumulation_steps", "auto_find_batch_size"}:
        rows = int(given.get("per_device_train_batch_size", chosen["per_device_train_batch_size"])) * machine.ranks
        chosen["gradient_accumulation_steps"] = max(1, WARMUP_EPISODES_PER_STEP // max(1, rows))
    return chosen


def _switch(value: Any, default: bool) -> bool:
    return default if value is None else bool(value)


def _quantised(given: Mapping[str, Any]) -> bool:
    return bool(given.get("load_in_4bit") or given.get("load_in_8bit"))
