"""Change each weight of a model by a chosen amount for a while, and give every bit back.

Weights that a server has already cannot show whether a push arrives. So the proof at the start of a run pushes a
perturbed policy; `proof` says by how much each tensor is to change, this module changes it.

Promises:

1. A tensor's change is its scale times its `direction`: the tensor's own elements with random signs, so that the
   policy stays the kind of policy that it was. What is 0 everywhere (a bias) gets elements of size 1 instead; LoRA's B,
   which is 0 before training and next to nothing at its beginning, gets `LORA_B_SIZE`.
2. Afterwards, also after an exception, every parameter holds the bits that it held before. Copies of the originals are
   kept in host memory meanwhile.
3. Every process calls, and makes the same change to the same (shard of a) tensor; no collective is used.

FSDP1 and DeepSpeed ZeRO-3 keep their shards elsewhere than in the parameters, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from inference.engine import EngineError
from inference.weights.gather import reshard, unwrapped

LORA_B_SIZE = 0.25
"""With A as PEFT starts it, rank 16 and alpha 32, B of this size changes what a layer gives by about as much again."""


class PerturbError(EngineError):
    """The model's parameters cannot be changed in place."""


def pushed_parameters(model: nn.Module, *, trainable_only: bool) -> dict[str, nn.Parameter]:
    """Return what a push carries, each storage once; with `trainable_only`, what a push of the adapter carries."""
    found: dict[str, nn.Parameter] = {}
    storages: set[int] = set()
    for name, parameter in unwrapped(model).named_parameters():
        tensor = _local(parameter)
        if not tensor.is_floating_point() or (trainable_only and not parameter.requires_grad):
            continue
        if tensor.numel() and tensor.data_ptr() not in storages:
            storages.add(tensor.data_ptr())
            found[name] = parameter
    return found


def direction(name: str, tensor: Tensor) -> Tensor:
    """Return the change of a tensor at scale 1, the same in every process.

    The signs are a product of one random vector per dimension: cheap at any size.
    """
    chance = torch.Generator().manual_seed(crc32(name.encode()))
    if "lora_B" in name or "lora_embedding_B" in name:
        found = torch.full_like(tensor, LORA_B_SIZE)
    else:
        found = tensor.clone() if tensor.any() else torch.ones_like(tensor)
    for axis, size in enumerate(tensor.shape):
        signs = torch.randint(0, 2, (size,), generator=chance).mul_(2).sub_(1)
        shape = [1] * tensor.ndim
        shape[axis] = size
        found *= signs.to(found).view(shape)
    return found


class Perturbation:
    """The parameters that were changed, and what they were before."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], originals: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._originals = originals

    def change(self, name: str) -> Tensor:
        """Return by how much a tensor was changed, rounding included; of this process's shard."""
        tensor = _local(self._parameters[name])
        return tensor - self.original(name)

    def original(self, name: str) -> Tensor:
        """Return what a tensor was, on its device."""
        return self._originals[name].to(self._parameters[name].device)

    @contextmanager
    def left_behind(self, name: str) -> Iterator[None]:
        """Put one tensor back for the `with` block, as it would be at a server that did not take it."""
        tensor = _local(self._parameters[name])
        changed = tensor.clone()
        tensor.copy_(self.original(name))
        try:
            yield
        finally:
            tensor.copy_(changed)


@contextmanager
def perturbed(
    model: nn.Module, scales: Mapping[str, float] | float, *, trainable_only: bool = False
) -> Iterator[Perturbation]:
    """Perturb `pushed_parameters` for the `with` block. `scales` has one for each name, or is the one for all.

    Raises PerturbError.
    """
    _check(model)
    originals: dict[str, Tensor] = {}
    with ExitStack() as undo:
        # What FSDP2 gathered from other weights must not outlive them: neither at the start nor at the end.
        reshard(model)
        undo.callback(reshard, model)
        parameters = pushed_parameters(model, trainable_only=trainable_only)
        for name, parameter in parameters.items():
            tensor = _local(parameter)
            scale = scales if isinstance(scales, float) else scales[name]
            originals[name] = tensor.to("cpu", copy=True)
            undo.callback(tensor.copy_, originals[name])
            tensor.add_(direction(name, tensor), alpha=scale)
        yield Perturbation(parameters, originals)


def _check(model: nn.Module) -> None:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise PerturbError("FSDP1 cannot be perturbed: use FSDP2 (fsdp_version: 2)")
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise PerturbError("DeepSpeed ZeRO-3 cannot be perturbed: use ZeRO-2 or FSDP2")


def _local(parameter: nn.Parameter) -> Tensor:
    """Return what this process holds of the parameter; writing to it changes the parameter."""
    with torch.no_grad():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return local.detach()
