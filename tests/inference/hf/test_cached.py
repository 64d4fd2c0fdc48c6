"""Keys and values that are kept: the same tokens as from whole prompts, and how much is read for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from inference.hf import cached, generate
from inference.hf.cached import CachedDecoder
from inference.hf.decoding import Decoded, Row
from inference.hf.packed import UnsupportedModelError, refusal
from tests.inference.hf.models import SIZES, STOP, VOCAB, build, llama, qwen2, qwen3

ROOM = 1 << 30


def smollm3() -> PreTrainedModel:
    return SmolLM3ForCausalLM(SmolLM3Config(**SIZES, no_rope_layers=[1, 0]))


def ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(count))


def whole(model: PreTrainedModel, rows: Sequence[Row]) -> list[Decoded]:
    """The same rows, from whole prompts."""
    return [d for d in generate.decode(model, rows, stop_ids=(STOP,), pad_id=0) if d is not None]


def check(model: PreTrainedModel, rows: Sequence[Row], got: Sequence[Decoded | None], tolerance: float = 1e-4) -> None:
    """Compare with whole prompts."""
    for expected, found in zip(whole(model, rows), got, strict=True):
        assert found is not None
        assert found.token_ids == expected.token_ids
        assert found.finish_reason is expected.finish_reason
        assert found.logprobs == pytest.approx(expected.logprobs, abs=tolerance)


class Reads:
    """Counts the ids that a model reads."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes: list[int] = []
        self._hook = model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given: self.passes.append(given[0].numel())
        )

    def take(self) -> int:
        total = sum(self.passes)
        self.passes.clear()
        return total

    def stop(self) -> None:
        self._hook.remove()


@pytest.mark.parametrize("architecture", [qwen3, qwen2, llama, smollm3])
def test_turns_that_go_on_equal_whole_prompts(architecture: Callable[[], PreTrainedModel]) -> None:
    model = build(architecture)
    rng = random.Random(0)
    decoder = CachedDecoder(ROOM)
    rows = [Row(ids(rng, rng.randrange(1, 40)), 1 + key % 9, [1.0, 0.7, 0.0][key % 3], key, key) for key in range(9)]
    for turn in range(4):
        got = decoder.decode(model, rows, stop_ids=(STOP,), open_keys=range(9))
        check(model, rows, got)
        rows = [
            Row(row.prompt_ids + d.token_ids + ids(rng, rng.randrange(1, 20)), 6, row.temperature, turn, row.key)
            for row, d in zip(rows, got, strict=True)
            if d is not None
        ]


TURNS = st.lists(
    st.tuples(
        st.integers(0, 3),  # session
        st.sampled_from(["go on", "drop", "again", "edit"]),
        st.integers(1, 24),  # new ids
        st.integers(1, 5),  # tokens
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=20, deadline=None)
@given(TURNS, st.integers(0, 40_000), st.integers(8, 64))
def test_any_course_of_sessions_equals_whole_prompts(
    turns: list[tuple[int, str, int, int]], limit: int, pass_tokens: int
) -> None:
    """Transcripts go on, drop their oldest turns, repeat a prompt, or differ in the middle; any limit, any chunks."""
    model = build()
    rng = random.Random(1)
    system = ids(rng, 30)
    decoder = CachedDecoder(limit)
    transcripts = dict.fromkeys(range(4), system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached, "_PASS_TOKENS", pass_tokens)
        for seed, (key, change, new, tokens) in enumerate(turns):
            before = transcripts[key]
            prompt = {
                "go on": before,
                "again": before,
                "drop": system + before[len(system) + 20 :],
                "edit": before[: len(before) // 2] + ids(rng, 1) + before[len(before) // 2 + 1 :],
            }[change]
            prompt += () if change == "again" else ids(rng, new)
            # Another session comes along, so that batches have two rows.
            mate = (key + 1) % 4
            rows = [Row(prompt, tokens, 1.0, seed, key), Row(transcripts[mate], tokens, 1.0, seed, mate)]
            got = decoder.decode(model, rows, stop_ids=(STOP,), open_keys=range(4))
            check(model, rows, got)
            assert got[0] is not None
            transcripts[key] = prompt + got[0].token_ids


def test_a_batch_reads_what_its_rows_share_once() -> None:
    model = build()
    rng = random.Random(2)
    system, questions = ids(rng, 160), [ids(rng, 32) for _ in range(3)]
    rows = [Row(system + questions[key // 4], 1, 1.0, key, key) for key in range(12)]
    expected = whole(model, rows)
    reads = Reads(model)
    decoder = CachedDecoder(ROOM)
    got = decoder.decode(model, rows, stop_ids=(STOP,), open_keys=range(13))
    # The system prompt once, each question once, and the last block of each prompt, whose logits are wanted, for all.
    assert reads.take() == 160 + 3 * 32 + 9 * 16
    assert [d.token_ids for d in got if d is not None] == [d.token_ids for d in expected]
    newcomer = Row(system + ids(rng, 32), 1, 1.0, 99, 12)
    (found,) = decoder.decode(model, [newcomer], stop_ids=(STOP,), open_keys=range(13))
    assert reads.take() == 32
    reads.stop()
    check(model, [newcomer], [found])


def test_a_prompt_is_read_in_passes_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    rng = random.Random(3)
    rows = [Row(ids(rng, 50), 4, 1.0, key, key) for key in range(3)]
    monkeypatch.setattr(cached, "_PASS_TOKENS", 32)
    reads = Reads(model)
    got = CachedDecoder(ROOM).decode(model, rows, stop_ids=(), open_keys=range(3))
    assert max(reads.passes) == 32
    assert reads.take() == 3 * (50 + 4 - 1)
    reads.stop()
    assert [d.token_ids for d in got if d is not None] == [
        d.token_ids for d in generate.decode(model, rows, stop_ids=(), pad_id=0) if d is not None
    ]


def test_a_row_that_has_ended_costs_nothing_more() -> None:
    model = build()
    rng = random.Random(4)
    reads = Reads(model)
    rows = [Row(ids(rng, 5), limit, 1.0, limit, limit) for limit in (1, 3, 8)]
    CachedDecoder(ROOM).decode(model, rows, stop_ids=())
    assert reads.passes == [15, 2, 2, 1, 1, 1, 1, 1]
    reads.stop()


def test_long_turns_of_many_rows_equal_whole_prompts() -> None:
    """Longer than the room that rows are given when they are laid side by side, and most rows end long before."""
    model = build()
    rng = random.Random(9)
    rows = [Row(ids(rng, 3 + key), 150 if key < 2 else 4 * key, 1.0, key, key) for key in range(12)]
    got = CachedDecoder(ROOM).decode(model, rows, stop_ids=(), open_keys=range(12))
    expected = generate.decode(model, rows, stop_ids=(), pad_id=0)
    assert [d.token_ids for d in got if d is not None] == [d.token_ids for d in expected if d is not None]


def test_what_is_kept_within_the_limit_keeps_nothing_else_alive() -> None:
    model = build()
    rng = random.Random(10)
    rows = [Row(ids(rng, 20), 4, 1.0, key, key) for key in range(4)]
    decoder = CachedDecoder(ROOM)
    decoder.decode(model, rows, stop_ids=(), open_keys=range(4))
    decoder.limit = decoder.kept_besides([]) // 4
    decoder.decode(model, rows, stop_ids=(), open_keys=range(4))
    (content,) = decoder._store.contents()
    buffers = [tensor for layer in range(2) for tensor in content.buffers(layer)]
    assert sum(tensor.untyped_storage().nbytes() for tensor in buffers) == content.size <= decoder.limit


def test_a_row_whose_source_is_cancelled_reads_its_own_prompt() -> None:
    model = build()
    rng = random.Random(5)
    system = ids(rng, 64)
    rows = [Row(system + ids(rng, 4), 3, 1.0, key, key) for key in range(3)]
    expected = whole(model, rows)
    for cancelled in range(3):
        rows = [Row(row.prompt_ids, 3, 1.0, row.seed, row.key) for row in rows]
        rows[cancelled].cancelled.set()
        got = CachedDecoder(ROOM).decode(model, rows, stop_ids=(STOP,), open_keys=range(3))
        assert got[cancelled] is None
        assert [d.token_ids for d in got if d is not None] == [
            d.token_ids for key, d in enumerate(expected) if key != cancelled
        ]


def test_nothing_outlives_its_session_its_weights_an_error_or_the_limit() -> None:
    model = build()
    rng = random.Random(6)
    rows = [Row(ids(rng, 20), 2, 1.0, key, key) for key in range(2)]
    decoder = CachedDecoder(ROOM)
    decoder.decode(model, rows, stop_ids=(), open_keys=(0,))
    assert decoder.kept_besides([0]) == 0 < decoder.kept_besides([])
    decoder.limit = 0
    decoder.decode(model, rows[1:], stop_ids=(), open_keys=(0, 1))
    assert decoder.kept_besides([]) == 0
    decoder.limit = ROOM
    decoder.decode(model, rows, stop_ids=(), open_keys=(0, 1))
    reads = Reads(model)
    decoder.decode(model, rows, stop_ids=(), open_keys=(0, 1))
    assert reads.take() == 2 * 2
    decoder.decode(model, rows, stop_ids=(), open_keys=(0, 1), weights=1)
    assert reads.take() == 2 * 21
    reads.stop()
    with pytest.raises(IndexError):
        decoder.decode(model, [Row((VOCAB + 1,), 1, 1.0, 0, 2)], stop_ids=(), open_keys=(0, 1, 2))
    assert decoder.kept_besides([]) == 0


def test_autocast_keeps_what_attention_works_in_and_equals_whole_prompts() -> None:
    model = build()
    rng = random.Random(8)
    decoder = CachedDecoder(ROOM)
    rows = [Row(ids(rng, 30), 4, 1.0, key, key) for key in range(4)]
    with torch.autocast("cpu", torch.bfloat16):
        first = decoder.decode(model, rows, stop_ids=(), open_keys=range(4))
        in_bfloat16 = decoder.kept_besides([])
        for row, d in zip(rows, first, strict=True):
            assert d is not None
            sequence = torch.tensor([row.prompt_ids + d.token_ids])
            with torch.no_grad():
                logits = model(input_ids=sequence, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1].float()
            chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(d.token_ids)[:, None])[:, 0]
            assert d.logprobs == pytest.approx(chosen.tolist(), abs=0.15)
    decoder.clear()
    decoder.decode(model, rows, stop_ids=(), open_keys=range(4))
    assert decoder.kept_besides([]) == 2 * in_bfloat16


def test_an_adapter_beside_its_base_equals_whole_prompts() -> None:
    torch.manual_seed(11)
    model = get_peft_model(
        build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    assert refusal(model) is None
    rng = random.Random(11)
    decoder = CachedDecoder(ROOM)
    rows = [Row(ids(rng, 20), 4, 1.0, key, key) for key in range(3)]
    for turn in range(2):
        got = decoder.decode(model, rows, stop_ids=(STOP,), open_keys=range(3))
        check(model.get_base_model(), rows, got)  # which holds the adapter's layers
        rows = [
            Row(row.prompt_ids + d.token_ids + ids(rng, 5), 4, 1.0, turn, row.key)
            for row, d in zip(rows, got, strict=True)
            if d is not None
        ]


def test_the_model_attends_as_before_afterwards() -> None:
    model = build()
    own = model.config._attn_implementation
    CachedDecoder(0).decode(model, [Row((3, 4), 1, 1.0, 0)], stop_ids=())
    assert model.config._attn_implementation == own


def sliding() -> PreTrainedModel:
    layers = ["full_attention", "sliding_attention"]
    return Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=8, layer_types=layers)
    )


def soft_caps() -> PreTrainedModel:
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=16, layer_types=["full_attention"] * 2))


def sinks() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, **experts, layer_types=["full_attention"] * 2))


def dynamic_rotation() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        (sliding, "it has layers of sliding_attention"),
        (dynamic_rotation, "its rotation (dynamic) depends on the length"),
        (qwen3, None),
        (smollm3, None),
    ],
)
def test_a_configuration_tells_what_cannot_be_packed(
    architecture: Callable[[], PreTrainedModel], reason: str | None
) -> None:
    assert refusal(build(architecture)) == reason


@pytest.mark.parametrize("architecture", [soft_caps, sinks])
def test_what_shows_in_the_forward_pass_alone_is_refused_there(architecture: Callable[[], PreTrainedModel]) -> None:
    model = build(architecture)
    with pytest.raises(UnsupportedModelError, match="its attention takes"):
        CachedDecoder(0).decode(model, [Row((3, 4), 1, 1.0, 0)], stop_ids=())
