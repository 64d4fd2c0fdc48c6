"""A rank that trains with both trainers: `two_ranks.py FOLDER`, by torchrun, for test_grpo.

It leaves "RANK agrees" in FOLDER once the runs agree, and so do both readings of a model whose layers FSDP2 shares out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.integration.training import surroundings_in
from tests.trainer.grpo.made_up import train_on, weights
from trainer.grpo import SQLEnvTrainer
from trainer.logprobs import IGNORED, label_logprobs
from trainer.tiny import BASE_CHECKPOINT


def shared_out(ids: Tensor, labels: Tensor, *, less: bool) -> tuple[Tensor, Tensor]:
    """Logprobs, and the gradient of the embedding that is the head, too."""
    model = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mask = torch.ones_like(ids)
    if less:
        output = label_logprobs(model, ids, mask, labels, one_pass=True)
    else:
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    output.log_probs.sum().backward()
    return output.log_probs.detach(), model.get_input_embeddings().weight.grad.full_tensor()


def main(folder: Path) -> None:
    """Run both, and compare."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(BASE_CHECKPOINT)
    with surroundings_in(folder / "cache"):
        flags = {"optim": "sgd", "learning_rate": 0.1, "loss_type": "dapo"}
        runs = [
            train_on(BASE_CHECKPOINT, tokenizer, folder / kind.__name__, kind, **flags)[0]
            for kind in (GRPOTrainer, SQLEnvTrainer)
        ]
    assert runs[0].accelerator.num_processes == 2
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=0, atol=1e-6)

    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(4, 100, (3, 20 + 9 * dist.get_rank()), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.5, IGNORED)
    for found, expected in zip(*(shared_out(ids, labels, less=less) for less in (True, False)), strict=True):
        torch.testing.assert_close(found, expected)
    (folder / f"rank-{dist.get_rank()}").write_text(f"{dist.get_rank()} agrees")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
