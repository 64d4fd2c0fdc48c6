"""Both ways of decoding against one plain forward per sequence, for several kinds of attention."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inference.engine import EngineError, FinishReason
from inference.hf import generate
from inference.hf.cached import CachedDecoder
from inference.hf.decoding import Decoded, Row, draw
from tests.inference.hf.models import PAD, SIZES, STOP, VOCAB, build, llama, qwen2, qwen3


def sliding_window() -> PreTrainedModel:
    layers = ["full_attention", "sliding_attention"]
    config = Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=8, layer_types=layers)
    return Qwen3ForCausalLM(config)


ARCHITECTURES = [qwen3, qwen2, llama, sliding_window]
Decode = Callable[[PreTrainedModel, Sequence[Row], Collection[int]], list[Decoded | None]]


def whole_prompts(model: PreTrainedModel, rows: Sequence[Row], stop_ids: Collection[int]) -> list[Decoded | None]:
    return generate.decode(model, rows, stop_ids=stop_ids, pad_id=PAD)


def nothing_kept(model: PreTrainedModel, rows: Sequence[Row], stop_ids: Collection[int]) -> list[Decoded | None]:
    return CachedDecoder(0).decode(model, rows, stop_ids=stop_ids)


@pytest.fixture(params=[whole_prompts, nothing_kept])
def decode(request: pytest.FixtureRequest) -> Decode:
    found: Decode = request.param
    return found


WAYS = [(whole_prompts, each) for each in ARCHITECTURES] + [
    (nothing_kept, each) for each in ARCHITECTURES if each is not sliding_window
]


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 40))) for _ in range(count)]


def run(
    decode: Decode, model: PreTrainedModel, rows: Sequence[Row], stop_ids: Sequence[int] = (STOP,)
) -> list[Decoded]:
    decoded = decode(model, rows, stop_ids)
    assert all(d is not None for d in decoded)
    return [d for d in decoded if d is not None]


@torch.no_grad()
def reference(model: PreTrainedModel, row: Row, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of the tokens from one forward pass over the whole, unpadded sequence."""
    ids = torch.tensor([row.prompt_ids + token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (row.temperature or 1.0), dim=-1)
    chosen: list[float] = logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()
    return chosen


@pytest.mark.parametrize(("decode", "architecture"), WAYS)
def test_logprobs_equal_a_plain_forward_over_three_turns(
    architecture: Callable[[], PreTrainedModel], decode: Decode
) -> None:
    model = build(architecture)
    temperatures = [1.0, 0.7, 1.3, 0.0]
    rows = [
        Row(prompt, max_new_tokens=1 + i % 9, temperature=temperatures[i % 4], seed=i)
        for i, prompt in enumerate(prompts(20))
    ]
    for turn in range(3):
        decoded = run(decode, model, rows)
        for row, d in zip(rows, decoded, strict=True):
            assert len(d.token_ids) == len(d.logprobs) <= row.max_new_tokens
            assert d.logprobs == pytest.approx(reference(model, row, d.token_ids), abs=1e-4)
        seen = prompts(len(rows), seed=turn + 1)
        rows = [
            replace(row, prompt_ids=row.prompt_ids + d.token_ids + new)
            for row, d, new in zip(rows, decoded, seen, strict=True)
        ]


@pytest.mark.parametrize(("decode", "architecture"), WAYS)
def test_a_row_does_not_depend_on_its_batch(architecture: Callable[[], PreTrainedModel], decode: Decode) -> None:
    model = build(architecture)
    rows = [Row(prompt, 3 + 4 * (i % 3), 1.0, seed=1000 + i) for i, prompt in enumerate(prompts(12))]
    together = run(decode, model, rows)
    for row, d in zip(rows, together, strict=True):
        (alone,) = run(decode, model, [row])
        assert alone.token_ids == d.token_ids
        assert alone.logprobs == pytest.approx(d.logprobs, abs=1e-4)


def test_a_lower_limit_cuts_the_same_tokens(decode: Decode) -> None:
    model = build()
    row = Row(prompts(1)[0], 12, 1.0, seed=5)
    (long,), (short,) = run(decode, model, [row], ()), run(decode, model, [replace(row, max_new_tokens=4)], ())
    assert len(long.token_ids) == 12
    assert short.token_ids == long.token_ids[:4]
    assert short.finish_reason is long.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_its_row_only_and_is_included(decode: Decode) -> None:
    model = build()
    rows = [Row(prompt, 10, 1.0, seed=i) for i, prompt in enumerate(prompts(8))]
    free = run(decode, model, rows, ())
    stop = free[3].token_ids[4]
    for d, unstopped in zip(run(decode, model, rows, (stop,)), free, strict=True):
        if stop in unstopped.token_ids:
            assert d.token_ids == unstopped.token_ids[: unstopped.token_ids.index(stop) + 1]
            assert d.finish_reason is FinishReason.STOP
        else:
            assert d.token_ids == unstopped.token_ids
            assert d.finish_reason is FinishReason.LENGTH


def test_greedy_takes_the_most_likely_token_beside_sampled_rows(decode: Decode) -> None:
    model = build()
    first, second = prompts(2)
    (greedy, _) = run(decode, model, [Row(first, 6, 0.0, seed=1), Row(second, 6, 1.0, seed=2)], ())
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([first + greedy.token_ids])).logits[0]
    assert tuple(logits.argmax(-1)[len(first) - 1 : -1].tolist()) == greedy.token_ids


def test_a_group_with_one_prompt_draws_different_samples(decode: Decode) -> None:
    model = build()
    prompt = prompts(1)[0]
    rows = [Row(prompt, 6, 1.0, seed=i) for i in range(8)]
    decoded = run(decode, model, rows, ())
    assert len({d.token_ids for d in decoded}) == 8
    for row, d in zip(rows, decoded, strict=True):
        assert d.logprobs == pytest.approx(reference(model, row, d.token_ids), abs=1e-4)


def test_cancelled_rows_have_no_result_and_the_others_go_on(decode: Decode) -> None:
    model = build()
    rows = [Row(prompt, 8 if i else 1, 1.0, seed=i) for i, prompt in enumerate(prompts(4))]
    expected = run(decode, model, rows)
    for i in (0, 2):
        rows[i].cancelled.set()
    decoded = decode(model, rows, (STOP,))
    assert decoded[0] is decoded[2] is None
    for i in (1, 3):
        d = decoded[i]
        assert d is not None
        assert d.token_ids == expected[i].token_ids


def test_nothing_is_decoded_for_cancelled_rows_alone(decode: Decode) -> None:
    model = build()
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    row = Row((3, 4, 5), 100, 1.0, seed=0)
    row.cancelled.set()
    assert decode(model, [row], ()) == [None]
    assert len(forwards) <= 1


def test_broken_weights_are_an_error(decode: Decode) -> None:
    model = build()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(EngineError, match="not finite"):
        decode(model, [Row((3, 4), 2, 1.0, seed=0)], (STOP,))


def test_seeds_differ_in_all_their_bits(decode: Decode) -> None:
    model = build()
    seeds = [5, 5 + 2**32, 5 + 2**63, -5]
    decoded = run(decode, model, [Row((3, 4, 5), 12, 1.0, seed) for seed in seeds], ())
    assert len({d.token_ids for d in decoded}) == len(seeds)


def test_draw_follows_the_distribution() -> None:
    n = 20_000
    logits = torch.tensor([0.3, -1.0, 2.0, -math.inf, 0.0])
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens, logprobs = draw(logits.expand(n, -1), torch.full((n,), 0.8), uniforms)
    expected = torch.softmax(logits.double() / 0.8, dim=-1)
    counts = Counter(tokens.tolist())
    for token, p in enumerate(expected.tolist()):
        assert abs(counts[token] - n * p) <= 1
    assert torch.allclose(logprobs.double().exp(), expected[tokens])


LOGITS = st.lists(
    st.one_of(st.floats(min_value=-200, max_value=200, width=32), st.just(-math.inf)), min_size=1, max_size=8
).filter(lambda row: max(row) > -math.inf)
EDGES = st.one_of(st.sampled_from([0.0, math.nextafter(1.0, 0.0), 0.5]), st.floats(0, 1, exclude_max=True))


@given(LOGITS, EDGES, st.sampled_from([0.0, 0.01, 1.0, 3.0]))
def test_draw_never_takes_a_token_of_probability_zero(row: list[float], u: float, temperature: float) -> None:
    tokens, logprobs = draw(torch.tensor([row]), torch.tensor([temperature]), torch.tensor([u], dtype=torch.float64))
    probs = torch.softmax(torch.tensor(row) / (temperature or 1.0), dim=-1)
    assert probs[tokens[0]] > 0
    assert logprobs[0].isfinite()
