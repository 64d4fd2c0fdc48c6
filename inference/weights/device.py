"""Weights from GPU to GPU: `nccl` between different GPUs or hosts, `ipc` on one GPU. Both are vLLM's own, driven here.

Unmeasured: what needs a GPU here has not been run. It follows vLLM 0.32's trainer-side classes, which are imported
from the `vllm` that is installed beside the trainer (extra `vllm`); a test runs them on a real server without a GPU,
with a group of processes in NCCL's place.

Promises:
- What cannot work is refused before anything is sent, with what to do instead.
- What is sent is a copy of the weights as they were in `prepare`, in host memory; it goes through a buffer on the GPU.
- A server that dies, or never answers, does not hang the trainer: `send` returns as soon as a call to the server fails,
  or when it is cancelled.
- One group per server. A server that fails has no bearing on the others, and one that was restarted gets a new group.
  A server that was in the group of an earlier run leaves that one.
- A server never computes with half of an update: it is told of the update first, with a deadline, and told to give it
  up when it fails here. When its trainer dies instead, the deadline ends it (`in_vllm`).
"""

from __future__ import annotations

import importlib
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from inference.engine import EngineError
from inference.vllm.api import ReplicaError, ReplicaRejectedError, ReplicaUnavailableError, VLLMServer
from inference.weights.device_facts import (
    Sender,
    WorkerFacts,
    address_towards,
    allocator_settings,
    disagreement,
    facts_here,
    has_vllm,
    is_here,
)
from inference.weights.device_transfer import Transfer, abort
from inference.weights.transport import CONSTANT, SERVER_S, WeightSyncError, give_up_update

BUFFER_BYTES = 256 * 2**20
"""Of the GPU, for a chunk of the weights; a larger tensor makes it larger."""

_VLLM = "vllm.distributed.weight_transfer"
_ANNOUNCE = "sqlenv_expect_update"
_START = "start the server with `sqlenv inference --weight_sync {name}`"
_HINTS = (
    (_ANNOUNCE, _START),
    ("VLLM_ALLOW_INSECURE_SERIALIZATION", _START),
    ("weight_transfer_config", _START),
    ("Invalid init_info", _START),
    ("IPC handle not found", "trainer and server are on different GPUs: use --weight_sync nccl"),
)
"""What the text of a failure says that no retry mends, and what to do about it."""


def explain(name: str, url: str, error: BaseException) -> EngineError:
    """Return the error for a transfer that failed."""
    text = " ".join((str(error) if isinstance(error, ReplicaError) else f"{type(error).__name__}: {error}").split())
    text = text.removeprefix(f"{url}: ")
    for sign, advice in _HINTS:
        if sign in text:
            return WeightSyncError(f"{url}: {text}; {advice.format(name=name)}")
    if "NCCL error: invalid usage" in text:
        return WeightSyncError(
            f"{url}: {text}. Trainer and server have one version of NCCL and different GPUs, as far as they say; "
            "NCCL_DEBUG=INFO on both sides tells what NCCL finds wrong. --weight_sync disk works everywhere"
        )
    if isinstance(error, ReplicaRejectedError):
        return WeightSyncError(f"{url}: {text}; was it started by `sqlenv inference --weight_sync {name}`?")
    answered = isinstance(error, ReplicaUnavailableError) and error.answered
    return ReplicaUnavailableError(url, f"{name}: {text}", answered=answered)


def buffer_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Return how large a buffer must be: each tensor has to fit."""
    return max(BUFFER_BYTES, *(tensor.nbytes for tensor in weights.values()))


@dataclass(frozen=True, slots=True)
class _Group:
    """A communicator, and the processes of the server that are in it."""

    engine: Any
    processes: frozenset[str]


class DeviceTransport:
    """Sends from `device`, where the trainer's process computes. `gather` returns {} off the main process.

    `timeout_s` bounds each request to a server, the one that takes the weights included. Raises WeightSyncError when it
    cannot work here.
    """

    sends_all_weights = True

    def __init__(
        self,
        name: Literal["nccl", "ipc"],
        gather: Callable[[], Mapping[str, torch.Tensor]],
        device: torch.device,
        timeout_s: float = SERVER_S,
        ranks: int = 1,
    ) -> None:
        has_cuda = torch.cuda.is_available()
        if reason := Sender(has_cuda, has_vllm(), ranks, allocator=allocator_settings()).refusal(name):
            raise WeightSyncError(reason)
        # Here, for it takes seconds, and `send` runs where other servers are waited for.
        self._vllm = importlib.import_module(f"{_VLLM}.{name}_engine")
        self.name: str = name
        self._gather = gather
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._here = facts_here(self._device)
        self._timeout_s = timeout_s
        self._run = uuid.uuid4().hex
        self._weights: dict[str, torch.Tensor] = {}
        self._groups: dict[str, _Group] = {}

    def prepare(self, version: int, dtype: torch.dtype | None = None, *, constant: bool = False) -> None:
        """Copy the weights."""
        # They may alias the parameters, and a server may come back when the optimiser is at work.
        self._weights = {
            name: tensor.to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
            for name, tensor in self._gather().items()
        }
        if constant:
            for tensor in self._weights.values():
                tensor.fill_(CONSTANT)

    async def send(self, server: VLLMServer) -> None:
        """Bring a server to the weights that were prepared last. Raises EngineError."""
        if not self._weights:
            raise ReplicaUnavailableError(server.url, "only the trainer's main process has the weights for it")
        if self.name == "ipc" and not is_here(server.url):
            raise WeightSyncError(f"{server.url} is not on this machine, as --weight_sync ipc needs: use nccl")
        transfer = Transfer(server, self._weights, self._device, self._timeout_s)
        try:
            there = await self._announce(server)
            if reason := disagreement(self.name, self._here, there):
                raise WeightSyncError(f"{server.url}: {reason}")
            processes = frozenset(worker.process for worker in there)
            if server.url in self._groups and self._groups[server.url].processes != processes:
                self._drop(server.url)
            await transfer.run(self._send_nccl if self.name == "nccl" else self._send_ipc)
        except BaseException as error:  # cancelled, too
            transfer.abort()
            self._drop(server.url)
            await give_up_update(server, self._run)
            if not isinstance(error, Exception) or isinstance(error, WeightSyncError):
                raise
            raise explain(self.name, server.url, error) from error
        if transfer.engine is not None:
            self._groups[server.url] = _Group(transfer.engine, processes)

    def close(self) -> None:
        """Leave the groups."""
        for url in list(self._groups):
            self._drop(url)
        self._weights = {}

    async def _announce(self, server: VLLMServer) -> tuple[WorkerFacts, ...]:
        told = await server.call_workers(_ANNOUNCE, run=self._run, deadline_s=self._timeout_s)
        return WorkerFacts.read(server.url, told)

    def _drop(self, url: str) -> None:
        if (group := self._groups.pop(url, None)) is not None:
            abort(group.engine)

    def _send_nccl(self, transfer: Transfer) -> None:
        group = self._groups.get(transfer.url)
        if group is None:
            info = self._vllm.NCCLTrainerInitInfo(
                master_address=address_towards(transfer.url),
                master_port=_free_port(),
                world_size=1 + transfer.workers(),
                packed_buffer_size_bytes=buffer_bytes(self._weights),
                rank=0,
            )
            engine = self._vllm.NCCLTrainerWeightTransferEngine.trainer_init(info, client=transfer, source=transfer)
        else:
            engine = group.engine
        engine.client = engine.source = transfer
        transfer.hold(engine)
        engine.send_weights()

    def _send_ipc(self, transfer: Transfer) -> None:
        size = buffer_bytes(self._weights)
        info = self._vllm.IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        self._vllm.IPCTrainerWeightTransferEngine.trainer_init(info, client=transfer, source=transfer).send_weights()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
