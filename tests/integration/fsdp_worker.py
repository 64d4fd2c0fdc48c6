"""A rank of a sharded trainer that pushes weights: `fsdp_worker.py HOW URL FOLDER`, by torchrun, for test_weight_sync.

HOW is `late`: it loads as transformers does for `fsdp_cpu_ram_efficient_loading`, the main rank has the weights and the
others zeros. The first push happens then, as in a run's evaluation before training; then FSDP2 shards the model. Or it
is `fsdp1`: FSDP1 with flat parameters (`use_orig_params=False`) shards the model before the first push. In both, the
weights are changed and pushed again. Each rank leaves what it saw in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM

from inference.engine import EngineError
from inference.vllm.engine import VLLMEngine
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.push import WeightPusher
from trainer.ranks import Ranks
from trainer.tiny import BASE_CHECKPOINT


def share_out(model: nn.Module) -> None:
    """Do as accelerate does: shards, and in them the main rank's weights."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if dist.get_rank() == 0 else {}, options=options)


def flat_shards(model: nn.Module) -> nn.Module:
    """Shard the model by FSDP1, each unit's parameters in one flat tensor."""
    units = ModuleWrapPolicy({type(layer) for layer in model.get_submodule("model.layers").children()})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=False)


def load(how: str) -> nn.Module:
    """Load the policy; for `late` as transformers does for FSDP."""
    # Only for the loading: accelerate's own part of FSDP refuses a machine without GPUs.
    flags = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"} if how == "late" else {}
    os.environ |= flags
    model: nn.Module = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    for name in flags:
        del os.environ[name]
    return model


def main(how: str, url: str, folder: Path) -> None:
    """Push twice, and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain = load(how)
    accelerator = Accelerator(cpu=True)
    ranks = Ranks(PartialState())
    seen: dict[str, object] = {"has_weights": any(bool(parameter.any()) for parameter in plain.parameters())}
    model = flat_shards(plain) if how == "fsdp1" else plain
    engine = VLLMEngine([url], stop_ids=[3], vocab_size=1_000)
    pusher = WeightPusher(
        lambda: model,
        engine,
        DiskTransport(lambda: full_weights(model, accelerator), folder / "weights", is_main=ranks.is_main),
        partial(token_logprobs, model),
        tuple(range(40, 60)),
        ranks=ranks,
        has_weights=ranks.is_main or how != "late",
    )
    engine.restore_with(pusher.restore)
    try:
        pusher.push(0)
        if how == "late":
            share_out(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        pusher.push(1)
        seen["pushed"] = pusher.last_gap is not None and pusher.last_gap < 1e-3
    except EngineError as error:
        seen["error"] = str(error)
    (folder / f"rank{ranks.index}.json").write_text(json.dumps(seen))
    dist.barrier()
    pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
