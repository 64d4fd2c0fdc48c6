"""A rank whose weights FSDP has not brought yet: `fsdp_worker.py URL FOLDER`, by torchrun, for test_weight_sync.

It loads as transformers does for `fsdp_cpu_ram_efficient_loading`: the main rank has the weights, the others zeros. The
first push and its proof happen then, as in a run's evaluation before training. Then the model is shared out by FSDP2,
changed, and pushed again. Each rank leaves what it saw in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from inference.engine import EngineError
from inference.vllm.engine import VLLMEngine
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.probe import token_logprobs
from inference.weights.proof import Evidence
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


def main(url: str, folder: Path) -> None:
    """Push twice, and write what was seen."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.new_group(backend="gloo"))
    # Only for the loading: accelerate's own part of FSDP refuses a machine without GPUs.
    flags = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    os.environ |= flags
    model = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    for name in flags:
        del os.environ[name]
    accelerator = Accelerator(cpu=True)
    seen: dict[str, object] = {"has_weights": any(bool(parameter.any()) for parameter in model.parameters())}
    proved: list[Evidence] = []
    engine = VLLMEngine([url], stop_ids=[3], vocab_size=model.config.vocab_size)
    pusher = WeightPusher(
        lambda: model,
        engine,
        DiskTransport(lambda: full_weights(model, accelerator), folder / "weights", is_main=ranks.is_main),
        partial(token_logprobs, model),
        tuple(range(40, 60)),
        ranks=ranks,
        has_weights=ranks.is_main,
        on_proof=proved.extend,
    )
    engine.restore_with(pusher.restore)
    try:
        pusher.push(0)
        seen["proved"] = len(proved)
        share_out(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.02)
        pusher.push(1)
    except EngineError as error:
        seen["error"] = str(error)
    (folder / f"rank{ranks.index}.json").write_text(json.dumps(seen))
    dist.barrier()
    pusher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
