"""The rows of `benchmarks/gpu.py`: what is measured, with which commands, and what each needs of a machine. Pure.

Every row is there on every machine, so that two walks can be laid side by side; `lacking` says why one cannot run.
Flags depend on the machine: on one GPU a server leaves the trainer most of the memory, on a CPU there is none to share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import yaml

from benchmarks.server_process import ROOT
from inference.launch.plan import Device

TINY = "trainer/tiny/base"
MODEL = "Qwen/Qwen3-0.6B"
SYNCS = ("disk", "lora", "nccl")
DTYPES = ("float32", "bfloat16")
CONTEXT = 4_096
"""Of an episode, in tokens; Qwen3's own 40,960 do not fit beside a trainer."""
CARD = 0.93
"""A card that is sold with 24 GB shows 22.5 to 24 GiB."""
BFLOAT16_SINCE = 8.0
"""Compute capability."""
DRIVER = 580
"""The oldest for CUDA 13, for which the pinned torch and vLLM are built."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here: GPUs by their names, with GiB of the smallest; vLLM's build; vLLM beside the trainer."""

    gpus: tuple[str, ...] = ()
    gib: float = 0.0
    capability: float = 0.0
    driver: int = 0
    vllm: str = ""
    vllm_here: bool = False
    bitsandbytes: bool = False
    visible: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES calls the GPUs."""

    @property
    def second_gpu(self) -> str:
        """What CUDA_VISIBLE_DEVICES calls the one that a trainer does not use."""
        return self.visible[1] if len(self.visible) > 1 else "1"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a row cannot do without."""

    gpus: int = 0
    gib: float = 0.0
    vllm: bool = False
    vllm_here: bool = False
    bfloat16: bool = False
    bitsandbytes: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a Python module of ours and its arguments, which prints one JSON line at its end."""

    name: str
    command: tuple[str, ...]
    needs: Needs = Needs()


def lacking(needs: Needs, machine: Machine) -> str:
    """Say what the machine lacks for a row, "" where it lacks nothing."""
    if len(machine.gpus) < needs.gpus:
        return "needs a second GPU" if machine.gpus else "needs a GPU" if needs.gpus == 1 else "needs two GPUs"
    if machine.gpus and 0 < machine.driver < DRIVER:
        return f"needs driver {DRIVER} or newer, and this is {machine.driver}"
    if needs.gpus and machine.gib < CARD * needs.gib:
        return f"needs {needs.gib:g} GiB, and the GPU has {machine.gib:.1f}"
    if needs.gpus and needs.bfloat16 and machine.capability < BFLOAT16_SINCE:
        return "needs a GPU with bfloat16"
    if (needs.vllm or needs.vllm_here) and not machine.vllm:
        return "needs vLLM"
    if needs.vllm and machine.gpus and machine.vllm != Device.CUDA:
        return "needs vLLM for CUDA"
    if needs.vllm_here and not machine.vllm_here:
        return "needs vLLM beside the trainer"
    if needs.bitsandbytes and not machine.bitsandbytes:
        return "needs bitsandbytes"
    return ""


def all_rows(machine: Machine, model: str, small_model: str | None) -> list[Row]:
    """Return every row, those that cannot run here too; the tiny policy's first, which show soon what works."""
    policies = [("tiny", TINY, Needs())]
    policies += [("small", small_model, Needs())] if small_model else []
    policies += [("model", model, Needs(gpus=1, gib=16))]
    rows = [row for policy in policies for row in _policy_rows(machine, *policy)]
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    rows += [row for path in configs for row in _config_rows(path, small_model)]
    return sorted(rows, key=lambda row: "tiny" not in row.name.split("/"))


def _policy_rows(machine: Machine, label: str, policy: str, needs: Needs) -> Iterable[Row]:
    concurrency = ("16", "64") if machine.gpus else ("16",)
    play = ("benchmarks.engines", "--policy", policy, "--rounds", "3", "--context", str(CONTEXT))
    shared = f"--share_gpu --max_model_len {CONTEXT}" if machine.gpus else ""
    yield Row(f"{label}/rollouts/hf", (*play, "--engines", "hf", "--concurrency", *concurrency), needs)
    flags = (f"--inference_flags={shared}", "--concurrency", *concurrency)
    yield Row(f"{label}/rollouts/vllm", (*play, "--engines", "vllm", *flags), replace(needs, vllm=True))
    for sync in SYNCS:
        for dtype in DTYPES:
            push = ("benchmarks.weight_sync", "--policy", policy, "--transports", sync, "--dtype", dtype)
            apart = sync == "nccl"
            gpus = 2 if apart else 0
            own = f"--max_model_len {CONTEXT}" if machine.gpus else ""
            where = (f"--server_gpu={machine.second_gpu}",) if apart else ()
            yield Row(
                f"{label}/push/{sync}/{dtype}",
                (*push, "--rounds", "5", f"--inference_flags={own if apart else shared}", *where),
                replace(
                    needs,
                    gpus=max(needs.gpus, gpus),
                    gib=max(needs.gib, 24) if needs.gib and dtype == "float32" else needs.gib,
                    vllm=True,
                    vllm_here=gpus > 0,
                    bfloat16=dtype == "bfloat16",
                ),
            )


def _config_rows(path: Path, small_model: str | None) -> Iterable[Row]:
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    if "stages" in config:
        return  # two steps of it are those of another config
    size = re.search(r"(\d+) GiB", text)
    on_cpu = bool(config.get("use_cpu"))
    needs = Needs() if on_cpu else Needs(gpus=1, gib=float(size[1]) if size else 0.0)
    served = bool(config.get("use_vllm"))
    needs = replace(
        needs,
        vllm=served,
        vllm_here=config.get("weight_sync") == "nccl",
        bfloat16=bool(config.get("bf16")),
        bitsandbytes=bool(config.get("load_in_4bit")),
    )
    command: tuple[str, ...] = ("benchmarks.two_steps", str(path.relative_to(ROOT)))
    if path.stem == "smollm2":
        needs = needs if small_model else replace(needs, gpus=1)  # two CPU cores train it for minutes
        command += ("--model", small_model) if small_model else ()
    yield Row(f"steps/{path.stem}", command, needs)
    if path.stem in ("tiny", "small-gpu"):
        more = replace(needs, vllm=True, gib=24 if needs.gpus else 0)
        yield Row(f"steps/{path.stem}/vllm", (*command, "--use_vllm"), more)


def chosen(rows: Sequence[Row], only: Sequence[str]) -> list[Row]:
    """Return the rows that a name, a beginning of one or a pattern asks for; all without any."""
    return [
        row
        for row in rows
        if not only or any(fnmatch(row.name, each) or row.name.startswith(f"{each.rstrip('/')}/") for each in only)
    ]


def gpus_of(text: str, visible: str | None) -> Machine:
    """Read what nvidia-smi says, as far as CUDA_VISIBLE_DEVICES shows it."""
    lines = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    names = [str(number) for number in range(len(lines))]
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")][: len(lines)]
        lines = [lines[int(name)] if name.isdigit() and int(name) < len(lines) else lines[0] for name in names]
    if not lines:
        return Machine()
    return Machine(
        gpus=tuple(line[0] for line in lines),
        gib=round(min(float(line[1]) for line in lines) / 1_024, 1),
        capability=min(float(line[2]) for line in lines),
        driver=int(lines[0][3].partition(".")[0]),
        visible=tuple(names),
    )
