"""What the Hugging Face engine promises beyond the contract: batches, modes, loops, failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import inference.hf.engine
from inference.engine import Completion, EngineClosedError, EngineError, Sampling
from inference.hf.cached import CachedDecoder
from inference.hf.decoding import Decoded, Row
from inference.hf.engine import KV_CACHE_BYTES, HFEngine
from inference.hf.generate import decode

FOREVER = 1e6
"""A linger that a test would never sit out: it passes only when the batch starts for another reason."""


def tiny(**overrides: object) -> PreTrainedModel:
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(config | overrides))).eval()


def engine_of(
    model: PreTrainedModel,
    *,
    linger_s: float = FOREVER,
    max_batch: int = 64,
    kv_cache_bytes: int = KV_CACHE_BYTES,
    context: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> HFEngine:
    return HFEngine(
        model,
        stop_ids=[1],
        pad_id=0,
        linger_s=linger_s,
        max_batch=max_batch,
        kv_cache_bytes=kv_cache_bytes,
        generation_context=context,
    )


async def play(engine: HFEngine, key: int, turns: int = 3) -> list[Completion]:
    """Play one episode; each turn's prompt holds everything before it."""
    completions = []
    ids: tuple[int, ...] = (5, 6 + key)
    async with engine.session(key) as session:
        for turn in range(turns):
            completions.append(await session.generate(ids, Sampling(4), seed=100 * key + turn))
            ids += (*completions[-1].token_ids, 7 + key)
    return completions


async def play_all(engine: HFEngine, episodes: int, turns: int = 3) -> list[list[Completion]]:
    """Play episodes at once; they are started, and returned, from the highest key down."""
    return await asyncio.gather(*(play(engine, key, turns) for key in reversed(range(episodes))))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """The rows of every batch that was decoded, in order."""
    seen: list[list[Row]] = []

    decode_cached = CachedDecoder.decode

    def recording(
        self: CachedDecoder, model: PreTrainedModel, rows: Sequence[Row], **rest: Any
    ) -> list[Decoded | None]:
        seen.append(list(rows))
        return decode_cached(self, model, rows, **rest)

    monkeypatch.setattr(CachedDecoder, "decode", recording)
    return seen


class Gate:
    """A generation context that holds each batch until the test lets it go."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.thread = threading.current_thread()

    @contextmanager
    def __call__(self) -> Iterator[PreTrainedModel]:
        self.thread = threading.current_thread()
        self.entered.release()
        assert self.go.acquire(timeout=60)
        yield self.model

    async def batch_has_started(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=60)


async def test_batches_are_turns_in_the_order_of_keys(batches: list[list[Row]]) -> None:
    engine = engine_of(tiny())
    await play_all(engine, 6)
    await engine.aclose()
    seeds = [[row.seed for row in rows] for rows in batches]
    assert seeds == [[100 * key + turn for key in range(6)] for turn in range(3)]


async def test_more_sessions_than_room_take_turns(batches: list[list[Row]]) -> None:
    engine = engine_of(tiny(), max_batch=4, linger_s=0.0)
    episodes = await play_all(engine, 10)
    await engine.aclose()
    assert all(len(completions) == 3 for completions in episodes)
    assert max(len(rows) for rows in batches) == 4
    assert sorted(row.seed for rows in batches for row in rows) == sorted(
        100 * key + turn for key in range(10) for turn in range(3)
    )


async def test_nobody_waits_for_a_session_that_stays_away(batches: list[list[Row]]) -> None:
    engine = engine_of(tiny(), linger_s=0.01)
    async with engine.session(0):  # in the environment, for ever
        assert len(await play(engine, 1)) == 3
    await engine.aclose()
    assert [len(rows) for rows in batches] == [1, 1, 1]


async def test_a_session_that_leaves_lets_the_batch_start(batches: list[list[Row]]) -> None:
    engine = engine_of(tiny())
    async with engine.session(0) as session:
        async with engine.session(1):
            waiting = asyncio.create_task(session.generate((5,), Sampling(2), 0))
            await asyncio.sleep(0)
            assert not batches
        await waiting
    await engine.aclose()


async def test_runs_are_bit_identical_and_no_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    runs = []
    for _ in range(2):
        engine = engine_of(model)
        runs.append(await play_all(engine, 5))
        await engine.aclose()
    assert runs[0] == runs[1]
    assert not caplog.records


def test_one_engine_serves_consecutive_event_loops() -> None:
    engine = engine_of(tiny())
    first = asyncio.run(play_all(engine, 3))
    second = asyncio.run(play_all(engine, 3))
    assert first == second
    asyncio.run(engine.aclose())


def test_a_loop_that_was_abandoned_leaves_the_engine_usable() -> None:
    engine = engine_of(tiny())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.session(0).__aenter__())
    loop.close()
    assert len(asyncio.run(play_all(engine, 2))) == 2
    asyncio.run(engine.aclose())


async def test_two_loops_at_a_time_are_refused() -> None:
    engine = engine_of(tiny())
    async with engine.session(0):
        with pytest.raises(EngineError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, play(engine, 1))
    await engine.aclose()


async def test_modes_are_restored_module_by_module_and_checkpointing_is_harmless() -> None:
    model = tiny(attention_dropout=0.9)
    plain = engine_of(model)
    expected = await play_all(plain, 2)
    await plain.aclose()
    model.gradient_checkpointing_enable()
    model.train()
    frozen = model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    engine = engine_of(model)
    assert await play_all(engine, 2) == expected
    assert [module.training for module in model.modules()] == modes
    assert not frozen.training
    await engine.aclose()


async def test_the_models_generation_config_plays_no_part() -> None:
    model = tiny()
    engine = engine_of(model)
    expected = await play_all(engine, 2)
    model.generation_config.update(
        do_sample=True, top_k=1, temperature=0.1, repetition_penalty=9.0, num_beams=3, max_length=1, use_cache=False
    )
    assert await play_all(engine, 2) == expected
    await engine.aclose()


async def test_a_failed_batch_fails_its_requests_and_later_ones_go_on() -> None:
    model = tiny()
    entries: list[int] = []

    @contextmanager
    def failing_once() -> Iterator[PreTrainedModel]:
        entries.append(threading.get_ident())
        if len(entries) == 1:
            raise torch.OutOfMemoryError("no room")
        yield model

    engine = engine_of(model, context=failing_once)
    results = await asyncio.gather(*(play(engine, key) for key in range(3)), return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineError)
        assert isinstance(result.__cause__, torch.OutOfMemoryError)
    assert len({id(result) for result in results}) == 3
    await play_all(engine, 3)
    assert len(entries) == 1 + 3
    assert len(set(entries)) == 1
    assert threading.get_ident() not in entries
    await engine.aclose()


async def test_versions_are_stamped_and_new_weights_are_used() -> None:
    model = tiny()
    engine = engine_of(model)
    async with engine.session(0) as session:
        before = await session.generate((5, 6, 7), Sampling(6), 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        engine.set_policy_version(8)
        after = await session.generate((5, 6, 7), Sampling(6), 1)
        again = await session.generate((5, 6, 7), Sampling(6), 1)
    await engine.aclose()
    assert (before.policy_version, after.policy_version) == (0, 8)
    assert after.token_ids == again.token_ids != before.token_ids
    assert after.logprobs == pytest.approx(again.logprobs, abs=1e-4)


async def test_a_batch_carries_the_version_it_started_with() -> None:
    gate = Gate(tiny())
    engine = engine_of(gate.model, context=gate)
    async with engine.session(0) as session:
        running = asyncio.create_task(session.generate((5, 6), Sampling(2), 0))
        await gate.batch_has_started()
        engine.set_policy_version(1)
        gate.go.release(2)
        assert (await running).policy_version == 0
        assert (await session.generate((5, 6), Sampling(2), 0)).policy_version == 1
    await engine.aclose()


async def test_leaving_last_waits_for_the_running_batch() -> None:
    gate = Gate(tiny().train())
    engine = engine_of(gate.model, context=gate)
    episode = asyncio.create_task(play(engine, 0))
    await gate.batch_has_started()
    episode.cancel()
    await asyncio.sleep(0)
    assert not episode.done()
    gate.go.release()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert gate.model.training
    await engine.aclose()


async def test_cancelling_in_a_running_batch_leaves_its_mates_alone() -> None:
    plain = engine_of(tiny())
    expected = (await play_all(plain, 3, turns=1))[0]
    await plain.aclose()
    gate = Gate(tiny())
    engine = engine_of(gate.model, context=gate)
    tasks = [asyncio.create_task(play(engine, key, turns=1)) for key in range(3)]
    await gate.batch_has_started()
    tasks[0].cancel()
    tasks[1].cancel()
    gate.go.release()
    (kept,) = await tasks[2]
    assert kept.token_ids == expected[0].token_ids
    assert kept.logprobs == pytest.approx(expected[0].logprobs, abs=1e-4)
    await asyncio.gather(*tasks[:2], return_exceptions=True)
    await engine.aclose()


async def test_one_request_at_a_time_and_one_session_per_key() -> None:
    engine = engine_of(tiny())
    async with engine.session(0) as session, engine.session(1) as other:
        first = asyncio.create_task(session.generate((5,), Sampling(2), 0))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="one at a time"):
            await session.generate((5,), Sampling(2), 0)
        with pytest.raises(EngineError, match="open already"):
            await engine.session(0).__aenter__()
        await asyncio.gather(first, other.generate((5,), Sampling(2), 0))
    await engine.aclose()


async def test_closing_during_a_batch_ends_the_thread_and_leaves_no_task() -> None:
    gate = Gate(tiny())
    engine = engine_of(gate.model, context=gate)
    episodes = [asyncio.create_task(play(engine, key)) for key in range(3)]
    await gate.batch_has_started()
    closing = asyncio.create_task(engine.aclose())
    results = asyncio.gather(*episodes, return_exceptions=True)
    await asyncio.sleep(0)
    gate.go.release()
    await closing
    assert all(isinstance(result, EngineClosedError) for result in await results)
    assert gate.thread is not threading.current_thread()
    assert not gate.thread.is_alive()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_before_the_batch_starts_starts_none(batches: list[list[Row]]) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    engine = engine_of(tiny())
    episodes = [asyncio.create_task(play(engine, key)) for key in range(3)]
    await asyncio.sleep(0)
    await engine.aclose()
    results = await asyncio.gather(*episodes, return_exceptions=True)
    assert all(isinstance(result, EngineClosedError) for result in results)
    assert not batches
    assert not complaints


@pytest.fixture(params=[0, KV_CACHE_BYTES])
def fits_two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[int]]:
    """Memory that has room for two rows at a time; the engine's cache, and the sizes of the batches it tried."""
    sizes: list[int] = []
    decode_cached = CachedDecoder.decode

    def check(rows: Sequence[Row]) -> None:
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def whole(model: PreTrainedModel, rows: Sequence[Row], **rest: Any) -> list[Decoded | None]:
        check(rows)
        return decode(model, rows, **rest)

    def cached(self: CachedDecoder, model: PreTrainedModel, rows: Sequence[Row], **rest: Any) -> list[Decoded | None]:
        check(rows)
        return decode_cached(self, model, rows, **rest)

    monkeypatch.setattr(inference.hf.engine, "decode", whole)
    monkeypatch.setattr(CachedDecoder, "decode", cached)
    return request.param, sizes


async def test_a_batch_that_does_not_fit_is_decoded_in_halves_from_then_on(
    fits_two: tuple[int, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    kv_cache_bytes, sizes = fits_two
    expected = await play_all(engine_of(tiny(), max_batch=2), 6)
    sizes.clear()
    engine = engine_of(tiny(), kv_cache_bytes=kv_cache_bytes)
    played = await play_all(engine, 6)
    await engine.aclose()
    assert [[c.token_ids for c in completions] for completions in played] == [
        [c.token_ids for c in completions] for completions in expected
    ]
    assert sizes == [6, 3, *(2, 2, 2) * 3]
    assert [record.getMessage() for record in caplog.records] == [
        f"generation ran out of memory with {rows} episodes at a time; it goes on with {fewer} (CUDA out of memory.)"
        for rows, fewer in ((6, 3), (3, 2))
    ]


async def test_one_row_that_does_not_fit_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(CachedDecoder, "decode", no_room)
    engine = engine_of(tiny())
    with pytest.raises(EngineError, match="generation failed: OutOfMemoryError: CUDA out of memory"):
        await play(engine, 0)
    await engine.aclose()


async def test_less_is_kept_of_other_sessions_before_fewer_rows_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that has no room for what is kept of a session that stays away."""
    decode_cached = CachedDecoder.decode

    def cached(self: CachedDecoder, model: PreTrainedModel, rows: Sequence[Row], **rest: Any) -> list[Decoded | None]:
        if self.kept_besides([row.key for row in rows]) > 1_000:
            self.clear()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode_cached(self, model, rows, **rest)

    expected = await play_all(engine_of(tiny()), 3)
    monkeypatch.setattr(CachedDecoder, "decode", cached)
    engine = engine_of(tiny(), linger_s=0.0)
    async with engine.session(9) as away:
        await away.generate((5, 6, 7, 8), Sampling(8), 0)
        played = await play_all(engine, 3)
    await engine.aclose()
    assert [[c.token_ids for c in completions] for completions in played] == [
        [c.token_ids for c in completions] for completions in expected
    ]
    assert len(caplog.records) == 1
    assert "of keys and values of other episodes; it goes on with at most" in caplog.records[0].getMessage()


async def test_a_turn_reads_what_is_new_in_its_prompt_alone() -> None:
    model = tiny()
    read: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: read.append(ids[0].numel()))
    engine = engine_of(model)
    (completions,) = await play_all(engine, 1, turns=4)
    generated = sum(len(completion.token_ids) for completion in completions)
    # Two ids of a prompt, one that follows each turn but the last; the last id of the last turn is never read.
    assert sum(read) == 2 + generated + 3 - 1
    await engine.aclose()


async def test_a_row_that_has_ended_is_handed_over_while_others_go_on() -> None:
    model = tiny()
    handed_over = threading.Event()
    passes: list[bool] = []

    def wait_in_the_third_pass(*_: object) -> None:
        passes.append(handed_over.wait(timeout=60) if len(passes) == 2 else True)

    model.get_input_embeddings().register_forward_pre_hook(wait_in_the_third_pass)
    engine = engine_of(model)
    async with engine.session(0) as session, engine.session(1) as other:
        going_on = asyncio.create_task(other.generate((5, 6), Sampling(8), 1))
        await session.generate((5, 7), Sampling(1), 0)
        assert not going_on.done()
        handed_over.set()
        await going_on
    assert len(passes) > 2
    assert all(passes)
    await engine.aclose()


async def test_new_weights_do_not_meet_old_keys_and_values() -> None:
    model = tiny()
    engine = engine_of(model)
    async with engine.session(0) as session:
        first = await session.generate((5, 6, 7), Sampling(6), 1)
        prompt = (5, 6, 7, *first.token_ids, 8, 9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        engine.set_policy_version(1)
        after = await session.generate(prompt, Sampling(6), 2)
    async with engine.session(1) as session:
        fresh = await session.generate(prompt, Sampling(6), 2)
    await engine.aclose()
    assert after.token_ids == fresh.token_ids
    assert after.logprobs == pytest.approx(fresh.logprobs, abs=1e-6)


async def test_weights_that_change_between_sessions_need_no_version() -> None:
    model = tiny()
    engine = engine_of(model)
    before = await play(engine, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    after = await play(engine, 0)
    other = engine_of(model)
    assert after == await play(other, 0) != before
    await engine.aclose()
    await other.aclose()


async def test_a_model_whose_keys_cannot_be_kept_reads_whole_prompts_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sliding window that shows in the forward pass alone."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=4)).eval()
    whole = engine_of(model, kv_cache_bytes=0)
    expected = await play_all(whole, 3)
    await whole.aclose()
    assert not caplog.records
    engine = engine_of(model)
    assert await play_all(engine, 3) == expected
    await engine.aclose()
    assert [record.getMessage() for record in caplog.records] == [
        "each turn reads its whole prompt, for this model's keys and values cannot be kept: "
        "its attention takes sliding_window"
    ]


def test_refuses_settings_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="max_batch"):
        engine_of(tiny(), max_batch=0)
