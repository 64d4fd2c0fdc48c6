"""What a run needs that the trainer cannot do about: a server that takes its weights, a compiler for its loss. Pure.

Told from what servers and the machine say of themselves; `sqlenv train --dry_run true` asks them. What is missing is a
sentence that names the flag or the package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from env_server.errors import SQLEnvError
from inference.launch.plan import WeightSyncMode

COMPILERS = ("gcc", "clang")
"""What Triton looks for, unless the variable CC names another one."""


class DryRunError(SQLEnvError):
    """The run cannot work; the text holds a sentence for each thing in the way."""


def unprepared(transport: WeightSyncMode, rank: int, settings: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Return what a server lacks for the weights of a run, "" where it lacks nothing.

    `rank` is the adapter's, `settings` are vLLM's, section by section.
    """
    allowed = (settings.get("lora_config") or {}).get("max_lora_rank", 0)
    receives = (settings.get("weight_transfer_config") or {}).get("backend")
    match transport:
        case WeightSyncMode.LORA if rank > allowed:
            takes = f"adapters up to rank {allowed}" if allowed else "no adapters"
            fix = f"--weight_sync lora --max_lora_rank {rank}"
            return f"takes {takes}, and this one has rank {rank}; start it with {fix}"
        case WeightSyncMode.NCCL | WeightSyncMode.IPC if receives != transport:
            takes = f"by {receives}" if receives else "neither by nccl nor by ipc"
            fix = f"--weight_sync {transport}"
            return f"takes weights {takes}, and this run sends them by {transport}; start it with {fix}"
        case _:
            return ""


def compiler(environment: Mapping[str, str], which: Callable[[str], str | None], headers: Path) -> str:
    """Return the C compiler that Triton would take. Raises DryRunError where it has none, or lacks Python's headers.

    TRL's fused loss runs on Triton, which compiles a module of Python's at the first training step.
    """
    asked = environment.get("CC")
    found = which(asked.split()[0]) if asked else next(filter(None, map(which, COMPILERS)), None)
    if found is None:
        named = f"CC={asked}" if asked else " and ".join(COMPILERS)
        raise DryRunError(
            f"no C compiler was found ({named}), and the loss needs one on a GPU, at the first step; Debian and "
            "Ubuntu: apt-get install gcc libc6-dev"
        )
    if not (headers / "Python.h").is_file():
        raise DryRunError(
            f"{headers} has no Python.h, which the loss needs on a GPU, at the first step; Debian and Ubuntu: apt-get "
            "install python3-dev"
        )
    return found
