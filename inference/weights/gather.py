"""Bring the trainer's weights together, whatever wraps the model, and write them for a server to read.

Handled: a plain model, DDP, FSDP2, FSDP1, DeepSpeed ZeRO-3 (its path is not covered by a test), and LoRA or DoRA of
PEFT on top of any of them. What cannot be brought into a plain checkpoint exactly raises GatherError: quantised
weights, several active adapters, other methods of PEFT, a tied output head that an adapter changes alone.

Guarantees:

1. Every process calls; the main process gets the weights, the others get none. Which collectives run, and their
   order, depends on the model alone.
2. The model is only read. Adapters are merged into new tensors (W + scaling * B @ A, summed in float32 and rounded
   once), never into the parameters, where unmerging would leave rounding errors behind.
3. Tensors that no wrapper shards and no adapter changes are not copied: they alias the parameters, and the next
   optimiser step changes them. Sharded ones are gathered one at a time and kept in the main process's host memory.
4. A folder appears under its name complete, or not at all. A reader finds it all; a machine that loses power may not.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from huggingface_hub import split_torch_state_dict_into_shards
from peft import LoraConfig, PeftModel, PeftType, get_peft_model_state_dict
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from inference.engine import EngineError

SHARD_BYTES = 5_000_000_000
"""Largest file of a checkpoint, unless one tensor alone is larger."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class GatherError(EngineError):
    """The model's weights cannot be brought into a plain checkpoint; the message says why."""


def full_weights(model: nn.Module, accelerator: Accelerator) -> dict[str, Tensor]:
    """Return what a plain Hugging Face checkpoint of the model would hold, adapters merged; {} off the main process.

    `model` is what `accelerator.prepare` returned, or the plain model. Every process calls.
    """
    base = unwrapped(model)
    peft = base if isinstance(base, PeftModel) else None
    _refuse_quantised(base)
    adapted = {} if peft is None else _adapted(peft)
    source = _Source(model, accelerator)
    weights: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    with torch.no_grad():
        for target in _targets(list(source.tensors), adapted):
            if len(target.sources) == 1:
                first = names.setdefault(id(source.tensors[target.sources[0]]), target.name)
                if first != target.name:  # tied: gathered before
                    if accelerator.is_main_process:
                        weights[target.name] = weights[first]
                    continue
            parts = [source.take(name) for name in target.sources]
            if accelerator.is_main_process:
                weights[target.name] = source.settle(target.merge(*parts))
    if not accelerator.is_main_process:
        return {}
    plain = base if peft is None else peft.get_base_model()
    if not isinstance(plain, PreTrainedModel):
        return weights
    _leave_out_tied_head(plain, weights)
    converted: dict[str, Tensor] = revert_weight_conversion(plain, weights)
    return converted


def adapter_weights(model: nn.Module, accelerator: Accelerator) -> tuple[dict[str, Tensor], LoraConfig]:
    """Return the active LoRA adapter as `save_pretrained` of PEFT names it, and its configuration.

    The tensors are {} off the main process. Every process calls. Unlike `save_pretrained`, it never adds embeddings
    that are not trained (PEFT does when the vocabulary was resized, after asking the Hub).
    """
    peft = unwrapped(model)
    if not isinstance(peft, PeftModel):
        raise GatherError("the model has no adapter: it is not a PEFT model")
    name = _active(peft.active_adapters, "model")
    config = peft.peft_config[name]
    if config.peft_type != PeftType.LORA:
        raise GatherError(f"only LoRA adapters can be pushed alone, not {config.peft_type}")
    source = _Source(model, accelerator)
    weights: dict[str, Tensor] = {}
    # PEFT sorts the names, as its modules have them: what it chooses is gathered, and nothing else.
    own = [*peft.named_parameters(remove_duplicate=False), *peft.named_buffers(remove_duplicate=False)]
    names = {raw: _clean(raw) for raw, _ in own if _clean(raw) in source.tensors}
    if names:
        chosen = get_peft_model_state_dict(peft, state_dict=names, adapter_name=name, save_embedding_layers=False)
        with torch.no_grad():
            for key, tensor in chosen.items():
                whole = source.take(tensor)
                if accelerator.is_main_process:
                    weights[_clean(key)] = source.settle(whole)
    saved = copy.deepcopy(config)
    saved.inference_mode = True
    saved.base_model_name_or_path = saved.base_model_name_or_path or peft.get_base_model().name_or_path or None
    return weights, saved


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, FSDP1, DeepSpeed or `torch.compile`."""
    inner: nn.Module = extract_model_from_parallel(model, keep_torch_compile=False)
    return inner


def is_shared_out(model: nn.Module) -> bool:
    """Return whether each process holds a part of the model only, so that all must take part in a forward pass.

    What a model will be wrapped in says nothing of it: before that, each process holds a whole one, or, with FSDP's
    RAM-efficient loading, the main process holds the weights and the others zeros.
    """
    sharding = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, sharding) for module in model.modules()) or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put its shards back in place: a forward pass without a backward pass leaves some of them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `weights`, rounded to `dtype`, as the safetensors file or files (with an index) of a checkpoint.

    `folder` must not exist; a reader sees it complete or not at all. Raises FileExistsError.
    """
    split = split_torch_state_dict_into_shards(dict(weights), max_shard_size=shard_bytes)
    with _appearing(folder) as partial:
        for file, names in split.filename_to_tensors.items():
            _save({name: weights[name] for name in names}, partial / file, dtype)
        if split.is_sharded:
            size = sum(tensor.numel() * _dtype_of(tensor, dtype).itemsize for tensor in weights.values())
            index = {"metadata": {"total_size": size}, "weight_map": split.tensor_to_filename}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_adapter(
    folder: Path, weights: Mapping[str, Tensor], config: LoraConfig, *, dtype: torch.dtype | None = None
) -> None:
    """Write an adapter, rounded to `dtype`, as PEFT reads it. `folder` must not exist; raises FileExistsError."""
    with _appearing(folder) as partial:
        _save(weights, partial / "adapter_model.safetensors", dtype)
        config.save_pretrained(str(partial))


# --- from the model's own names to a checkpoint's ---------------------------------------------------------------


def _alone(weight: Tensor) -> Tensor:
    return weight


@dataclass(frozen=True, slots=True)
class _Target:
    """One tensor of the checkpoint: its name, the tensors it is made of, and how."""

    name: str
    sources: tuple[str, ...]
    merge: Callable[..., Tensor] = _alone


@dataclass(frozen=True, slots=True)
class _Adapted:
    """What PEFT put in a module's place: which part of it holds the module, and what is merged into its weight."""

    kept: str
    adapters: tuple[str, ...] = ()
    merge: Callable[..., Tensor] = _alone


def _targets(names: list[str], adapted: Mapping[str, _Adapted]) -> Iterator[_Target]:
    for name in names:
        path = _owner(name, adapted)
        if path is None:
            yield _Target(_plain(name), (name,))
            continue
        owner = adapted[path]
        kept = f"{path}.{owner.kept}."
        if not name.startswith(kept):
            continue  # an adapter's own tensor, or the original of a module that was trained as a whole
        tensor = name.removeprefix(kept)
        if tensor == "weight" and owner.adapters:
            sources = (name, *(f"{path}.{part}" for part in owner.adapters))
            yield _Target(_plain(f"{path}.weight"), sources, owner.merge)
        else:
            yield _Target(_plain(f"{path}.{tensor}"), (name,))


def _owner(name: str, adapted: Mapping[str, _Adapted]) -> str | None:
    """Return the path of the adapted module that holds the tensor."""
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((path for path in paths if path in adapted), None)


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _refuse_quantised(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise GatherError(f"{_clean(name)} is quantised ({parameter.dtype}): push the adapter alone")


def _adapted(peft: PeftModel) -> dict[str, _Adapted]:
    config = peft.peft_config[_active(peft.active_adapters, "model")]
    if config.is_prompt_learning:
        raise GatherError(f"{config.peft_type} is no change of weights: it cannot be merged")
    found = {}
    for raw_path, module in peft.named_modules():
        path = _clean(raw_path)
        if isinstance(module, ModulesToSaveWrapper):
            adapters = module.active_adapters
            kept = f"modules_to_save.{_active(adapters, path)}" if adapters else "original_module"
            found[path] = _Adapted(kept)
        elif isinstance(module, BaseTunerLayer):
            found[path] = _lora(path, module)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise GatherError(f"{path}: merging {type(module).__name__} is not supported")
    return found


def _active(adapters: list[str], where: str) -> str:
    if len(adapters) != 1:
        raise GatherError(f"{where}: exactly one adapter must be active, not {adapters}")
    return adapters[0]


def _lora(path: str, layer: BaseTunerLayer) -> _Adapted:
    if type(layer) not in (LoraLinear, LoraEmbedding):
        raise GatherError(f"{path}: merging a {type(layer).__module__}.{type(layer).__name__} is not supported")
    if layer.merged:
        raise GatherError(f"{path}: the adapter is merged into the model already; unmerge it")
    embedding = type(layer) is LoraEmbedding
    holds = layer.lora_embedding_A if embedding else layer.lora_A
    adapters = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in holds]
    if not adapters:
        return _Adapted("base_layer")
    name = _active(adapters, path)
    variant = layer.lora_variant.get(name)
    if layer.lora_bias[name] or type(variant) not in (NoneType, DoraLinearVariant):
        raise GatherError(f"{path}: of LoRA's variants, only DoRA of linear layers can be merged, and no lora_bias")
    transposed = embedding or layer.fan_in_fan_out
    scaling = layer.scaling[name]
    if embedding:
        factors: tuple[str, ...] = (f"lora_embedding_A.{name}", f"lora_embedding_B.{name}")
    else:
        factors = (f"lora_A.{name}.weight", f"lora_B.{name}.weight")
    if variant is not None:
        factors = (*factors, f"lora_magnitude_vector.{name}.weight")
    return _Adapted("base_layer", factors, lambda *parts: _merged(*parts, scaling=scaling, transposed=transposed))


def _merged(
    weight: Tensor, a: Tensor, b: Tensor, magnitude: Tensor | None = None, *, scaling: float, transposed: bool
) -> Tensor:
    """Return W + scaling * B @ A, or DoRA's rescaling of it, in the dtype of W; summed in float32 at least."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    out_first = weight.T if transposed else weight
    total = torch.addmm(out_first.to(dtype), b.to(dtype), a.to(dtype), alpha=scaling)
    if magnitude is not None:
        total *= (magnitude.to(dtype) / torch.linalg.vector_norm(total, dim=1))[:, None]
    return (total.T if transposed else total).to(weight.dtype).contiguous()


def _leave_out_tied_head(plain: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Drop the output head where the configuration ties it: a checkpoint holds the embeddings only."""
    head, embeddings = plain.get_output_embeddings(), plain.get_input_embeddings()
    if head is None or not plain.config.get_text_config(decoder=True).tie_word_embeddings:
        return
    paths = {id(module): _clean(path) for path, module in plain.named_modules()}
    head_name, embeddings_name = f"{paths[id(head)]}.weight", f"{paths[id(embeddings)]}.weight"
    found = weights.pop(head_name, None)
    if found is None:
        return
    expected = weights[embeddings_name]
    if found is not expected and not torch.equal(found, expected):
        raise GatherError(
            f"the configuration ties {head_name} to {embeddings_name}, and training made them differ: no checkpoint "
            "of this architecture can hold both. Train neither or both, or load the model with "
            "tie_word_embeddings=False"
        )


# --- reading sharded tensors ------------------------------------------------------------------------------------


class _Source:
    """The model's tensors by their clean names. Taking a sharded one is a collective."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        self._device = accelerator.device
        reshard(model)
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            # FSDP1 gathers everything at once; when it offloads to the host, the main process alone has tensors then.
            options = StateDictOptions(full_state_dict=True, cpu_offload=self._device.type != "cpu")
            state: Mapping[str, Any] = get_model_state_dict(model, options=options)
        else:
            state = unwrapped(model).state_dict(keep_vars=True)
        self.tensors: dict[str, Tensor] = {_clean(name): tensor for name, tensor in state.items()}
        self._sharded = False
        for tensor in self.tensors.values():
            self._sharded |= isinstance(tensor, DTensor) or hasattr(tensor, "ds_id")

    def take(self, name: str) -> Tensor:
        """Return the whole tensor, on the model's device."""
        tensor = self.tensors[name]
        if isinstance(tensor, DTensor):
            # Shards that are offloaded to the host have no process group there.
            whole: Tensor = tensor.detach().to(self._device).full_tensor()  # type: ignore[attr-defined]
            return whole
        if hasattr(tensor, "ds_id"):
            with importlib.import_module("deepspeed").zero.GatheredParameters([tensor]):
                return tensor.detach().clone()
        return tensor.detach()

    def settle(self, tensor: Tensor) -> Tensor:
        """Return the tensor where it is to stay: off the device when the device holds a shard of the model only."""
        return tensor.cpu() if self._sharded else tensor


def _clean(name: str) -> str:
    """Remove from a name what wrappers around modules put into it."""
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name


# --- files ------------------------------------------------------------------------------------------------------


def _dtype_of(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is written in."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def _save(weights: Mapping[str, Tensor], file: Path, dtype: torch.dtype | None) -> None:
    """Write one file. Its format has neither shared nor strided memory: those tensors are copied."""
    storages: set[int] = set()
    ready = {}
    for name, given in weights.items():
        wanted = _dtype_of(given, dtype)
        # Off the device: there is no room for two of a model there.
        tensor = given if given.dtype is wanted else given.to("cpu", wanted)
        storage = tensor.untyped_storage().data_ptr()
        shared = storage in storages
        storages.add(storage)
        ready[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    save_file(ready, file, metadata={"format": "pt"})


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into that becomes `folder` at the end."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists: each version is written to a folder of its own")
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors makes it for its owner alone, and the server may run as somebody else
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_to_disk(path: Path) -> None:
    """Return when what a file holds, or which files a folder holds, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
