"""A group of processes in NCCL's place, so that vLLM's weight transfer runs where there is no GPU.

Both sides import it in vLLM's own interpreter: the trainer by running this file, the server's worker by the name of
`StoreWorker`. vLLM's classes, their calls and the layer-wise reload are as they are. Put in place are what needs CUDA:
the communicator (tensors go over vLLM's own `StatelessProcessGroup`, which is a TCP store), and the packing of tensors
on CUDA streams. As in NCCL, who waits for a peer that is gone waits for ever.

    store_group.py URL SCALE DEADLINE_S HOW

pushes the checkpoint of the tiny policy, its matrices times SCALE. HOW: `well`; `dies` in the middle, without a word;
`late`, stops in the middle and is cancelled. Prints a JSON line with the error, or "".
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sqlenv_worker import SQLEnvWorker  # type: ignore[import-not-found]  # of inference/in_vllm, on vLLM's PYTHONPATH
from vllm.distributed import utils  # type: ignore[import-not-found]
from vllm.distributed.weight_transfer import nccl_common, nccl_engine  # type: ignore[import-not-found]

BASE = Path(__file__).parents[3] / "trainer" / "tiny" / "base"
ENOUGH = 20
"""Tensors that a server has when its trainer goes."""


class StoreGroup:
    """vLLM's `PyNcclCommunicator`, as far as weight transfer uses it."""

    def __init__(self, address: str, port: int, rank: int, world_size: int) -> None:
        self._group = utils.StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world_size)
        self._is_gone = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send, or receive in place."""
        if self._is_gone.is_set():
            raise RuntimeError("NCCL error: the communicator was aborted")
        try:
            received = self._group.broadcast(tensor, src)
        except RuntimeError:
            threading.Event().wait()  # the peer is gone
        tensor.copy_(received)

    def destroy(self) -> None:
        """Abort."""
        self._is_gone.set()


def _make_group(address: str, port: int, rank: int, world_size: int, device: object) -> StoreGroup:
    return StoreGroup(address, port, rank, world_size)


def _send(iterator: Iterator[tuple[str, torch.Tensor]], group: StoreGroup, src: int, **_: object) -> None:
    for _name, tensor in iterator:
        group.broadcast(tensor.contiguous(), src)


def _receive(iterator: Any, group: StoreGroup, src: int, post_unpack_func: Any, **_: object) -> None:
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


nccl_common.stateless_init_process_group = _make_group
nccl_engine.packed_nccl_broadcast_producer = _send
nccl_engine.packed_nccl_broadcast_consumer = _receive
torch.accelerator.current_device_index = lambda: 0
torch.accelerator.synchronize = lambda *_: None


class StoreWorker(SQLEnvWorker):  # type: ignore[misc]
    """Our worker on a machine without a GPU, that says of itself what one on a GPU does."""

    def sqlenv_facts(self) -> dict[str, str]:
        """Return what a trainer must know."""
        return {**super().sqlenv_facts(), "gpu": "GPU-of-the-server"}


def push(url: str, scale: float, deadline_s: float, how: str) -> str:
    """Push as a trainer does; returns what went wrong."""
    from safetensors.torch import load_file

    from inference.engine import EngineError
    from inference.vllm.api import VLLMServer, WorkerFacts
    from inference.vllm.engine import VLLMSettings
    from inference.weights import nccl
    from inference.weights.nccl import Transfer

    for module, name, stand_in in (
        (torch.cuda, "set_device", lambda _: None),
        (nccl, "why_not_from", lambda *_: ""),
        (nccl, "facts_here", lambda _: WorkerFacts(gpu="GPU-of-the-trainer")),
    ):
        setattr(module, name, stand_in)
    weights = {
        name: tensor * scale if tensor.ndim == 2 else tensor
        for name, tensor in load_file(BASE / "model.safetensors").items()
    }
    every = Transfer.__iter__

    def some(self: Transfer) -> Iterator[tuple[str, torch.Tensor]]:
        for count, pair in enumerate(every(self)):
            if count == ENOUGH:
                if how == "dies":
                    os._exit(9)
                threading.Event().wait()
            yield pair

    if how != "well":
        Transfer.__iter__ = some  # type: ignore[method-assign]

    async def send() -> None:
        transport = nccl.NCCLTransport(lambda: weights, torch.device("cpu", 0), deadline_s)
        transport.prepare(0)
        async with VLLMSettings(request_timeout_s=60.0).client() as client, asyncio.timeout(deadline_s):
            await transport.send(VLLMServer(url, client))

    try:
        asyncio.run(send())
    except (EngineError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    url, scale, deadline_s, how = sys.argv[1:]
    found = push(url, float(scale), float(deadline_s), how)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)
