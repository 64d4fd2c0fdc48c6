"""The first push and its proof in bfloat16 on both sides: two processes, two implementations that round differently.

The tiny policy in bfloat16; what the proof finds of a real model's is in docs/inference.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from inference.launch.plan import WeightSyncMode
from inference.vllm.engine import VLLMEngine
from inference.weights.disk import DiskTransport
from inference.weights.gather import adapter_weights, full_weights
from inference.weights.lora import LoraTransport
from inference.weights.probe import token_logprobs
from inference.weights.proof import LEAST_SIGNAL, NEARER, Evidence
from inference.weights.push import WeightPusher
from inference.weights.transport import Transport, WeightSyncError
from tests.fork_server import ForkServer
from tests.integration.vllm_server import VLLMHandle, vllm_server
from trainer.tiny import BASE_CHECKPOINT

BFLOAT16 = ("--dtype", "bfloat16")
FLOAT32_NOISE = 1e-4
"""In nats: what bfloat16 rounds is far more than that."""


def policy() -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.bfloat16)
    return model


def prove(
    model: nn.Module, server: VLLMHandle, transport: Transport, pushed: Callable[[], None] = lambda: None
) -> Evidence:
    """Push as a run does at its start, and once more; returns what the proof found. `pushed` is called then."""
    found: list[Evidence] = []
    engine = VLLMEngine([server.url], stop_ids=[3], vocab_size=1)
    logprobs = partial(token_logprobs, model)
    pusher = WeightPusher(lambda: model, engine, transport, logprobs, range(40, 60), on_proof=found.extend)
    engine.restore_with(pusher.restore)
    try:
        pusher.push(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.05)
        pusher.push(1)
        pushed()
    finally:
        pusher.close()
    (evidence,) = found
    return evidence


def is_proof(evidence: Evidence) -> bool:
    return (
        evidence.noise > FLOAT32_NOISE
        and evidence.without_changes > NEARER * evidence.with_changes
        and evidence.weakest > LEAST_SIGNAL
        and not evidence.lacking
    )


def test_all_weights(vllm_forks: ForkServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, accelerator = policy(), Accelerator(cpu=True)
    kept = "model.layers.1.mlp.down_proj.weight"
    at_the_start = model.state_dict()[kept].clone()

    def all_but_one() -> Mapping[str, Tensor]:
        return {**full_weights(model, accelerator), kept: at_the_start}

    def pushing(gather: Callable[[], Mapping[str, Tensor]]) -> DiskTransport:
        return DiskTransport(gather, tmp_path / "weights")

    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path, *BFLOAT16) as server, caplog.at_level(logging.WARNING):
        evidence = prove(model, server, pushing(lambda: full_weights(model, accelerator)))
        assert is_proof(evidence), str(evidence)
        at_the_start = model.state_dict()[kept].clone()
        with pytest.raises(WeightSyncError, match=kept):
            prove(model, server, pushing(all_but_one))


def written(folder: Path) -> set[torch.dtype]:
    """The dtypes of what a transport has left in its folder."""
    found = {tensor.dtype for file in folder.glob("*/*.safetensors") for tensor in load_file(file).values()}
    assert found
    return found


def test_float32_weights_are_rounded_to_the_servers_dtype_before_they_are_sent(
    vllm_forks: ForkServer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path, *BFLOAT16, weight_sync=WeightSyncMode.LORA) as server:
        model = get_peft_model(policy().float(), config)
        adapter = tmp_path / "adapter"
        transport = LoraTransport(lambda: adapter_weights(model, accelerator), adapter)
        seen: list[set[torch.dtype]] = []
        assert is_proof(prove(model, server, transport, lambda: seen.append(written(adapter))))
        full = tmp_path / "full"
        plain = policy().float()
        disk = DiskTransport(lambda: full_weights(plain, accelerator), full)
        assert is_proof(prove(plain, server, disk, lambda: seen.append(written(full))))
    assert seen == [{torch.bfloat16}, {torch.bfloat16}]


def test_an_adapter(vllm_forks: ForkServer, tmp_path: Path) -> None:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(policy(), config)
    assert isinstance(model, PeftModel)
    accelerator = Accelerator(cpu=True)
    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path, *BFLOAT16, weight_sync=WeightSyncMode.LORA) as server:
        transport = LoraTransport(lambda: adapter_weights(model, accelerator), tmp_path / "weights")
        evidence = prove(model, server, transport)
    assert is_proof(evidence), str(evidence)
