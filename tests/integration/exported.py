"""What an exported folder answers when it is asked as docs/evaluation.md shows: the page's scripts, run as they stand.

Neither script sees this project: they run elsewhere, isolated from its modules; the one for vLLM in a fork of a process
that has imported vLLM.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.fork_server import ForkServer
from tests.integration.vllm_server import PYTHON, START_S

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TORCH_COMPILE_DISABLE": "1",
}
"""What an engine beside other processes wants: a small cache, no cores of its own, and stdout for the answer alone."""


def scripts() -> list[str]:
    """Return the page's scripts: for transformers, and for vLLM."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def answer_in_transformers(folder: Path) -> str:
    """Return what the policy says to the page's question, in plain transformers. Warnings are errors."""
    command = [sys.executable, "-I", "-W", "error", _write(scripts()[0], folder)]
    return _said(subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False))


def answer_in_vllm(folder: Path, forks: ForkServer) -> str:
    """Return what the policy says to the page's question, in plain vLLM on the CPU, in the checkpoint's dtype."""
    script = scripts()[1].replace("LLM(policy, ", 'LLM(policy, dtype="float32", enforce_eager=True, ')
    file = _write(script, folder)
    environment = {**os.environ, **VLLM_ON_CPU, "PYTHONPATH": ""}
    return _said(forks.run([str(PYTHON), file], environment=environment, folder=folder.parent, timeout=START_S))


def _write(script: str, folder: Path) -> str:
    """Write a script into the folder above the exported one, where it is to run, and return its name."""
    file = folder.parent / "script.py"
    file.write_text(script.replace('"exported"', f'"{folder.name}"'), encoding="utf-8")
    return file.name


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()
