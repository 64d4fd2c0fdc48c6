"""Pushes in bfloat16 on both sides: two processes, two implementations that round differently.

The tiny policy in bfloat16; the gap of a real model is in docs/inference.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from inference.launch.plan import WeightSyncMode
from inference.vllm.engine import VLLMEngine
from inference.weights.check import GROWTH, token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import adapter_weights, full_weights
from inference.weights.lora import LoraTransport
from inference.weights.push import WeightPusher
from inference.weights.transport import SyncCheck, Transport, WeightSyncError
from tests.fork_server import ForkServer
from tests.integration.vllm_server import VLLMHandle, vllm_server
from trainer.tiny import BASE_CHECKPOINT

BFLOAT16 = ("--dtype", "bfloat16")
FLOAT32_GAP = 1e-4
"""In nats: what bfloat16 rounds is far more than that."""


def policy() -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.bfloat16)
    return model


def gaps(
    model: nn.Module, server: VLLMHandle, transport: Transport, pushed: Callable[[], None] = lambda: None
) -> list[float]:
    """Push as a run does at its start, and once more; returns the gap after each. `pushed` is called then."""
    engine = VLLMEngine([server.url], stop_ids=[3], vocab_size=1)
    logprobs = partial(token_logprobs, model)
    pusher = WeightPusher(lambda: model, engine, transport, logprobs, range(40, 60), check=SyncCheck.STRICT)
    engine.restore_with(pusher.restore)
    found = []
    try:
        for version in range(2):
            pusher.push(version)
            assert pusher.last_gap is not None
            found.append(pusher.last_gap)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.05)
        pushed()
    finally:
        pusher.close()
    return found


def are_rounding(found: list[float]) -> bool:
    """Whether they are what bfloat16 rounds."""
    first, second = found
    return FLOAT32_GAP < first < 0.1 and second < GROWTH * first


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
        assert are_rounding(gaps(model, server, transport, lambda: seen.append(written(adapter))))
        full = tmp_path / "full"
        plain = policy().float()
        disk = DiskTransport(lambda: full_weights(plain, accelerator), full)
        assert are_rounding(gaps(plain, server, disk, lambda: seen.append(written(full))))
    assert seen == [{torch.bfloat16}, {torch.bfloat16}]


def test_an_adapter_that_arrives_in_part_is_found_out(vllm_forks: ForkServer, tmp_path: Path) -> None:
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(policy(), config)
    accelerator = Accelerator(cpu=True)
    lost = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"

    def without_one() -> tuple[Mapping[str, Tensor], LoraConfig]:
        weights, saved = adapter_weights(model, accelerator)
        return {**weights, lost: torch.zeros_like(weights[lost])}, saved

    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path, *BFLOAT16, weight_sync=WeightSyncMode.LORA) as server:
        with pytest.raises(WeightSyncError, match=r"model\.layers\.1\.mlp\.down_proj"):
            gaps(model, server, LoraTransport(without_one, tmp_path / "part"))
        assert are_rounding(
            gaps(model, server, LoraTransport(lambda: adapter_weights(model, accelerator), tmp_path / "all"))
        )
