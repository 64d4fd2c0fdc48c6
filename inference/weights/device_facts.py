"""Whether weights can go from this trainer's GPU to a server's, by which of `nccl` and `ipc`; decided before any is.

Facts are asked from the server's workers (`ask`) and this process (`facts_here`); what follows from them is pure.

Unmeasured: nothing of it has met a GPU. NCCL checks both itself, and says "invalid usage" of either: that two processes
of a group share a GPU, and that their versions differ.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

import torch

from inference.vllm.api import WORKERS, NotVLLMError, ReplicaRejectedError, ReplicaUnavailableError, VLLMServer

FACTS = "sqlenv_facts"
EXPANDABLE = "expandable_segments:True"
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's address."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One process that holds a model on a GPU: a worker of a server, or the trainer's main process.

    `transfer` is the transport that the server was prepared for, `gpu` a UUID, `nccl` the version of the library that
    vLLM loads, `process` a name that no other process has had, `dtype` the one of all its parameters.
    `config` and `weights` are digests of what `location` holds. "" where there is none, or it is not known.
    """

    process: str = ""
    transfer: str = ""
    gpu: str = ""
    nccl: str = ""
    dtype: str = ""
    location: str = ""
    config: str = ""
    weights: str = ""

    @classmethod
    def read(cls, url: str, told: Sequence[object]) -> tuple[WorkerFacts, ...]:
        """Return the facts that the workers of `url` told; what is not known here is left out. Raises NotVLLMError."""
        known = {field.name for field in fields(cls)}
        workers = []
        for one in told:
            if not isinstance(one, dict):
                raise NotVLLMError(url, WORKERS, f"no facts: {one}")
            workers.append(cls(**{name: str(one[name]) for name in known & one.keys()}))
        return tuple(workers)


async def ask(server: VLLMServer) -> tuple[WorkerFacts, ...]:
    """Return the facts of a server's workers; none where `sqlenv inference` did not start it. Raises ReplicaError."""
    try:
        reply = await server.post(WORKERS, {"method": FACTS})
    except ReplicaRejectedError:  # its development endpoints are closed
        return ()
    except ReplicaUnavailableError as error:
        if FACTS in str(error):
            return ()
        raise
    return WorkerFacts.read(server.url, server.worker_results(reply))


def facts_here(device: torch.device) -> WorkerFacts:
    """Return the trainer's; it needs the vLLM that is installed beside it."""
    wrapper = importlib.import_module("vllm.distributed.device_communicators.pynccl_wrapper")
    nccl = ""
    with suppress(OSError):  # there is no such library, as where torch is built without it
        nccl = str(wrapper.NCCLLibrary().ncclGetVersion())
    return WorkerFacts(gpu=gpu_of(device), nccl=nccl)


def gpu_of(device: torch.device) -> str:
    """Return the GPU's UUID, "" of a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def allocator_settings() -> str:
    """Return torch's settings for GPU memory, from the environment."""
    return ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


def has_vllm() -> bool:
    """Return whether vLLM is installed beside the trainer."""
    return importlib.util.find_spec("vllm") is not None


@dataclass(frozen=True, slots=True)
class Sender:
    """What decides, on the trainer's side, whether weights can go from GPU to GPU. `allocator` is torch's settings."""

    has_cuda: bool
    has_vllm: bool
    ranks: int
    allocator: str = ""

    def refusal(self, transport: str) -> str:
        """Return why weights cannot leave by `nccl` or `ipc`, "" when they can."""
        if not self.has_cuda:
            return f"--weight_sync {transport} moves weights between GPUs, and the trainer has none: use disk"
        if not self.has_vllm:
            return f"--weight_sync {transport} needs vLLM beside the trainer (pip install -e '.[vllm]'), or use disk"
        if transport == "ipc" and self.ranks > 1:
            # vLLM's sender exchanges handles between all ranks, and a server that comes back is the main rank's alone.
            return f"--weight_sync ipc is for a trainer of one process, and there are {self.ranks}: use nccl or disk"
        if transport == "ipc" and EXPANDABLE in self.allocator.replace(" ", ""):
            # Such memory has no CUDA IPC handle. Torch passes file descriptors instead, for which one process must be
            # allowed to trace the other: containers and most systems forbid it.
            return (
                f"--weight_sync ipc cannot share memory that is allocated with {EXPANDABLE}: leave that out of "
                "PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), or use disk"
            )
        return ""


def disagreement(name: str, here: WorkerFacts, there: Sequence[WorkerFacts]) -> str:
    """Return why weights cannot go from here to a server's workers by `name`, "" when they can."""
    prepared = {worker.transfer for worker in there}
    if prepared != {name}:
        found = ", ".join(sorted(prepared - {""})) or "no transfer between GPUs"
        return f"it was prepared for {found}: start it with `sqlenv inference --weight_sync {name}`"
    gpus = {worker.gpu for worker in there}
    if name == "ipc":
        if gpus != {here.gpu}:
            return f"the trainer is on {here.gpu}, and it is on {', '.join(sorted(gpus))}: use --weight_sync nccl"
        return ""
    if here.gpu in gpus:
        return f"it shares {here.gpu} with the trainer, which NCCL refuses: use --weight_sync ipc or disk"
    versions = {worker.nccl for worker in there}
    if versions != {here.nccl}:
        return (
            f"the trainer has NCCL {here.nccl or 'of no version'}, and it has "
            f"{', '.join(sorted(versions)) or 'none'}: a group needs one version. Install the same torch and vLLM on "
            "both sides (VLLM_NCCL_SO_PATH names another library), or use --weight_sync disk"
        )
    return ""


def same_contents(one: WorkerFacts, other: WorkerFacts) -> bool:
    """Whether both hold the same model, as far as that is known of both."""
    return bool(one.config and one.weights) and (one.config, one.weights) == (other.config, other.weights)


def is_here(url: str) -> bool:
    """Return whether the URL's host is this machine: only its own addresses can be bound."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(urlsplit(url).hostname, 0, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def address_towards(url: str) -> str:
    """Return the address under which the URL's host sees this machine. Raises OSError."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # of a datagram socket: picks the route, sends nothing
        return str(probe.getsockname()[0])


def interfaces_towards(urls: Sequence[str]) -> str:
    """Return NCCL_SOCKET_IFNAME for a process that meets these servers, "" where it need not be told or is not known.

    In a container with two networks, as in our compose file, NCCL would take the first one, which need not be the
    servers'. For servers on this machine any will do.
    """
    found = []
    for url in urls:
        with suppress(OSError):
            name = _interface(address_towards(url))
            if name and not is_here(url) and name not in found:
                found.append(name)
    return f"={','.join(found)}" if found else ""


def _interface(address: str) -> str:
    """Return the name of the interface with an address, "" when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""
