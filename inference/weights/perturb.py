"""Change every weight of a model for a while, and give every bit back.

Weights that a server has already cannot show whether a push arrives. So the proof at the start of a run pushes a
perturbed policy, and compares what the server then says with what the trainer's model says under the same
perturbation: one tensor that stayed behind is enough to tell the two apart.

Promises:

1. Inside, every floating point parameter of two elements or more differs from before, by enough to change the
   model's logprobs far beyond the rounding of float32. Outputs stay finite and as spread out as they were, roughly.
2. Afterwards, also after an exception, every parameter holds the bits that it held before.
3. No more memory than one tensor at a time, and a copy of the small ones (vectors and adapters): a matrix is rolled
   by one element in place, which is undone exactly.
4. Every process calls, and makes the same change to the same (shard of a) tensor; no collective is used.

FSDP1 and DeepSpeed ZeRO-3 keep their shards elsewhere than in the parameters, and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from inference.engine import EngineError
from inference.weights.gather import reshard, unwrapped

_SEED = 20_817
_SPREAD = 0.5
"""Noise, as a share of the element it is added to."""
_FLOOR = 0.3
"""Elements below this (a bias or LoRA's B before training: all 0) get noise as if they had this size."""


class PerturbError(EngineError):
    """The model's parameters cannot be changed in place."""


@contextmanager
def perturbed(model: nn.Module, *, trainable_only: bool = False) -> Iterator[None]:
    """Perturb the parameters for the `with` block; with `trainable_only`, those that an adapter push would carry."""
    _check(model)
    noise = torch.Generator().manual_seed(_SEED)
    done: set[int] = set()
    with ExitStack() as undo:
        # What FSDP2 gathered from other weights must not outlive them: neither at the start nor at the end.
        reshard(model)
        undo.callback(reshard, model)
        for name, parameter in unwrapped(model).named_parameters():
            tensor = _local(parameter)
            if tensor.numel() == 0 or tensor.data_ptr() in done or (trainable_only and not parameter.requires_grad):
                continue
            done.add(tensor.data_ptr())
            _perturb(name, tensor, noise, undo)
        yield


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


def _perturb(name: str, tensor: Tensor, noise: torch.Generator, undo: ExitStack) -> None:
    """Change the tensor in place, and register how to change it back."""
    adapter = "lora_" in name
    if tensor.ndim > 1 and not adapter:
        rolled = tensor.roll(1)
        if not torch.equal(rolled, tensor):
            undo.callback(_roll_back, tensor)
            tensor.copy_(rolled)
            return
    if not tensor.is_floating_point():
        return
    undo.callback(tensor.copy_, tensor.clone())
    unit = torch.rand(tensor.shape, generator=noise, dtype=torch.float32).mul_(2.0).sub_(1.0).to(tensor.device)
    tensor.copy_(tensor.float() + _SPREAD * unit * tensor.float().abs().clamp(min=_FLOOR))


def _roll_back(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(-1))
