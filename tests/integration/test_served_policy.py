"""`sqlenv evaluate --use_vllm`: the same numbers as in process, and none from a server with other weights.

The server is started with an adapter, and so serves its base, too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import sqlenv
from benchmarks.server_process import reserved_ports
from env_server.cache import CACHE_VARIABLE
from inference.launch.plan import WeightSyncMode
from inference.vllm.api import NEW_PROCESS, VLLMServer
from inference.vllm.engine import VLLMEngine
from tests.integration.vllm_server import VLLMHandle, vllm_server
from trainer.tiny import BASE_CHECKPOINT

Captured = pytest.CaptureFixture[str]


def save_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter on the tiny policy that changes its play."""
    base = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    modules = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=24, lora_alpha=24, target_modules=modules, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.02, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter"), seed=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[VLLMHandle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        with vllm_server(adapter, tmp_path_factory.mktemp("vllm"), weight_sync=WeightSyncMode.LORA) as handle:
            yield handle


def evaluate(policy: Path | str, *flags: str) -> int:
    return sqlenv.main(["evaluate", "--policy", str(policy), "--episodes", "24", "--max_turn_length", "64", *flags])


def on(server: VLLMHandle) -> tuple[str, ...]:
    return ("--use_vllm", "--vllm_server_base_url", server.url)


def played(policy: Path, file: Path, capsys: Captured, *flags: str) -> tuple[dict[str, object], list[str]]:
    """Evaluate, and return the summary without the policy's name, and the episodes."""
    assert evaluate(policy, "--json", "--episodes_out", str(file), *flags) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary, sorted(file.read_text().splitlines())


def test_it_plays_as_the_model_does_in_process(
    server: VLLMHandle, adapter: Path, tmp_path: Path, capsys: Captured
) -> None:
    further = save_adapter(tmp_path / "further", seed=1)
    texts = []
    for policy in (BASE_CHECKPOINT, adapter, further):
        in_process = played(policy, tmp_path / "hf.jsonl", capsys)
        assert played(policy, tmp_path / "vllm.jsonl", capsys, *on(server)) == in_process
        texts.append("".join(in_process[1]))
    assert len(set(texts)) == 3, "each adapter plays in its own way"


async def test_the_server_was_started_with_the_adapter(server: VLLMHandle, adapter: Path) -> None:
    async with VLLMEngine([server.url], stop_ids=[0], vocab_size=1).client() as client:
        here = VLLMServer(server.url, client)
        assert (await here.served_model()).name == str(BASE_CHECKPOINT)
        assert (await here.served_adapters())[str(adapter)] == str(adapter.resolve())


def test_another_model_is_refused(server: VLLMHandle, tmp_path: Path, capsys: Captured) -> None:
    other = shutil.copytree(BASE_CHECKPOINT, tmp_path / "other")
    assert evaluate(other, *on(server)) == 2
    said = capsys.readouterr().err
    assert f"serves {BASE_CHECKPOINT}, and the policy is {other}" in said
    assert f"sqlenv inference --model {other}" in said


def test_the_weights_of_a_training_run_are_refused(server: VLLMHandle, capsys: Captured) -> None:
    async def mark(version: str) -> None:
        async with VLLMEngine([server.url], stop_ids=[0], vocab_size=1).client() as client:
            await VLLMServer(server.url, client).set_weight_version(version)

    asyncio.run(mark("run/7"))
    try:
        assert evaluate(BASE_CHECKPOINT, *on(server)) == 2
    finally:
        asyncio.run(mark(NEW_PROCESS))
    assert "has served a training run, and has its weights (version run/7)" in capsys.readouterr().err


def test_no_server_is_said_at_once(capsys: Captured, tmp_path: Path) -> None:
    with reserved_ports() as (port,):
        assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", f"http://127.0.0.1:{port}") == 2
    assert "sqlenv inference --model" in capsys.readouterr().err
    assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", "nowhere") == 2
    assert "--vllm_server_base_url: 'nowhere'" in capsys.readouterr().err
    assert evaluate(tmp_path, "--use_vllm") == 2
    assert "cannot be loaded" in capsys.readouterr().err
