"""Weights from GPU to GPU: `nccl` between different GPUs or hosts, `ipc` on one GPU. Both are vLLM's own, driven here.

Unmeasured: what needs a GPU here has not been run. It follows vLLM 0.31's trainer-side classes, which are imported
from the `vllm` that is installed beside the trainer (extra `vllm`).

Promises:
- What cannot work is refused before anything is sent, with what to do instead.
- What is sent is a copy of the weights as they were in `prepare`, in host memory; it goes through a buffer on the GPU.
- A server that dies, or never answers, does not hang the trainer. vLLM's calls block, so each runs in a daemon thread,
  and `send` returns as soon as a request to the server fails, or when it is cancelled.
- One group per server. A server that fails has no bearing on the others, and one that was restarted gets a new group.

What NCCL does when a peer dies: the broadcast's kernel waits for ever, unless the connection was a socket. Only an
abort of the communicator ends it (`PyNcclCommunicator.destroy`), so a failed request aborts it; the thread then ends.
Before there is a communicator there is nothing to abort: the rendezvous gives up by itself after 300 s, and a peer
that dies between rendezvous and ncclCommInitRank leaves a thread behind, which ends with the process.
A server that was cut off in the middle of a transfer may wait in its own NCCL call: start it again.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from inference.engine import EngineError
from inference.vllm.api import NEW_PROCESS, ReplicaUnavailableError, VLLMServer
from inference.weights.transport import WeightSyncError

BUFFER_BYTES = 256 * 2**20
"""Of the GPU, for a chunk of the weights; a larger tensor makes it larger."""

_VLLM = "vllm.distributed.weight_transfer"
_START = "start the server with `sqlenv inference --weight_sync {name}`"
_HINTS = (
    ("VLLM_ALLOW_INSECURE_SERIALIZATION", _START),
    ("weight_transfer_config", _START),
    ("Invalid init_info", _START),
    ("IPC handle not found", "trainer and server are on different GPUs: use --weight_sync nccl"),
    ("NCCL error: invalid usage", "trainer and server seem to share a GPU, which NCCL refuses: use --weight_sync ipc"),
)
"""What the text of a failure says that no retry mends, and what to do about it."""


def refusal(name: str, *, has_vllm: bool, has_cuda: bool, ranks: int) -> str:
    """Return why this trainer cannot use the transport, "" when it can."""
    if not has_cuda:
        return f"--weight_sync {name} moves weights between GPUs, and the trainer has none: use disk"
    if not has_vllm:
        return f"--weight_sync {name} needs vLLM beside the trainer (pip install -e '.[vllm]'), or use disk"
    if name == "ipc" and ranks > 1:
        # vLLM's sender exchanges handles between all ranks, and a server that comes back is the main rank's alone.
        return f"--weight_sync ipc is for a trainer of one process, and there are {ranks}: use nccl or disk"
    return ""


def explain(name: str, url: str, status: int | None, text: str) -> EngineError:
    """Return the error for a failed transfer; `status` is that of the HTTP answer, if there was one."""
    for sign, advice in _HINTS:
        if sign in text:
            return WeightSyncError(f"{url}: {text}; {advice.format(name=name)}")
    if status is not None and 400 <= status < 500 and status != 429:
        return WeightSyncError(
            f"{url}: answered {status}: {text}; was it started by `sqlenv inference --weight_sync {name}`?"
        )
    advice = "; an earlier transfer broke off: start the server again" if "already active" in text else ""
    return ReplicaUnavailableError(url, f"{name}: {text}{advice}", answered=status is not None)


def buffer_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Return how large a buffer must be: each tensor has to fit."""
    return max(BUFFER_BYTES, *(tensor.nbytes for tensor in weights.values()))


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


class DeviceTransport:
    """Sends from `device`, where the trainer's process computes. `gather` returns {} off the main process.

    `timeout_s` bounds each request to a server, the one that takes the weights included. Raises WeightSyncError when it
    cannot work here.
    """

    def __init__(
        self,
        name: Literal["nccl", "ipc"],
        gather: Callable[[], Mapping[str, torch.Tensor]],
        device: torch.device,
        timeout_s: float,
        ranks: int = 1,
    ) -> None:
        has_vllm = importlib.util.find_spec("vllm") is not None
        if reason := refusal(name, has_vllm=has_vllm, has_cuda=torch.cuda.is_available(), ranks=ranks):
            raise WeightSyncError(reason)
        # Here, for it takes seconds, and `send` runs where other servers are waited for.
        self._vllm = importlib.import_module(f"{_VLLM}.{name}_engine")
        self._clients = importlib.import_module(f"{_VLLM}.clients")
        self.name: str = name
        self._gather = gather
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._timeout_s = timeout_s
        self._weights: dict[str, torch.Tensor] = {}
        self._groups: dict[str, Any] = {}

    def prepare(self, version: int) -> None:
        """Copy the weights."""
        # They may alias the parameters, and a server may come back when the optimiser is at work.
        self._weights = {name: tensor.to("cpu", copy=True) for name, tensor in self._gather().items()}

    async def send(self, server: VLLMServer) -> None:
        """Bring a server to the weights that were prepared last. Raises EngineError."""
        if not self._weights:
            raise ReplicaUnavailableError(server.url, "only the trainer's main process has the weights for it")
        if self.name == "ipc" and not is_here(server.url):
            raise WeightSyncError(f"{server.url} is not on this machine, as --weight_sync ipc needs: use nccl")
        if await server.weight_version() == NEW_PROCESS:
            self._drop(server.url)
        client = self._clients.HTTPVLLMWeightSyncClient(server.url, self._timeout_s)
        transfer = _Transfer(server.url, client, self._weights, self._device, self._timeout_s)
        work = self._send_nccl if self.name == "nccl" else self._send_ipc
        try:
            await transfer.run(work)
        except BaseException as error:  # cancelled, too
            transfer.abort()
            self._drop(server.url)
            if not isinstance(error, Exception):
                raise
            status, text = _failure(error)
            raise explain(self.name, server.url, status, text) from error
        if transfer.engine is not None:
            self._groups[server.url] = transfer.engine

    def close(self) -> None:
        """Leave the groups."""
        for url in list(self._groups):
            self._drop(url)
        self._weights = {}

    def _drop(self, url: str) -> None:
        if (engine := self._groups.pop(url, None)) is not None:
            _abort(engine)

    def _send_nccl(self, transfer: _Transfer) -> None:
        engine = self._groups.get(transfer.url)
        if engine is None:
            info = self._vllm.NCCLTrainerInitInfo(
                master_address=address_towards(transfer.url),
                master_port=_free_port(),
                world_size=1 + transfer.workers(),
                packed_buffer_size_bytes=buffer_bytes(self._weights),
                rank=0,
            )
            engine = self._vllm.NCCLTrainerWeightTransferEngine.trainer_init(info, client=transfer, source=transfer)
        engine.client = engine.source = transfer
        transfer.hold(engine)
        engine.send_weights()

    def _send_ipc(self, transfer: _Transfer) -> None:
        size = buffer_bytes(self._weights)
        info = self._vllm.IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        self._vllm.IPCTrainerWeightTransferEngine.trainer_init(info, client=transfer, source=transfer).send_weights()


class _Transfer:
    """One transfer to one server, as vLLM's engines see it: the weights to send (WeightSource), and the server's calls
    (VLLMWeightSyncClient). A call that fails ends the whole transfer at once."""

    def __init__(
        self,
        url: str,
        client: Any,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.url = url
        self.engine: Any = None
        self._weights = weights
        self._device = device
        self._timeout_s = timeout_s
        self._client = client
        self._outcome: Future[None] = Future()
        self._aborted = threading.Event()

    async def run(self, work: Callable[[_Transfer], None]) -> None:
        """Do the blocking work in a thread that nothing waits for at exit; raises what it, or a call of it, raises."""

        def body() -> None:
            try:
                torch.cuda.set_device(self._device)  # a thread begins on the first GPU
                work(self)
            except Exception as error:  # noqa: BLE001 - it is for whoever waits
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
            _abort(self.engine)

    # --- WeightSource ---

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor."""
        meta = importlib.import_module(f"{_VLLM}.base").ParamMeta
        return [meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights.items():
            self._check()
            yield name, tensor.to(self._device)

    # --- VLLMWeightSyncClient ---

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers join."""
        self._call(self._client.init_weight_transfer_engine, init_info)

    def start_weight_update(self) -> None:
        """Have the workers get ready."""
        self._call(self._client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """Have the workers receive."""
        self._call(self._client.update_weights, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have the workers use what they received."""
        self._call(self._client.finish_weight_update, weight_version)

    def workers(self) -> int:
        """Return how many workers the server has."""
        requests = importlib.import_module("requests")
        reply = requests.get(f"{self.url}/get_world_size", timeout=self._timeout_s)
        reply.raise_for_status()
        return int(reply.json()["world_size"])

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._check()
            call(*arguments)
        except Exception as error:
            # The other thread may wait for this very server, in a rendezvous or a broadcast.
            self._fail(error)
            self.abort()
            raise

    def _check(self) -> None:
        if self._aborted.is_set():
            raise ConnectionAbortedError("the transfer was broken off")

    def _fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self._outcome.set_exception(error)


def _abort(engine: Any) -> None:
    """Abort the communicator, if the engine has one; once, whoever comes first."""
    group = vars(engine).pop("model_update_group", None)
    if group is not None:
        # It waits for the abort, up to five seconds.
        threading.Thread(target=group.destroy, daemon=True).start()


def _failure(error: Exception) -> tuple[int | None, str]:
    """Return the HTTP status, if there was an answer, and the text; in one line."""
    response = getattr(error, "response", None)  # of a requests.HTTPError
    if response is None:
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    text = str(response.text)
    with suppress(ValueError, LookupError, TypeError):
        text = str(response.json()["error"]["message"])
    return int(response.status_code), " ".join(text.split())[:600]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
