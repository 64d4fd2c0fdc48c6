"""The adapter transport against a real vLLM server on the CPU, and a PEFT model in float32."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.server_process import ROOT
from inference.engine import Sampling
from inference.launch.plan import WeightSyncMode
from inference.vllm.api import ReplicaRejectedError, VLLMServer
from inference.weights.gather import adapter_weights
from inference.weights.lora import KEPT, LoraTransport
from inference.weights.transport import WeightSyncError
from tests.integration.vllm_server import VLLMHandle, vllm_server
from tests.logprobs import logprobs_of

BASE = ROOT / "trainer" / "tiny" / "base"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = tuple(range(20, 84))
SAME = 5e-4
"""Of a logprob, in float32."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    with vllm_server(BASE, tmp_path_factory.mktemp("lora"), weight_sync=WeightSyncMode.LORA) as handle:
        yield handle


@pytest_asyncio.fixture
async def server(process: VLLMHandle) -> AsyncIterator[VLLMServer]:
    async with httpx.AsyncClient(timeout=60.0) as client:
        yield VLLMServer(process.url, client)


def adapted(rank: int = 8, modules: list[str] = MODULES) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    found = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM")
    )
    train(found, seed=0)
    return found.eval()


def train(model: PeftModel, seed: int) -> None:
    """Change the adapter, B included, by far more than an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)


def transport_of(model: PeftModel, folder: Path) -> LoraTransport:
    accelerator = Accelerator(cpu=True)
    return LoraTransport(lambda: adapter_weights(model, accelerator), folder)


async def worst(server: VLLMServer, model: PeftModel) -> float:
    """Return the largest difference of a logprob between what the server generates and the model."""
    done = await server.complete(PROMPT, Sampling(8), seed=1, stop_ids=())
    ours = logprobs_of(model, PROMPT, done.token_ids)
    return max(abs(a - b) for a, b in zip(ours, done.logprobs, strict=True))


async def test_each_push_is_what_the_server_generates_with(server: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path / "sync")
    names: list[str] = []
    for version in range(1, KEPT + 2):
        train(model, seed=version)
        transport.prepare(version)
        if names:
            assert await worst(server, model) > 0.05  # the changed weights have not been sent
        await transport.send(server)
        names.append(server.model)
        # The prefix cache is not reset: blocks of the earlier adapter must not be met.
        assert await worst(server, model) < SAME

    assert len(set(names)) == KEPT + 1
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == sorted(names[1:])
    server.model = names[0]
    with pytest.raises(ReplicaRejectedError, match="does not exist"):
        await worst(server, model)
    server.model = names[1]  # a request that was sent before a push
    assert await worst(server, model) > 0.05

    transport.close()
    assert not (tmp_path / "sync").exists()


async def test_a_request_in_flight_ends_with_the_adapter_that_it_began_with(server: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path)
    transport.prepare(1)
    await transport.send(server)
    earlier = asyncio.create_task(server.complete(PROMPT, Sampling(150), seed=1, stop_ids=()))
    await asyncio.sleep(0)  # it is sent, under the name of now
    train(model, seed=9)
    transport.prepare(2)
    await transport.send(server)
    assert await worst(server, model) < SAME

    done = await earlier
    train(model, seed=0)
    ours = logprobs_of(model, PROMPT, done.token_ids)
    assert max(abs(a - b) for a, b in zip(ours, done.logprobs, strict=True)) < SAME
    transport.close()


async def test_sending_again_and_a_folder_of_an_earlier_run(server: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path)
    transport.prepare(1)
    await transport.send(server)
    await transport.send(server)
    assert await worst(server, model) < SAME

    train(model, seed=5)
    resumed = transport_of(model, tmp_path)
    resumed.prepare(1)
    await resumed.send(server)
    await server.reset_prefix_cache()
    assert await worst(server, model) < SAME
    resumed.close()


async def test_what_the_server_cannot_take_is_explained(server: VLLMServer, tmp_path: Path) -> None:
    large = transport_of(adapted(rank=32), tmp_path / "large")
    large.prepare(1)
    with pytest.raises(WeightSyncError, match="--max_lora_rank 32"):
        await large.send(server)
    large.close()

    unseen = transport_of(adapted(), tmp_path / "unseen")
    unseen.prepare(1)
    unseen.close()
    with pytest.raises(WeightSyncError, match="--weight_sync_dir"):
        await unseen.send(server)

    await server.health(10.0)  # none of it harmed the server
