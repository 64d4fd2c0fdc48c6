"""Weights over a folder that trainer and servers see: safetensors, then a reload in place. Works everywhere.

Guarantees:
- A server never sees half a checkpoint: the folder gets its name when everything is in it.
- What was prepared last stays until the next one has been prepared twice over, so that a server that comes back can be
  brought up to date, and one that is still reading finishes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from inference.vllm.api import ReplicaUnavailableError, VLLMServer
from inference.weights.gather import write_checkpoint
from inference.weights.transport import CONSTANT, WeightSyncError, give_up_update

OWN_METHOD = "sqlenv_reload_weights"
"""Of our extension of vLLM's worker (`in_vllm`)."""
HEALTH_S = 10.0
KEPT = 2
"""Checkpoints that stay."""


class DiskTransport:
    """Writes checkpoints into `folder`. `gather` returns the full weights on the main process, which writes them."""

    name = "disk"
    sends_all_weights = True

    def __init__(self, gather: Callable[[], Mapping[str, torch.Tensor]], folder: Path, *, is_main: bool = True) -> None:
        self._gather = gather
        self._folder = folder.absolute()
        self._written: list[Path] = []
        self._count = 0
        self._is_main = is_main

    def prepare(self, version: int, dtype: torch.dtype | None = None, *, constant: bool = False) -> None:
        """Write a checkpoint. Raises WeightSyncError."""
        weights = self._gather()
        if constant:
            weights = {name: torch.full_like(tensor, CONSTANT) for name, tensor in weights.items()}
        # A version may be prepared twice, and a server may still be reading the first one.
        path = self._folder / f"v{version:06d}-{self._count}"
        self._count += 1
        self._written.append(path)
        if not self._is_main:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
            write_checkpoint(path, weights, dtype=dtype)
        except OSError as error:
            raise WeightSyncError(f"the weights cannot be written to {path}: {error.strerror or error}") from error
        while len(self._written) > KEPT:
            shutil.rmtree(self._written.pop(0), ignore_errors=True)

    async def send(self, server: VLLMServer) -> None:
        """Have the server read the last checkpoint. Raises EngineError."""
        try:
            await self._reload_or_explain(server)
        except BaseException:  # cancelled, too
            await give_up_update(server)
            raise

    async def _reload_or_explain(self, server: VLLMServer) -> None:
        try:
            await self._reload(server)
        except ReplicaUnavailableError as error:
            await self._explain(server, error)

    async def _reload(self, server: VLLMServer, method: str = OWN_METHOD) -> None:
        await server.call_workers(method, weights_path=str(self._written[-1]))

    async def _explain(self, server: VLLMServer, error: ReplicaUnavailableError) -> NoReturn:
        """Raise the error of a server that is not well, and WeightSyncError where it is: trying again will not help."""
        if not error.answered or error.busy:
            raise error
        await server.health(HEALTH_S)
        if OWN_METHOD in str(error):
            raise WeightSyncError(f"{error}; start the server with `sqlenv inference`") from error
        raise WeightSyncError(
            f"{error}. The server must see the folder {self._folder} under the same path; --weight_sync_dir names "
            "another one"
        ) from error

    def close(self) -> None:
        """Remove the checkpoints."""
        if not self._is_main:
            return
        for path in self._written:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # it holds something else, or is a volume
            self._folder.rmdir()
