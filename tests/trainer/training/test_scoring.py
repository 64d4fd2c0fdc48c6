"""Reading no more than is scored: the plan covers every row, and what comes out is what TRL's own head returns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3VLConfig,
)
from trl.trainer.utils import add_fused_lm_head

from trainer.training import scoring
from trainer.training.scoring import IGNORED, cut, plan, read_less

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rows_of(shared: int, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows padded on both sides, as TRL pads prompt and completion; the second half is scored here and there."""
    draw = torch.Generator().manual_seed(seed)
    widest = max(lengths)
    ids = torch.zeros(len(lengths), shared + 2 * widest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    beginning = torch.randint(3, 50, (shared,), generator=draw)
    for row, length in enumerate(lengths):
        begin, end = widest - length, shared + widest + length
        ids[row, begin:end] = torch.randint(3, 50, (end - begin,), generator=draw)
        ids[row, begin : begin + shared] = beginning
        mask[row, begin:end] = 1
        said = torch.rand(length, generator=draw) < 0.5
        labels[row, end - length : end][said] = ids[row, end - length : end][said]
    return ids, mask, labels


def scores(config: PretrainedConfig, *, less: bool, seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """What a random model makes of some rows, and its gradients."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    outputs = ("log_probs", "entropy", "is_top1")
    add_fused_lm_head(model, temperature=0.8, outputs=outputs)
    if less:
        assert read_less(model, temperature=0.8, outputs=outputs, **options) == ""
    ids, mask, labels = rows_of(60, [3, 9, 1, 14, 40], seed)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    (output.log_probs.sum() + output.entropy.square().sum()).backward()
    found = {name: getattr(output, name).detach() for name in ("loss", "log_probs", "entropy", "is_top1", "label_mask")}
    return found | {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES, tie_word_embeddings=True),
        Gemma2Config(**SIZES, sliding_window=8, final_logit_softcapping=0.5, query_pre_attn_scalar=8),
        GraniteConfig(**SIZES, logits_scaling=3.0),
        CohereConfig(**SIZES, logit_scale=0.3),
    ],
    ids=lambda config: config.model_type,
)
def test_what_comes_out_is_what_trls_head_returns(config: PretrainedConfig, one_pass: bool) -> None:
    expected, found = scores(config, less=False), scores(config, less=True, one_pass=one_pass)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Qwen3VLConfig(text_config=SIZES | {"model_type": "qwen3_vl_text"}), "reads more than text"),
        (MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1), "keeps no keys and values"),
        (Qwen3Config(**SIZES, is_causal=False), "looks ahead"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_cannot_be_read_so_is_left_alone(config: PretrainedConfig, why: str) -> None:
    with torch.device("meta"):
        kind = AutoModelForCausalLM if config.get_text_config() is config else None
        model = kind.from_config(config) if kind else _vision_model(config)
    forward = model.forward
    assert why in read_less(model, temperature=1.0)
    assert model.forward == forward


def _vision_model(config: PretrainedConfig) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_config(config)


def test_what_is_called_otherwise_goes_trls_way() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    add_fused_lm_head(model)
    assert read_less(model, temperature=1.0) == ""
    ids, mask, labels = rows_of(4, [3, 5])
    assert model(input_ids=ids, attention_mask=mask).logits.shape == (*ids.shape, 50)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    plain = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
    torch.testing.assert_close(model(**plain, position_ids=positions).log_probs, model(**plain).log_probs)
    holes = mask * (torch.arange(mask.shape[1]) % 2)
    assert plan(ids, holes, labels, share=True, one_pass=False) is None
    assert model(**plain | {"attention_mask": holes}).log_probs.shape == (2, ids.shape[1] - 1)


@given(
    st.integers(0, 80),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_a_plan_reads_every_scored_token_and_no_token_twice(
    shared: int, lengths: list[int], seed: int, share: bool, one_pass: bool
) -> None:
    ids, mask, labels = rows_of(shared, lengths, seed)
    reading = plan(ids, mask, labels, share=share, one_pass=one_pass)
    assert reading is not None
    wanted = [row for row in range(len(lengths)) if (labels[row, 1:] != IGNORED).any()]
    assert sorted(itertools.chain(*reading.passes)) == (wanted or [0])
    assert reading.shared == 0 or share
    assert not one_pass or len(reading.passes) == 1
    for row in wanted:
        begin, end = reading.starts[row], reading.ends[row]
        places = (labels[row, 1:] != IGNORED).nonzero().flatten()
        assert mask[row, :begin].sum() == 0
        assert begin + reading.shared <= places[0]
        assert end == places[-1] + 1
        assert torch.equal(
            ids[row, begin : begin + reading.shared],
            ids[wanted[0], reading.starts[wanted[0]] :][: reading.shared],
        )


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7).map(sorted), st.integers(1, 1_000))
def test_passes_cost_as_little_as_they_can(lengths: list[int], most: int) -> None:
    def cost(cuts: list[tuple[int, int]]) -> int:
        return sum((end - begin) * lengths[end - 1] + scoring.PASS_TOKENS for begin, end in cuts)

    def allowed(cuts: list[tuple[int, int]]) -> bool:
        return all((end - begin) * lengths[end - 1] <= most or end - begin == 1 for begin, end in cuts)

    every = []
    for inner in itertools.product((False, True), repeat=len(lengths) - 1):
        edges = [0, *(place + 1 for place, here in enumerate(inner) if here), len(lengths)]
        every.append(list(itertools.pairwise(edges)))
    found = cut(lengths, most)
    assert found[0][0] == 0
    assert found[-1][1] == len(lengths)
    assert allowed(found)
    assert cost(found) == min(cost(cuts) for cuts in every if allowed(cuts))
