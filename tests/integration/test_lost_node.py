"""A run on two nodes that loses one, under the script that containers and SLURM start it with, and start it again.

Each node is a `torchrun` with its ranks; losing it is SIGKILL to all of them at once. There is one machine, so the
nodes meet on loopback.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from benchmarks.server_process import ROOT, reserved_ports
from env_server.cache import CACHE_VARIABLE
from tests.integration.test_training import FLAGS
from tests.integration.training import save_policy
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE

TRAIN = ROOT / "docker" / "kubernetes" / "base" / "train.sh"
NODES = 2
DEADLINE_S = 600.0
"""Far beyond what anything here takes, also on a crowded machine."""
POLL_S = 0.1


class Node:
    """A node: its launcher, and what that has started. Its output is in a file."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def lose(self) -> None:
        """End everything on it at once, without a word."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> tuple[int, str]:
        """Wait for the end, and return the status and what was said."""
        status = self.process.wait(DEADLINE_S)
        return status, self._log.read_text(encoding="utf-8")


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs, the last ones first."""
    found: list[int] = []
    with suppress(FileNotFoundError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [*descendants(child), child]
    return found


Start = Callable[..., list[Node]]


@pytest.fixture
def start(random_policy: Callable[..., Qwen3ForCausalLM], generated_cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Start all nodes of the run in `tmp_path / "run"`, which has so many steps."""
    policy = save_policy(random_policy, ["How many are there"], tmp_path / "policy")
    ours = [
        sys.executable,
        "-m",
        "sqlenv",
        "train",
        "--model_name_or_path",
        str(policy),
        *FLAGS,
        "--eval_episodes",
        "0",
    ]
    nodes: list[Node] = []

    def run(steps: int) -> list[Node]:
        with reserved_ports() as (port,):
            pass
        flags = f"--max_steps {steps} --save_strategy steps --save_steps 1 --save_total_limit 2"
        environment = {
            **os.environ,
            CACHE_VARIABLE: str(generated_cache),
            "TRAIN_FLAGS": flags,
            "PYTHONPATH": str(ROOT),
        }
        for index in range(NODES):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NODES), "--nproc-per-node", "1"]
            launcher += ["--node-rank", str(index), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            launcher += ["--no-python", "sh", str(TRAIN), str(tmp_path / "run")]
            nodes.append(Node([*launcher, *ours], environment, tmp_path / f"node-{len(nodes)}.log"))
        return nodes[-NODES:]

    yield run
    for node in nodes:
        if node.process.poll() is None:
            node.lose()


def steps(folder: RunFolder) -> list[int]:
    return [int(row["step"]) for row in folder.metrics() if "loss" in row]


def test_a_lost_node_costs_at_most_the_steps_since_the_last_checkpoint(start: Start, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    first, second = start(10_000)
    deadline = time.monotonic() + DEADLINE_S
    while not (folder.path / "checkpoint-2" / SETTINGS_FILE).exists():
        assert time.monotonic() < deadline, first.ended()
        assert first.process.poll() is None, first.ended()
        time.sleep(POLL_S)
    second.lose()
    status, said = first.ended()
    assert status != 0, said  # so that the Job starts it again, too
    saved = max(int(path.parent.name.removeprefix("checkpoint-")) for path in folder.path.glob(f"*/{SETTINGS_FILE}"))
    assert steps(folder)[-1] - saved <= 1

    for node in start(saved + 1):
        status, said = node.ended()
        assert status == 0, said
    assert steps(folder) == list(range(1, saved + 2)), "each step once"
    assert folder.report_path.exists()
