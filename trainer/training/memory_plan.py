"""What a run's flags ask of the memory of its device, and the least change with which it fits.

`memory` estimates; this module knows the device, turns flags into what is estimated, and shows it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import torch
from rich.table import Table
from transformers import PretrainedConfig
from trl import GRPOConfig, ModelConfig

from inference.launch.plan import SHARED_GPU, WeightSyncMode
from trainer.config import SQLEnvArguments
from trainer.engines import server_urls
from trainer.training.memory import GIB, Estimate, Load, ModelShape, estimate
from trainer.training.out_of_memory import smaller_batch

TWO_BYTES = ("bfloat16", "float16", "half")


@dataclass(frozen=True, slots=True)
class Device:
    """What the trainer runs on."""

    name: str
    bytes: float
    on_gpu: bool


def device_of(arguments: SQLEnvArguments, grpo: GRPOConfig) -> Device:
    """What the run would train on: the GPU that was asked for, the one that is here, or this machine's memory."""
    if arguments.dry_run_gpu:
        return Device(f"a GPU with {arguments.dry_run_gpu:g} GiB", arguments.dry_run_gpu * GIB, on_gpu=True)
    if torch.cuda.is_available() and not grpo.use_cpu:
        properties = torch.cuda.get_device_properties(grpo.device)
        return Device(properties.name, properties.total_memory, on_gpu=True)
    return Device("this machine", _main_memory(), on_gpu=False)


def load_of(
    arguments: SQLEnvArguments,
    grpo: GRPOConfig,
    model_config: ModelConfig,
    config: PretrainedConfig,
    device: Device,
    adapted: bool,
    prompt: int,
    width: int,
) -> Load:
    """What the flags ask of the device; `prompt` and `width`, of a whole row, are in tokens."""
    dtype = model_config.dtype if model_config.dtype not in (None, "auto") else str(config.dtype or "float32")
    batch = grpo.per_device_train_batch_size * grpo.steps_per_generation
    evaluated = arguments.eval_episodes if arguments.eval_episodes >= 0 else arguments.max_concurrency
    url = urlsplit(server_urls(grpo)[0])
    shares = grpo.use_vllm and (
        arguments.weight_sync == WeightSyncMode.IPC.value
        or (not arguments.dry_run_gpu and torch.cuda.device_count() == 1 and url.hostname in ("127.0.0.1", "localhost"))
    )
    return Load(
        rows=grpo.per_device_train_batch_size,
        prompt=prompt,
        completion=width - prompt,
        weight_bytes=2 if dtype.removeprefix("torch.") in TWO_BYTES else 4,
        quantized_bits=bits_of(model_config),
        autocast=grpo.bf16 or grpo.fp16,
        gradient_checkpointing=grpo.gradient_checkpointing,
        optimizer=grpo.optim.value,
        generating=0 if grpo.use_vllm else min(arguments.max_concurrency, max(batch, evaluated)),
        reference=grpo.beta != 0 and not adapted,
        on_gpu=device.on_gpu,
        server_bytes=SHARED_GPU * device.bytes if shares and device.on_gpu else 0.0,
    )


def remedy(shape: ModelShape, load: Load, there: float, grpo: GRPOConfig) -> str:
    """The least change with which the estimate fits."""
    episodes = _halvings(load.generating) if load.generating else [0]
    for checkpointing in (load.gradient_checkpointing, True):
        for rows in _halvings(load.rows):
            for generating in episodes:
                smaller = replace(load, rows=rows, gradient_checkpointing=checkpointing, generating=generating)
                if estimate(shape, smaller).total > there:
                    continue
                flags = [] if checkpointing == load.gradient_checkpointing else ["--gradient_checkpointing true"]
                if generating < load.generating:
                    flags.append(f"--max_concurrency {generating}")
                if rows < load.rows:
                    flags.append(smaller_batch(grpo, rows))
                return f"{' '.join(flags)} fits"
    ways = [] if shape.adapted else ["--use_peft true (LoRA)"]
    ways += [] if load.quantized_bits else ["--load_in_4bit true"]
    return f"even one row at a time does not fit; take {', '.join([*ways, 'shorter episodes or a smaller model'])}"


def _halvings(number: int) -> list[int]:
    """The number, half of it, and so on down to 1."""
    return [number >> shift for shift in range(number.bit_length())]


def bits_of(model_config: ModelConfig) -> int | None:
    """Bits of a quantised weight."""
    return 4 if model_config.load_in_4bit else 8 if model_config.load_in_8bit else None


def memory_table(memory: Estimate, device: Device) -> Table:
    """The estimate, part by part."""
    table = Table(title=f"memory on {device.name}, estimated for the longest rows", title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("how", overflow="fold")
    for title, parts in (("", memory.standing), ("training", memory.training), ("generation", memory.generation)):
        if title and memory.generation:
            table.add_section()
        for part in parts:
            table.add_row(part.name, f"{part.bytes / GIB:.2f}", part.how)
    table.add_section()
    if memory.server:
        table.add_row("vLLM server", f"{memory.server / GIB:.2f}", f"its share of this GPU, {SHARED_GPU:.0%}")
    how = "with what the allocator cannot use"
    if memory.generation:
        how += "; training and generation take turns"
    table.add_row("in all", f"{memory.total / GIB:.2f}", how)
    return table


def _main_memory() -> float:
    """Bytes of memory that this process may use."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return float(min(there, int(text)) if text.isdigit() else there)
