"""The adapter only, over a folder that trainer and servers see: a few megabytes where `disk` writes the whole model.

The server must hold the base model that the adapter was trained on. Needs `--enable-lora` and
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 there, which `sqlenv inference --weight_sync lora` gives.

Guarantees:
- Each adapter that is prepared has a folder and a name of its own. A server never sees half of one, and a request that
  was sent under the earlier name still finds it: the last `KEPT` stay, in the folder and at the server.
- `send` leaves the new name in `server.model`. Sending again is harmless.
- An adapter that vLLM would refuse, or would compute differently without a word, is refused before training.

Why not one name, replaced in place: vLLM 0.31 offers it (`load_inplace`), but then reads the files again at every
forward pass, and the whole engine dies when they are gone. Its prefix cache is keyed by name and path, so an adapter
under a name and path of its own never meets blocks of earlier weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from peft import LoraConfig

from inference.adapters import unserved_settings
from inference.vllm.api import ReplicaError, ReplicaRejectedError, VLLMServer
from inference.weights.gather import write_adapter
from inference.weights.transport import WeightSyncError

KEPT = 4
"""Adapters that stay. vLLM may read one again while a request that asked for it is in flight, over several pushes."""

_FLAG = "start it with `sqlenv inference --weight_sync lora`"


def explain(error: ReplicaError, rank: int, folder: Path) -> WeightSyncError | None:
    """Return what to do about a refused adapter, or None when it may pass by itself."""
    text = str(error)
    if "max_lora_rank" in text:
        return WeightSyncError(f"{text}; the adapter has rank {rank}: start the server with --max_lora_rank {rank}")
    if "No adapter found" in text:
        return WeightSyncError(f"{text}; the server must see {folder} under the same path (--weight_sync_dir)")
    if "LoRA is not enabled" in text or "404: Not Found" in text:
        return WeightSyncError(f"{text}; the server takes no adapters: {_FLAG}")
    if "target modules" in text or isinstance(error, ReplicaRejectedError):
        return WeightSyncError(f"{text}; vLLM cannot serve this adapter: use --weight_sync disk")
    return None


class LoraTransport:
    """Writes adapters into `folder`.

    `gather` returns the adapter and its configuration; the weights are {} off the main process.
    """

    name = "lora"
    sends_all_weights = False

    def __init__(self, gather: Callable[[], tuple[Mapping[str, torch.Tensor], LoraConfig]], folder: Path) -> None:
        self._gather = gather
        self._folder = folder.absolute()
        self._paths: list[Path] = []
        self._rank = 0
        self._modules: set[str] = set()
        """That the adapter changes."""
        self._checked: set[str] = set()
        """Servers that were asked which modules an adapter reached."""

    def prepare(self, version: int, dtype: torch.dtype | None = None, *, constant: bool = False) -> None:
        """Write the adapter. Raises WeightSyncError, also when vLLM cannot serve such an adapter."""
        weights, config = self._gather()
        if found := unserved_settings(config.to_dict()):
            raise WeightSyncError(
                f"vLLM cannot serve an adapter with {', '.join(found)}: use --weight_sync disk, which sends the whole "
                "model, merged"
            )
        self._rank = int(config.r)
        self._modules = {_module(name) for name in weights if ".lora_A." in name or name.endswith(".lora_embedding_A")}
        path = self._folder / f"adapter-v{version:06d}-{len(self._paths)}"
        # Every rank knows the path: each may have to bring a server back.
        self._paths.append(path)
        if not weights:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)  # of an earlier run, resumed in this folder
            write_adapter(path, weights, config, dtype=dtype)
        except OSError as error:
            raise WeightSyncError(f"the adapter cannot be written to {path}: {error.strerror or error}") from error
        for old in self._paths[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    async def send(self, server: VLLMServer) -> None:
        """Have the server load the last adapter, and ask for it from now on. Raises EngineError."""
        path = self._paths[-1]
        try:
            await _load(server, path)
        except ReplicaError as error:
            if explained := explain(error, self._rank, self._folder):
                raise explained from error
            raise
        server.model = path.name
        if server.url not in self._checked:
            await self._check(server)
            self._checked.add(server.url)
        for old in self._paths[-KEPT - 1 : -KEPT]:
            await _unload(server, old)

    async def _check(self, server: VLLMServer) -> None:
        """Raise WeightSyncError when the server does not compute with a part of the adapter."""
        reached = {name for worker in await server.call_workers("sqlenv_adapted_modules") for name in worker}
        missing = sorted(self._modules - reached)
        # As many under other names: vLLM has its own for some architectures.
        if missing and len(reached) < len(self._modules):
            raise WeightSyncError(
                f"{server.url} does not take {len(missing)} of the adapter's {len(self._modules)} modules, such as "
                f"{missing[0]}: use --weight_sync disk"
            )

    def close(self) -> None:
        """Remove the adapters' folders."""
        for path in self._paths[-KEPT:]:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # it holds something else, or is a volume
            self._folder.rmdir()


def _module(name: str) -> str:
    """Return the module that a tensor of an adapter belongs to."""
    return name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0].removesuffix(".lora_embedding_A")


async def _load(server: VLLMServer, path: Path) -> None:
    call = {"lora_name": path.name, "lora_path": str(path)}
    try:
        await server.post("/v1/load_lora_adapter", json=call)
    except ReplicaRejectedError as error:
        if "already been loaded" not in str(error):
            raise
        # By us, or by an earlier run that used the same folder and had other weights.
        await _unload(server, path)
        await server.post("/v1/load_lora_adapter", json=call)


async def _unload(server: VLLMServer, path: Path) -> None:
    with suppress(ReplicaRejectedError):  # a server that was restarted has forgotten it
        await server.post("/v1/unload_lora_adapter", json={"lora_name": path.name})
