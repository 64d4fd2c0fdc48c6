"""What a run is made with and on: the commit, the machine, when it began. Kept in its config.json.

What cannot be found out is left out; nothing here stops a run.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
GIT_S = 5.0


def provenance() -> dict[str, Any]:
    """Return what is known of this process, its code and its machine."""
    found: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
    }
    return {name: value for name, value in found.items() if value}


def commit(root: Path) -> str:
    """Return the commit of a checkout, and whether files differ from it; nothing where it is none."""
    if not (root / ".git").exists():
        return ""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_S, check=True
        )
        return done.stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    return ""


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Return the machine's memory, 0 where the system does not say."""
    with suppress(AttributeError, OSError, ValueError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return 0.0
