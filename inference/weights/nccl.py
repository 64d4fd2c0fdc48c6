"""Weights from the trainer's GPU to those of servers over NCCL, by vLLM's own sender.

Unmeasured: what needs a GPU here has not been run. It follows vLLM 0.32's trainer-side classes, which are imported
from the `vllm` that is installed beside the trainer (extra `vllm`); a test runs them on a real server without a GPU,
with a group of processes in NCCL's place.

Guarantees:
- What cannot work is refused before anything is sent, with what to do instead.
- What is sent is a copy of the weights as they were in `prepare`, in host memory; it goes through a buffer on the GPU.
- A server that dies, or never answers, does not hang the trainer: `send` returns as soon as a call to the server fails,
  or when it is cancelled.
- One group per server. A server that fails has no bearing on the others, and one that was restarted gets a new group.
  A server that was in the group of an earlier run leaves that one.
- A server never computes with half of an update: it is told of the update first, with a deadline, and told to give it
  up when it fails here. When its trainer dies instead, the deadline ends it (`in_vllm`).

What NCCL does when a peer dies: the broadcast's kernel waits for ever, unless the connection was a socket. Only an
abort of the communicator ends it (`PyNcclCommunicator.destroy`), so a failed call aborts it; the thread then ends.
Before there is a communicator there is nothing to abort: the rendezvous gives up by itself after 300 s, and a peer
that dies between rendezvous and ncclCommInitRank leaves a thread behind, which ends with the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import importlib.util
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from inference.engine import EngineError
from inference.vllm.api import ReplicaError, ReplicaRejectedError, ReplicaUnavailableError, VLLMServer, WorkerFacts
from inference.weights.transport import CONSTANT, SERVER_S, WeightSyncError, give_up_update

BUFFER_BYTES = 256 * 2**20
"""Of the GPU, for a chunk of the weights; a larger tensor makes it larger."""

_VLLM = "vllm.distributed.weight_transfer"
_ANNOUNCE = "sqlenv_expect_update"
_NEEDS_PREPARED_SERVER = (_ANNOUNCE, "weight_transfer_config", "Invalid init_info")
"""What the text of a failure says that no retry mends."""
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's address."""


def why_not_from(has_cuda: bool, vllm_is_here: bool) -> str:
    """Return why weights cannot leave a trainer by NCCL, "" when they can."""
    if not has_cuda:
        return "--weight_sync nccl moves weights between GPUs, and the trainer has none: use disk"
    if not vllm_is_here:
        return "--weight_sync nccl needs vLLM beside the trainer (pip install -e '.[vllm]'), or use disk"
    return ""


def why_not_between(here: WorkerFacts, there: Sequence[WorkerFacts]) -> str:
    """Return why weights cannot go from here to a server's workers by NCCL, "" when they can.

    NCCL finds it, too, and says "invalid usage" of a GPU that is shared and of versions that differ.
    """
    prepared = {worker.transfer for worker in there}
    if prepared != {"nccl"}:
        found = ", ".join(sorted(prepared - {""})) or "no transfer between GPUs"
        return f"it was prepared for {found}: start it with `sqlenv inference --weight_sync nccl`"
    if here.gpu in {worker.gpu for worker in there}:
        return f"it shares {here.gpu} with the trainer, which NCCL refuses: use --weight_sync disk"
    versions = {worker.nccl for worker in there}
    if versions != {here.nccl}:
        return (
            f"the trainer has NCCL {here.nccl or 'of no version'}, and it has "
            f"{', '.join(sorted(versions)) or 'none'}: a group needs one version. Install the same torch and vLLM on "
            "both sides (VLLM_NCCL_SO_PATH names another library), or use --weight_sync disk"
        )
    return ""


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


def has_vllm() -> bool:
    """Return whether vLLM is installed beside the trainer."""
    return importlib.util.find_spec("vllm") is not None


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


def buffer_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Return how large a buffer must be: each tensor has to fit."""
    return max(BUFFER_BYTES, *(tensor.nbytes for tensor in weights.values()))


def explain(url: str, error: BaseException) -> EngineError:
    """Return the error for a transfer that failed."""
    text = " ".join((str(error) if isinstance(error, ReplicaError) else f"{type(error).__name__}: {error}").split())
    text = text.removeprefix(f"{url}: ")
    if any(sign in text for sign in _NEEDS_PREPARED_SERVER):
        return WeightSyncError(f"{url}: {text}; start the server with `sqlenv inference --weight_sync nccl`")
    if "NCCL error: invalid usage" in text:
        return WeightSyncError(
            f"{url}: {text}. Trainer and server have one version of NCCL and different GPUs, as far as they say; "
            "NCCL_DEBUG=INFO on both sides tells what NCCL finds wrong. --weight_sync disk works everywhere"
        )
    if isinstance(error, ReplicaRejectedError):
        return WeightSyncError(f"{url}: {text}; was it started by `sqlenv inference --weight_sync nccl`?")
    answered = isinstance(error, ReplicaUnavailableError) and error.answered
    return ReplicaUnavailableError(url, f"nccl: {text}", answered=answered)


@dataclass(frozen=True, slots=True)
class _Group:
    """A communicator, and the processes of the server that are in it."""

    engine: Any
    processes: frozenset[str]


class NCCLTransport:
    """Sends from `device`, where the trainer's process computes. `gather` returns {} off the main process.

    `timeout_s` bounds each request to a server, the one that takes the weights included. Raises WeightSyncError when it
    cannot work here.
    """

    name = "nccl"
    sends_all_weights = True

    def __init__(
        self, gather: Callable[[], Mapping[str, torch.Tensor]], device: torch.device, timeout_s: float = SERVER_S
    ) -> None:
        if reason := why_not_from(torch.cuda.is_available(), has_vllm()):
            raise WeightSyncError(reason)
        # Here, for it takes seconds, and `send` runs where other servers are waited for.
        self._vllm = importlib.import_module(f"{_VLLM}.nccl_engine")
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
        transfer = Transfer(server, self._weights, self._device, self._timeout_s)
        try:
            there = await self._announce(server)
            if reason := why_not_between(self._here, there):
                raise WeightSyncError(f"{server.url}: {reason}")
            processes = frozenset(worker.process for worker in there)
            if server.url in self._groups and self._groups[server.url].processes != processes:
                self._drop(server.url)
            await transfer.run(self._send)
        except BaseException as error:  # cancelled, too
            transfer.abort()
            self._drop(server.url)
            await give_up_update(server, self._run)
            if not isinstance(error, Exception) or isinstance(error, WeightSyncError):
                raise
            raise explain(server.url, error) from error
        if transfer.engine is not None:
            self._groups[server.url] = _Group(transfer.engine, processes)

    def close(self) -> None:
        """Leave the groups."""
        for url in list(self._groups):
            self._drop(url)
        self._weights = {}

    async def _announce(self, server: VLLMServer) -> tuple[WorkerFacts, ...]:
        told = await server.call_workers(_ANNOUNCE, run=self._run, deadline_s=self._timeout_s)
        return server.worker_facts(told)

    def _drop(self, url: str) -> None:
        if (group := self._groups.pop(url, None)) is not None:
            abort(group.engine)

    def _send(self, transfer: Transfer) -> None:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class Transfer:
    """A transfer to one server: vLLM's sender in a thread, its calls to the server on the event loop of its client.

    vLLM's sender blocks, and takes two things from us: the weights (WeightSource), and the server's calls
    (VLLMWeightSyncClient). A call that fails ends the whole transfer at once: the other thread may wait for this very
    server, in a rendezvous or a broadcast.
    """

    def __init__(
        self, server: VLLMServer, weights: Mapping[str, torch.Tensor], device: torch.device, timeout_s: float
    ) -> None:
        self.url = server.url
        self.engine: Any = None
        self._server = server
        self._weights = weights
        self._device = device
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._outcome: Future[None] = Future()
        self._aborted = threading.Event()

    async def run(self, work: Callable[[Transfer], None]) -> None:
        """Do the blocking work in a thread that nothing waits for at exit; raises what it, or a call of it, raises."""

        def body() -> None:
            try:
                torch.cuda.set_device(self._device)  # a thread begins on the first GPU
                work(self)
            except BaseException as error:  # noqa: BLE001 - it is for whoever waits
                self._fail(error)
            else:
                with suppress(InvalidStateError):
                    self._outcome.set_result(None)

        threading.Thread(target=body, name=f"weights to {self.url}", daemon=True).start()
        await asyncio.wrap_future(self._outcome)

    def hold(self, engine: Any) -> None:
        """Remember whose communicator to abort."""
        self.engine = engine
        if self._aborted.is_set():  # while the group was made
            self.abort()
        self._check()

    def abort(self) -> None:
        """Let go of the server: what is under way ends."""
        self._aborted.set()  # first, so that nothing more is enqueued on a communicator that is gone
        if self.engine is not None:
            abort(self.engine)

    def workers(self) -> int:
        """Return how many workers the server has."""
        return int(self._wait_for(self._server.get("/get_world_size"))["world_size"])

    # --- WeightSource ---

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor."""
        meta = importlib.import_module(f"{_VLLM}.base").ParamMeta
        return [meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            self._check()
            yield name, tensor.to(self._device)

    # --- VLLMWeightSyncClient, by our own methods of the worker: see `in_vllm` ---

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join."""
        self._call("sqlenv_join_group", init_info=init_info)

    def start_weight_update(self) -> None:
        """Have the workers get ready."""
        self._call("sqlenv_start_update")

    def update_weights(self, update_info: Any) -> None:
        """Have the workers receive."""
        self._call("sqlenv_receive_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the workers use what they received."""
        self._call("sqlenv_finish_update")

    def _call(self, method: str, **arguments: Any) -> None:
        self._check()
        self._wait_for(self._server.call_workers(method, timeout_s=self._timeout_s, **arguments))

    def _wait_for(self, call: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except BaseException as error:
            self._fail(error)
            self.abort()
            raise

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ConnectionAbortedError("the transfer was broken off")

    def _fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self._outcome.set_exception(error)


def abort(engine: Any) -> None:
    """Abort the communicator, if the engine has one; once, whoever comes first."""
    group = vars(engine).pop("model_update_group", None)
    if group is not None:
        # It waits for the abort, up to five seconds.
        threading.Thread(target=group.destroy, daemon=True).start()
