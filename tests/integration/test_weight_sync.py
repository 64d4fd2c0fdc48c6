"""Pushing weights to real vLLM servers, and what the check says of servers that do not take them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from inference.engine import Completion, Sampling
from inference.vllm.api import ServerCompletion, VLLMServer
from inference.vllm.engine import EngineUnavailableError, VLLMEngine, VLLMSettings
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import full_weights
from inference.weights.push import WeightPusher
from inference.weights.transport import SyncCheck, Transport, WeightSyncError
from policies.tiny.build import build_model
from tests.fork_server import ForkServer
from tests.integration.service import metric, until
from tests.integration.vllm_server import START_S, VLLMHandle, vllm_server
from tests.logprobs import logprobs_of
from trainer.tiny import BASE_CHECKPOINT

STOP = 3
EXACT = 5e-4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(BASE_CHECKPOINT)
    return found


@pytest.fixture(scope="module")
def server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    with vllm_server(vllm_forks, BASE_CHECKPOINT, tmp_path_factory.mktemp("vllm")) as handle:
        yield handle


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A policy that no server has seen."""
    return build_model(tokenizer, seed=5)


class Pushing:
    """An engine on servers, and a pusher of a model's weights."""

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        urls: list[str],
        folder: Path,
        *,
        transport: Transport | None = None,
        settings: VLLMSettings | None = None,
        timeout_s: float = 60.0,
        check: SyncCheck = SyncCheck.WARN,
    ) -> None:
        accelerator = Accelerator(cpu=True)
        self.model = model
        self.engine = VLLMEngine(urls, stop_ids=[STOP], vocab_size=model.config.vocab_size, settings=settings)
        self.pusher = WeightPusher(
            lambda: model,
            self.engine,
            transport or DiskTransport(lambda: full_weights(model, accelerator), folder / "weights"),
            partial(token_logprobs, model),
            tuple(random.Random(1).choices(range(STOP + 1, 1_000), k=16)),
            timeout_s=timeout_s,
            check=check,
        )
        self.engine.restore_with(self.pusher.restore)

    def ask(self, *prompts: tuple[int, ...]) -> list[Completion]:
        async def one(key: int, prompt: tuple[int, ...]) -> Completion:
            async with self.engine.session(key) as session:
                return await session.generate(prompt, Sampling(12), key)

        async def every() -> list[Completion]:
            return await asyncio.gather(*(one(key, prompt) for key, prompt in enumerate(prompts)))

        return asyncio.run(every())

    def is_exact(self, prompt: tuple[int, ...] = tuple(range(40, 70))) -> bool:
        """Whether the servers generate with the model's weights."""
        (completion,) = self.ask(prompt)
        return all(exact(self.model, prompt, completion))


def exact(model: Qwen3ForCausalLM, prompt: tuple[int, ...], done: Completion | ServerCompletion) -> list[bool]:
    """Whether the server drew each token with the model's weights."""
    ours = logprobs_of(model, prompt, done.token_ids)
    return [abs(our - their) < EXACT for our, their in zip(ours, done.logprobs, strict=True)]


def change(model: Qwen3ForCausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def test_a_push_brings_the_weights_and_stamps_them(model: Qwen3ForCausalLM, server: VLLMHandle, tmp_path: Path) -> None:
    pushing = Pushing(model, [server.url], tmp_path)
    for version in (0, 7, 8):
        pushing.pusher.push(version)
        assert pushing.is_exact()
        assert [c.policy_version for c in pushing.ask((50, 51), (60,))] == [version, version]
        change(model)
        assert not pushing.is_exact(), "the servers are a push behind"
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert len(kept) == 2
    pushing.pusher.close()
    assert not (tmp_path / "weights").exists()


def test_the_prefix_cache_does_not_outlive_the_weights(
    model: Qwen3ForCausalLM, server: VLLMHandle, tmp_path: Path
) -> None:
    pushing = Pushing(model, [server.url], tmp_path)
    prompt = tuple(range(100, 300))
    pushing.pusher.push(1)
    assert pushing.is_exact(prompt)
    change(model)
    pushing.pusher.push(2)
    assert pushing.is_exact(prompt)


async def complete(url: str, prompt: tuple[int, ...], tokens: int) -> ServerCompletion:
    async with VLLMSettings(request_timeout_s=START_S).client() as client:
        server = VLLMServer(url, client)
        server.model = (await server.served_model()).name
        return await server.complete(prompt, Sampling(tokens), seed=1, stop_ids=())


def test_a_request_in_flight_ends_before_weights_arrive(
    model: Qwen3ForCausalLM, server: VLLMHandle, tmp_path: Path
) -> None:
    """A request that begins like one that was running is computed with the new weights from its first token on."""
    pushing = Pushing(model, [server.url], tmp_path)
    prompt = tuple(range(100, 300))
    pushing.pusher.push(1)
    old = copy.deepcopy(model)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: asyncio.run(complete(server.url, prompt, 1_500)))
        until(lambda: metric(server, "vllm:num_requests_running") == 1)
        change(model)
        pushing.pusher.push(2)
        done = running.result()
    assert len(done.token_ids) == 1_500
    assert all(exact(old, prompt, done))
    assert pushing.is_exact(prompt + done.token_ids)


def test_a_crowd_is_served_as_each_alone(server: VLLMHandle) -> None:
    """Together the prompts are longer than a step: without the launcher's flags, one would be computed in parts."""
    prompts = [(STOP + 1 + i, *range(100, 500)) for i in range(12)]

    async def crowd() -> list[ServerCompletion]:
        return await asyncio.gather(*(complete(server.url, prompt, 16) for prompt in prompts))

    for prompt, beside in zip(prompts, asyncio.run(crowd()), strict=True):
        alone = asyncio.run(complete(server.url, prompt, 16))
        assert alone.token_ids == beside.token_ids
        assert alone.logprobs == pytest.approx(beside.logprobs, abs=EXACT)


def test_a_server_that_generates_from_other_weights_is_found_out(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, server: VLLMHandle, tmp_path: Path
) -> None:
    other = build_model(tokenizer, seed=6)
    change(other)
    transport = DiskTransport(lambda: full_weights(other, Accelerator(cpu=True)), tmp_path / "weights")
    pushing = Pushing(model, [server.url], tmp_path, transport=transport, check=SyncCheck.STRICT)
    with pytest.raises(WeightSyncError, match=r"does not generate with the trainer's weights .* logprobs differ by"):
        pushing.pusher.push(1)


def leaving_behind(model: Qwen3ForCausalLM, name: str, folder: Path) -> DiskTransport:
    def all_but_one() -> Mapping[str, torch.Tensor]:
        weights = full_weights(model, Accelerator(cpu=True))
        return {own: tensor for own, tensor in weights.items() if own != name}

    return DiskTransport(all_but_one, folder)


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model.layers.2.post_attention_layernorm.weight", "model.layers.2.post_attention_layernorm.weight"),
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_that_a_server_does_not_take_is_named_before_training(
    tensor: str, named: str, model: Qwen3ForCausalLM, vllm_forks: ForkServer, tmp_path: Path
) -> None:
    """Even when what it keeps of the old weights is what the new ones are; and no server is left with the constant."""
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(BASE_CHECKPOINT).save_pretrained(tmp_path / "model")
    with vllm_server(vllm_forks, tmp_path / "model", tmp_path) as server:
        pushing = Pushing(model, [server.url], tmp_path, transport=leaving_behind(model, tensor, tmp_path / "weights"))
        with pytest.raises(WeightSyncError, match=re.escape(f"it does not take {named}")):
            pushing.pusher.push(0)
        until(lambda: not server.is_running)


def test_a_folder_that_the_server_does_not_see_is_named(
    model: Qwen3ForCausalLM, server: VLLMHandle, tmp_path: Path
) -> None:
    class Unseen(DiskTransport):
        def prepare(self, version: int, dtype: torch.dtype | None = None, *, constant: bool = False) -> None:
            super().prepare(version, dtype, constant=constant)
            shutil.rmtree(self._written[-1])

    transport = Unseen(lambda: full_weights(model, Accelerator(cpu=True)), tmp_path / "weights")
    with pytest.raises(WeightSyncError, match=r"must see the folder .*--weight_sync_dir"):
        Pushing(model, [server.url], tmp_path, transport=transport).pusher.push(0)
    assert len(asyncio.run(complete(server.url, (50, 51), 4)).token_ids) == 4, "the server is none the worse for it"


def test_no_server_within_the_deadline_is_reported_and_then_one_clear_error(
    model: Qwen3ForCausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pushing = Pushing(model, ["http://127.0.0.1:9"], tmp_path, settings=VLLMSettings(server_timeout_s=0.5))
    with pytest.raises(WeightSyncError, match=r"no inference server took the weights within 0.5 s.*127.0.0.1:9"):
        pushing.pusher.push(0)
    assert _waits(caplog) == 1
    with pytest.raises(EngineUnavailableError, match=r"no inference server was ready within 0.5 s"):
        pushing.ask((50, 51))
    assert _waits(caplog) == 2


def _waits(caplog: pytest.LogCaptureFixture) -> int:
    return sum(" s left: http://127.0.0.1:9: " in message for message in caplog.messages)


class Stuck(DiskTransport):
    """Weights that never arrive: the server is frozen, or it is well and the way to it is not."""

    freeze: Callable[[], None] | None = None

    async def send(self, server: VLLMServer) -> None:
        if self.freeze is None:
            await asyncio.Event().wait()
        else:
            self.freeze()
            await super().send(server)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_never_arrive_are_given_up_in_time(
    frozen: bool, model: Qwen3ForCausalLM, server: VLLMHandle, tmp_path: Path
) -> None:
    transport = Stuck(lambda: full_weights(model, Accelerator(cpu=True)), tmp_path / "stuck")
    transport.freeze = server.freeze if frozen else None
    hasty = VLLMSettings(server_timeout_s=0.5, health_timeout_s=5.0)
    # Without the constant: a server that got it, and nothing after it, ends.
    pushing = Pushing(
        model, [server.url], tmp_path, transport=transport, settings=hasty, timeout_s=1.0, check=SyncCheck.OFF
    )
    try:
        with pytest.raises(WeightSyncError, match=r"did not take the weights within 1 s \(.*--weight_sync nccl"):
            pushing.pusher.push(0)
    finally:
        server.thaw()
    if not frozen:
        assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}
    again = Pushing(model, [server.url], tmp_path)
    again.pusher.push(0)
    assert again.is_exact()


def on_two_ranks(how: str, server: VLLMHandle, forks: ForkServer, folder: Path) -> list[dict[str, object]]:
    """Push from two ranks; returns what each saw. See fsdp_worker."""
    worker = str(Path(__file__).with_name("fsdp_worker.py"))
    launch = [sys.executable, "-m", "tests.forked_ranks", worker]
    done = forks.run([*launch, how, server.url, str(folder)], timeout=START_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_the_start_of_a_run_whose_other_rank_has_no_weights_yet(
    server: VLLMHandle, forks: ForkServer, tmp_path: Path
) -> None:
    """RAM-efficient loading for FSDP leaves the others' weights zero until the model is shared out."""
    main, other = on_two_ranks("late", server, forks, tmp_path)
    assert main == {"has_weights": True, "pushed": True}
    assert other == {"has_weights": False, "pushed": True}


def test_flat_shards_are_pushed_and_checked(
    model: Qwen3ForCausalLM, server: VLLMHandle, forks: ForkServer, tmp_path: Path
) -> None:
    Pushing(model, [server.url], tmp_path / "other").pusher.push(0)  # so that the server's weights are other ones
    for seen in on_two_ranks("fsdp1", server, forks, tmp_path):
        assert seen == {"has_weights": True, "pushed": True}


class PlainReload(DiskTransport):
    """What a client does that knows of vLLM's own method only."""

    async def send(self, server: VLLMServer) -> None:
        await self._reload(server, "reload_weights")


def test_a_tied_model_works_and_a_half_loaded_one_is_found_out(
    tokenizer: PreTrainedTokenizerFast, vllm_forks: ForkServer, tmp_path: Path
) -> None:
    """vLLM's own reload leaves the packed output head of a tied model on the old weights, on a CPU."""
    config = Qwen3Config.from_pretrained(BASE_CHECKPOINT)
    config.tie_word_embeddings = True
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True
    with vllm_server(vllm_forks, tmp_path / "tied", tmp_path) as server:
        plain = PlainReload(lambda: full_weights(model, Accelerator(cpu=True)), tmp_path / "plain")
        with pytest.raises(WeightSyncError, match=r"it does not take lm_head.weight"):
            Pushing(model, [server.url], tmp_path, transport=plain).pusher.push(0)
        until(lambda: not server.is_running)
        server.start()
        pushing = Pushing(model, [server.url], tmp_path)
        pushing.pusher.push(0)
        change(model)
        pushing.pusher.push(1)
        assert pushing.is_exact()
