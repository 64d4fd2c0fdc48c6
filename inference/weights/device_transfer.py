"""One transfer of weights from GPU to GPU: vLLM's sender in a thread, its calls to the server on our event loop.

vLLM's sender blocks, and takes two things from us: the weights (WeightSource), and the server's calls
(VLLMWeightSyncClient). A call that fails ends the whole transfer at once: the other thread may wait for this very
server, in a rendezvous or a broadcast.

What NCCL does when a peer dies: the broadcast's kernel waits for ever, unless the connection was a socket. Only an
abort of the communicator ends it (`PyNcclCommunicator.destroy`), so a failed call aborts it; the thread then ends.
Before there is a communicator there is nothing to abort: the rendezvous gives up by itself after 300 s, and a peer
that dies between rendezvous and ncclCommInitRank leaves a thread behind, which ends with the process.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import torch

from inference.vllm.api import VLLMServer

BASE = "vllm.distributed.weight_transfer.base"


class Transfer:
    """A transfer to one server, made in the event loop that the server's client belongs to."""

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
        meta = importlib.import_module(BASE).ParamMeta
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
        self._call("sqlenv_receive_weights", update_info=_as_json(update_info))

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


def _as_json(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return it with handles to GPU memory in the form in which vLLM's worker takes them over HTTP."""
    handles = update_info.get("ipc_handles")
    if handles is None:
        return update_info
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return {
        **{key: value for key, value in update_info.items() if key != "ipc_handles"},
        "ipc_handles_pickled": pickled,
    }
