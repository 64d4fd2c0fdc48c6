"""A run on five hosts: environment servers on two, vLLM on the third, a trainer rank on the fourth and the fifth.

`make cluster-test` runs it, as root. The hosts are network namespaces, 50 ms from the trainers and back; one
environment host is cut off, the inference host is lost for half a minute, and one rank's host dies. The run completes
with exact groups. At the end it prints how many steps a second it took, beside the same run on one host. In another run
all environment servers are replaced, one after the other, as a rolling update does it.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks.server_process import SQLENV
from tests.cluster.network import Host, Network, missing
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SQLENV_CLUSTER_TEST"), reason="make cluster-test runs it"),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

ENVIRONMENTS = ("env-1", "env-2")
RANKS = ("rank-0", "rank-1")
ONE_WAY_S = 0.025
"""Of each server's host: 50 ms there and back."""
PARTITION_S = 20.0
LOSS_S = 30.0
STEPS, STEPS_ALONE, UPDATED_STEPS = 12, 4, 16
GROUPS, GROUP = 8, 8
EPISODES = GROUPS * GROUP
"""Of a step, on both ranks."""
PORT, INFERENCE_PORT, RENDEZVOUS = 8000, 8001, 29_500
TOKEN = secrets.token_hex(16)
FLAGS = (
    *("train", "--config", "configs/tiny.yaml", "--eval_episodes", "0", "--max_steps", str(STEPS)),
    *("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "2", "--num_generations", str(GROUP)),
    *("--save_strategy", "steps", "--save_steps", "2", "--use_vllm", "true"),
)
START_S = 600.0
RUN_S = 1_800.0
POLL_S = 0.2
DRAIN_S = 90.0


@dataclass
class Run:
    """A run on two ranks, each started on its host; started again, it goes on from its newest checkpoint."""

    folder: Path
    hosts: tuple[Host, ...]
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    _ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *more: str) -> None:
        """Start all ranks."""
        self._ranks = []
        for place, host in enumerate(self.hosts):
            launcher = [*(sys.executable, "-m", "torch.distributed.run"), "--nnodes", str(len(self.hosts))]
            launcher += ["--nproc_per_node", "1", "--node_rank", str(place)]
            launcher += ["--master_addr", self.hosts[0].address, "--master_port", str(RENDEZVOUS)]
            command = [*launcher, "sqlenv/__main__.py", *FLAGS, *self.flags, "--output_dir", str(self.folder), *more]
            self._ranks.append(host.start(command, self.log(place), self.environment))

    def log(self, place: int) -> Path:
        """What a rank said."""
        return self.folder.parent / f"{self.folder.name}-rank{place}.log"

    def ended(self) -> list[int]:
        """Wait for all ranks; return their statuses."""
        return [rank.wait(RUN_S) for rank in self._ranks]

    @property
    def steps(self) -> int:
        """Steps that were logged."""
        rows = RunFolder(self.folder).metrics() if self.folder.is_dir() else []
        return int(max((row["step"] for row in rows if "loss" in row), default=0))

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of a run that goes on."""
        deadline = time.monotonic() + RUN_S
        while not holds():
            for place, rank in enumerate(self._ranks):
                assert rank.poll() is None, f"rank {place} ended:\n{self.log(place).read_text()[-6000:]}"
            assert time.monotonic() < deadline, self.log(0).read_text()[-6000:]
            time.sleep(POLL_S)

    def assert_exact(self, steps: int) -> None:
        """Every step has its groups, each of one question, and no episode is there twice or was lost."""
        folder = RunFolder(self.folder)
        rows = folder.episodes(turns=False)
        assert Counter(row.step for row in rows) == dict.fromkeys(range(1, steps + 1), EPISODES)
        assert len({row.record.episode_id for row in rows}) == steps * EPISODES
        for start in range(0, len(rows), GROUP):
            assert len({row.record.question_id for row in rows[start : start + GROUP]}) == 1, f"group at {start}"
        metrics = folder.metrics()
        assert [row["rollout/failed"] for row in metrics if "loss" in row] == [0.0] * steps
        ratios = [row["sampling/importance_sampling_ratio/max"] for row in metrics if "loss" in row]
        assert max(ratios) < 1 + 1e-3, "trained on the tokens that were drawn"

    def step_seconds(self) -> float:
        """The median step, the first one apart."""
        return statistics.median(
            [row["step_time"] for row in RunFolder(self.folder).metrics() if "step_time" in row][1:]
        )


def serve(folder: Path, environments: Sequence[Host], inference: Host) -> None:
    """Start the servers on their hosts, and wait until they answer."""
    for host in environments:
        serve_environments(folder, host)
    command = [*SQLENV, "inference", "--model", str(BASE_CHECKPOINT), "--device", "cpu", "--weight_sync", "disk"]
    command += ["--host", "0.0.0.0", "--trusted_network", "--port", str(INFERENCE_PORT), "--max_model_len", "2048"]
    log = folder / f"{inference.name}-vllm.log"
    inference.wait_for(f"http://127.0.0.1:{INFERENCE_PORT}/health", inference.start(command, log, {}), log, START_S)


def serve_environments(folder: Path, host: Host) -> subprocess.Popen[bytes]:
    """Start an environment server on a host, and wait until it answers."""
    command = [*SQLENV, "serve", "--host", "0.0.0.0", "--port", str(PORT), "--data", "synthetic"]
    log = folder / f"{host.name}.log"
    process = host.start(command, log, {"SQLENV_TOKEN": TOKEN})
    host.wait_for(f"http://127.0.0.1:{PORT}/health", process, log, START_S)
    return process


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(*ENVIRONMENTS, "inference", *RANKS, "alone") as network:
        yield network


def run_on(network: Network, folder: Path, ranks: Sequence[str], environment: str, inference: str) -> Run:
    """A run whose ranks are on hosts by name; the servers are behind names, too."""
    flags = ("--env", f"ws://{environment}:{PORT}", "--vllm_server_base_url", f"http://{inference}:{INFERENCE_PORT}")
    surroundings = {"SQLENV_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return Run(folder / "run", tuple(network[name] for name in ranks), flags, surroundings)


@pytest.fixture(scope="module")
def alone(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run, with all processes on one host: three steps."""
    folder = tmp_path_factory.mktemp("alone")
    host = network["alone"]
    serve(folder, [host], host)
    run = run_on(network, folder, ("alone", "alone"), "alone", "alone")
    run.start("--max_steps", str(STEPS_ALONE))
    assert run.ended() == [0, 0], run.log(0).read_text()[-6000:]
    host.stop()
    run.assert_exact(STEPS_ALONE)
    return run


@pytest.fixture(scope="module")
def cluster(alone: Run, network: Network, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("cluster")
    network.resolve({"env": ENVIRONMENTS[:1]})
    serve(folder, [network[name] for name in ENVIRONMENTS], network["inference"])
    for name in (*ENVIRONMENTS, "inference"):
        network.connect(name, delay_s=ONE_WAY_S)
    return run_on(network, folder, RANKS, "env", "inference")


def test_the_run_completes_whatever_is_cut_off(cluster: Run, alone: Run, network: Network) -> None:
    cluster.start()
    cluster.until(lambda: cluster.steps >= 1)
    network.resolve({"env": ENVIRONMENTS})
    cluster.until(lambda: cluster.steps >= 3)
    undisturbed = cluster.step_seconds()
    network.connect("env-1", up=False)
    time.sleep(PARTITION_S)
    network.connect("env-1", delay_s=ONE_WAY_S)
    reached = cluster.steps
    cluster.until(lambda: cluster.steps >= reached + 2)
    network.connect("inference", up=False)
    time.sleep(LOSS_S)
    network.connect("inference", delay_s=ONE_WAY_S)
    reached = cluster.steps
    cluster.until(lambda: cluster.steps >= reached + 2)
    network["rank-1"].kill()
    assert all(cluster.ended()), "a rank alone cannot go on"
    lost = cluster.steps
    assert lost < STEPS, "the rank died in mid run"
    cluster.start("--resume_from_checkpoint", "true")
    assert cluster.ended() == [0, 0], cluster.log(0).read_text()[-6000:]
    cluster.assert_exact(STEPS)
    seconds = {"alone": alone.step_seconds(), "cluster": undisturbed}
    result = {"step_seconds": seconds, "ratio": seconds["cluster"] / seconds["alone"], "step_of_the_kill": lost}
    sys.stderr.write(f"{json.dumps({'benchmark': 'cluster', **result})}\n")


def test_a_rolling_update_of_the_environment_servers_loses_nothing(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A server is asked to stop as Kubernetes does it, and a new one takes its place, with episodes in flight."""
    folder = tmp_path_factory.mktemp("update")
    for host in network.hosts.values():
        host.stop()
    network.resolve({"env": ENVIRONMENTS})
    serve(folder, [], network["inference"])
    servers = {name: serve_environments(folder, network[name]) for name in ENVIRONMENTS}
    run = run_on(network, folder, RANKS, "env", "inference")
    run.start("--max_steps", str(UPDATED_STEPS))
    updated = []
    for name, old in servers.items():
        reached = run.steps
        run.until(lambda reached=reached: run.steps > reached)  # type: ignore[misc]
        old.terminate()
        assert old.wait(DRAIN_S) == 0, "no episode was cut short"
        serve_environments(folder, network[name])
        updated.append(run.steps)
    assert run.ended() == [0, 0], run.log(0).read_text()[-6000:]
    assert updated[-1] < UPDATED_STEPS, "the servers were replaced in mid run"
    run.assert_exact(UPDATED_STEPS)
    for name in ENVIRONMENTS:
        metrics = network[name].get(f"http://127.0.0.1:{PORT}/metrics", TOKEN) or ""
        (opened,) = (line for line in metrics.splitlines() if line.startswith("sqlenv_sessions_opened"))
        assert float(opened.split()[-1]) > 0, "the new one was played on, too"
