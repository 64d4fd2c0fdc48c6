"""What every engine promises, as `inference.engine` states it: in this process, and on a real vLLM server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from inference.engine import (
    Completion,
    ContextOverflowError,
    Engine,
    EngineClosedError,
    EngineError,
    FinishReason,
    Sampling,
)
from inference.hf.engine import HFEngine
from inference.vllm.engine import VLLMEngine
from tests.fork_server import ForkServer
from tests.integration.vllm_server import VLLMHandle, vllm_server

VOCAB, STOP, PAD, CONTEXT = 61, 1, 0, 96


@dataclass(frozen=True)
class Served:
    """An engine and the policy that it serves."""

    engine: Engine
    model: PreTrainedModel


def tiny_policy() -> PreTrainedModel:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def server(vllm_forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMHandle]:
    folder = tmp_path_factory.mktemp("contract")
    tiny_policy().save_pretrained(folder / "policy")
    words = WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w2")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder / "policy")
    with vllm_server(vllm_forks, folder / "policy", folder, "--max-model-len", str(CONTEXT)) as handle:
        yield handle


@pytest.fixture(params=["hf", "vllm"])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    model = tiny_policy()
    engine: Engine
    if request.param == "hf":
        engine = HFEngine(model, stop_ids=[STOP], pad_id=PAD)
    else:
        server: VLLMHandle = request.getfixturevalue("server")
        engine = VLLMEngine([server.url], stop_ids=[STOP], vocab_size=VOCAB)
    yield Served(engine, model)
    await engine.aclose()


@pytest.fixture
def engine(served: Served) -> Engine:
    return served.engine


def prompt(seed: int, length: int = 12) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCAB) for _ in range(length))


async def ask(engine: Engine, key: int, ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
    async with engine.session(key) as session:
        return await session.generate(ids, sampling, seed)


async def test_tokens_and_logprobs_match_and_the_reason_is_true(engine: Engine) -> None:
    asks = [ask(engine, i, prompt(i), Sampling(1 + i % 40), seed=i) for i in range(40)]
    completions = await asyncio.gather(*asks)
    for i, c in enumerate(completions):
        assert 1 <= len(c.token_ids) == len(c.logprobs) <= 1 + i % 40
        assert STOP not in c.token_ids[:-1]
        assert (c.token_ids[-1] == STOP) == (c.finish_reason is FinishReason.STOP)
        assert (c.finish_reason is FinishReason.LENGTH) <= (len(c.token_ids) == 1 + i % 40)
        assert all(logprob <= 0 for logprob in c.logprobs)
    assert {c.finish_reason for c in completions} == set(FinishReason)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
async def test_logprobs_are_the_policys_own(served: Served, temperature: float) -> None:
    asks = [ask(served.engine, i, prompt(i, 5 + 7 * i), Sampling(9, temperature), seed=i) for i in range(5)]
    for i, c in enumerate(await asyncio.gather(*asks)):
        ids = prompt(i, 5 + 7 * i)
        with torch.no_grad():
            logits = served.model(input_ids=torch.tensor([ids + c.token_ids])).logits[0, len(ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        expected = logprobs.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0].tolist()
        assert c.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_seed_fixes_the_tokens_whatever_runs_beside(engine: Engine) -> None:
    sampling = Sampling(10)
    alone = await ask(engine, 0, prompt(0), sampling, seed=42)
    crowd = [ask(engine, i, prompt(i, 3 + i), Sampling(1 + i), seed=i) for i in range(1, 9)]
    beside, *_ = await asyncio.gather(ask(engine, 0, prompt(0), sampling, seed=42), *crowd)
    other = await ask(engine, 0, prompt(0), sampling, seed=43)
    assert beside.token_ids == alone.token_ids
    assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert other.token_ids != alone.token_ids


async def test_later_turns_of_a_session_equal_a_fresh_start(engine: Engine) -> None:
    first, tail = prompt(3), prompt(4, 6)
    async with engine.session(0) as session:
        one = await session.generate(first, Sampling(8), 1)
        second = first + one.token_ids + tail
        two = await session.generate(second, Sampling(8), 2)
        shortened = await session.generate(second[5:], Sampling(8), 3)
    fresh = await ask(engine, 0, second, Sampling(8), seed=2)
    fresh_shortened = await ask(engine, 0, second[5:], Sampling(8), seed=3)
    assert two.token_ids == fresh.token_ids
    assert two.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)
    assert shortened.token_ids == fresh_shortened.token_ids
    assert shortened.logprobs == pytest.approx(fresh_shortened.logprobs, abs=1e-4)


async def test_context_overflow_fails_its_own_request_only(engine: Engine) -> None:
    fits = ask(engine, 0, prompt(0, CONTEXT - 8), Sampling(8), seed=0)
    too_long = ask(engine, 1, prompt(1, CONTEXT - 7), Sampling(8), seed=0)
    completion, error = await asyncio.gather(fits, too_long, return_exceptions=True)
    assert isinstance(completion, Completion)
    assert isinstance(error, ContextOverflowError)
    assert error.allowed == CONTEXT


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ((), Sampling(4)),
        ((VOCAB,), Sampling(4)),
        ((-1,), Sampling(4)),
        ((5,), Sampling(0)),
        ((5,), Sampling(4, temperature=-1.0)),
        ((5,), Sampling(4, temperature=float("nan"))),
    ],
)
async def test_a_bad_request_is_refused_and_the_session_goes_on(
    engine: Engine, ids: tuple[int, ...], sampling: Sampling
) -> None:
    async with engine.session(0) as session:
        with pytest.raises(EngineError):
            await session.generate(ids, sampling, 0)
        assert (await session.generate((5, 6), Sampling(2), 0)).token_ids


async def test_a_session_must_be_open(engine: Engine) -> None:
    session = engine.session(0)
    with pytest.raises(EngineError, match="not open"):
        await session.generate((5,), Sampling(2), 0)
    async with session:
        await session.generate((5,), Sampling(2), 0)
    with pytest.raises(EngineError, match="not open"):
        await session.generate((5,), Sampling(2), 0)


async def test_a_cancelled_request_disturbs_nobody(engine: Engine) -> None:
    expected = await ask(engine, 1, prompt(1), Sampling(10), seed=1)
    cancelled = asyncio.create_task(ask(engine, 0, prompt(0), Sampling(10), seed=0))
    kept = asyncio.create_task(ask(engine, 1, prompt(1), Sampling(10), seed=1))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await kept).token_ids == expected.token_ids
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_closing_fails_outstanding_and_later_requests(engine: Engine) -> None:
    async with engine.session(0) as idle, engine.session(1) as session:
        outstanding = asyncio.create_task(session.generate(prompt(0), Sampling(10), 0))
        await asyncio.sleep(0)
        await engine.aclose()
        with pytest.raises(EngineClosedError):
            await outstanding
        with pytest.raises(EngineClosedError):
            await idle.generate(prompt(0), Sampling(10), 0)
    with pytest.raises(EngineClosedError):
        await ask(engine, 2, prompt(0), Sampling(10), seed=0)
    await engine.aclose()
