"""LoRA adapters on one real vLLM server: pushed alone, trained, evaluated; and no numbers from other weights.

The server is started with an adapter, and so serves its base, too.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.server_process import reserved_ports
from inference.engine import Sampling
from inference.launch.plan import WeightSyncMode
from inference.vllm.api import ReplicaRejectedError, VLLMServer
from inference.vllm.engine import VLLMSettings
from inference.weights.gather import adapter_weights
from inference.weights.lora import KEPT, LoraTransport
from inference.weights.transport import WeightSyncError
from sqlenv import cli
from tests.fork_server import ForkServer
from tests.integration.training import surroundings_in
from tests.integration.vllm_runs import LORA, NO_CHECKPOINTS, command, token_exact
from tests.integration.vllm_server import VLLMHandle, mark_weights, vllm_server
from tests.logprobs import logprobs_of
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

Captured = pytest.CaptureFixture[str]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = tuple(range(20, 84))
SAME = 5e-4
"""Of a logprob, in float32."""


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
def server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[VLLMHandle]:
    with (
        surroundings_in(tmp_path_factory.mktemp("cache")),
        vllm_server(vllm_forks, adapter, tmp_path_factory.mktemp("vllm"), weight_sync=WeightSyncMode.LORA) as handle,
    ):
        yield handle


@pytest.fixture(autouse=True)
def unmarked(server: VLLMHandle) -> Iterator[None]:
    """Take back what a run that pushes says of the weights: its adapters leave the base as it was."""
    yield
    mark_weights(server.url)


@pytest_asyncio.fixture
async def api(server: VLLMHandle) -> AsyncIterator[VLLMServer]:
    async with VLLMSettings(request_timeout_s=60.0).client() as client:
        yield VLLMServer(server.url, client)


def evaluate(policy: Path | str, *flags: str) -> int:
    return cli.main(["evaluate", "--policy", str(policy), "--episodes", "24", "--max_turn_length", "64", *flags])


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


def test_a_conversation_is_the_one_in_process(
    server: VLLMHandle, adapter: Path, tmp_path: Path, capsys: Captured
) -> None:
    table = tmp_path / "pets.csv"
    table.write_text("pet_id,name,species\n1,Rex,dog\n2,Tom,cat\n", encoding="utf-8")

    def said(*flags: str) -> str:
        question = ("--question", "How many pets are there?")
        assert cli.main(["chat", str(adapter), "--data", str(table), *question, *flags]) in (0, 1)
        return capsys.readouterr().out.rpartition(", ")[0]  # how long it took apart

    in_process = said()
    assert " 1 " in in_process
    assert said(*on(server)) == in_process


async def test_the_server_was_started_with_the_adapter(api: VLLMServer, adapter: Path) -> None:
    assert (await api.served_model()).name == str(BASE_CHECKPOINT)
    assert (await api.served_adapters())[str(adapter)] == str(adapter.resolve())


def test_another_model_is_refused(server: VLLMHandle, tmp_path: Path, capsys: Captured) -> None:
    other = shutil.copytree(BASE_CHECKPOINT, tmp_path / "other")
    assert evaluate(other, *on(server), "--episodes", "1") == 0, "a copy is the same one"
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other / "model.safetensors")
    capsys.readouterr()
    assert evaluate(other, *on(server)) == 2
    said = capsys.readouterr().err
    assert f"serves {BASE_CHECKPOINT}, and the policy is {other}" in said
    assert f"sqlenv inference --model {other}" in said


def test_the_weights_of_a_training_run_are_refused(server: VLLMHandle, capsys: Captured) -> None:
    mark_weights(server.url, "run/7")
    assert evaluate(BASE_CHECKPOINT, *on(server)) == 2
    assert "has served a training run, and has its weights (version run/7)" in capsys.readouterr().err


def test_no_server_is_said_at_once(capsys: Captured, tmp_path: Path) -> None:
    with reserved_ports() as (port,):
        assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", f"http://127.0.0.1:{port}") == 2
    assert "sqlenv inference --model" in capsys.readouterr().err
    assert evaluate(BASE_CHECKPOINT, "--use_vllm", "--vllm_server_base_url", "nowhere") == 2
    assert "--vllm_server_base_url: 'nowhere'" in capsys.readouterr().err
    assert evaluate(tmp_path, "--use_vllm") == 2
    assert "cannot be loaded" in capsys.readouterr().err


def test_an_adapter_is_pushed_alone_and_goes_on_being_trained(server: VLLMHandle, tmp_path: Path) -> None:
    assert cli.main(command(tmp_path / "run", server.url, *NO_CHECKPOINTS, *LORA)) == 0
    again = ("--model_name_or_path", str(tmp_path / "run"), "--max_steps", "1", "--eval_episodes", "0")
    # Two adapters beside each other: the one that is trained, and the KL term's.
    assert cli.main(command(tmp_path / "again", server.url, *NO_CHECKPOINTS, *again, "--beta", "0.1")) == 0
    steps = [row for name in ("run", "again") for row in RunFolder.open(tmp_path / name).metrics()]
    assert len(steps) == 4
    assert all(token_exact(row) and row["grad_norm"] > 0 for row in steps)


def adapted(rank: int = 8, modules: list[str] = MODULES) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(BASE_CHECKPOINT, dtype=torch.float32)
    found = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, task_type="CAUSAL_LM")
    )
    change(found, seed=0)
    return found.eval()


def change(model: PeftModel, seed: int) -> None:
    """Change the adapter, B included, by far more than an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)


def transport_of(model: PeftModel, folder: Path) -> LoraTransport:
    accelerator = Accelerator(cpu=True)
    return LoraTransport(lambda: adapter_weights(model, accelerator), folder)


async def worst(api: VLLMServer, model: PeftModel) -> float:
    """Return the largest difference of a logprob between what the server generates and the model."""
    done = await api.complete(PROMPT, Sampling(8), seed=1, stop_ids=())
    ours = logprobs_of(model, PROMPT, done.token_ids)
    return max(abs(a - b) for a, b in zip(ours, done.logprobs, strict=True))


async def test_each_push_is_what_the_server_generates_with(api: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path / "sync")
    names: list[str] = []
    for version in range(1, KEPT + 2):
        change(model, seed=version)
        transport.prepare(version)
        if names:
            assert await worst(api, model) > 0.05  # the changed weights have not been sent
        await transport.send(api)
        names.append(api.model)
        # The prefix cache is not reset: blocks of the earlier adapter must not be met.
        assert await worst(api, model) < SAME

    assert len(set(names)) == KEPT + 1
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == sorted(names[1:])
    api.model = names[0]
    with pytest.raises(ReplicaRejectedError, match="does not exist"):
        await worst(api, model)
    api.model = names[1]  # a request that was sent before a push
    assert await worst(api, model) > 0.05

    transport.close()
    assert not (tmp_path / "sync").exists()


async def test_a_request_in_flight_ends_with_the_adapter_that_it_began_with(api: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path)
    transport.prepare(1)
    await transport.send(api)
    earlier = asyncio.create_task(api.complete(PROMPT, Sampling(150), seed=1, stop_ids=()))
    await asyncio.sleep(0)  # it is sent, under the name of now
    change(model, seed=9)
    transport.prepare(2)
    await transport.send(api)
    assert await worst(api, model) < SAME

    done = await earlier
    change(model, seed=0)
    ours = logprobs_of(model, PROMPT, done.token_ids)
    assert max(abs(a - b) for a, b in zip(ours, done.logprobs, strict=True)) < SAME
    transport.close()


async def test_sending_again_and_a_folder_of_an_earlier_run(api: VLLMServer, tmp_path: Path) -> None:
    model = adapted()
    transport = transport_of(model, tmp_path)
    transport.prepare(1)
    await transport.send(api)
    await transport.send(api)
    assert await worst(api, model) < SAME

    change(model, seed=5)
    resumed = transport_of(model, tmp_path)
    resumed.prepare(1)
    await resumed.send(api)
    await api.reset_prefix_cache()
    assert await worst(api, model) < SAME
    resumed.close()


async def test_what_the_server_cannot_take_is_explained(api: VLLMServer, tmp_path: Path) -> None:
    large = transport_of(adapted(rank=40), tmp_path / "large")
    large.prepare(1)
    with pytest.raises(WeightSyncError, match="--max_lora_rank 40"):
        await large.send(api)
    large.close()

    unseen = transport_of(adapted(), tmp_path / "unseen")
    unseen.prepare(1)
    unseen.close()
    with pytest.raises(WeightSyncError, match="--weight_sync_dir"):
        await unseen.send(api)

    await api.health(10.0)  # none of it harmed the server
