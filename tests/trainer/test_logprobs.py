"""Logprobs of labelled tokens: from any rows and in any number of passes, they are what TRL's own head returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
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
)
from trl.trainer.utils import add_fused_lm_head

from trainer.logprobs import IGNORED, label_logprobs, trimmed

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


def scores(
    config: PretrainedConfig, rows: tuple[Tensor, Tensor, Tensor], options: dict[str, Any] | None
) -> dict[str, Tensor]:
    """What a random model makes of some rows, and its gradients; without options, TRL's own."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    add_fused_lm_head(model, temperature=0.8, outputs=("log_probs", "entropy", "is_top1"))
    if options is None:
        ids, mask, labels = rows
        output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    else:
        output = label_logprobs(model, *rows, **options)
    (output.log_probs.sum() + output.entropy.square().sum()).backward()
    found = {name: getattr(output, name).detach() for name in ("log_probs", "entropy", "is_top1", "label_mask")}
    return found | {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"one_pass": False}, {"one_pass": True}, {"one_pass": False, "most_rows": 2}], ids=str
)
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES, tie_word_embeddings=True),
        Gemma2Config(**SIZES, sliding_window=8, final_logit_softcapping=0.5, query_pre_attn_scalar=8),
        GraniteConfig(**SIZES, logits_scaling=3.0),
        CohereConfig(**SIZES, logit_scale=0.3),
        MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1),
    ],
    ids=lambda config: config.model_type,
)
def test_what_comes_out_is_what_trls_head_returns(config: PretrainedConfig, options: dict[str, Any]) -> None:
    rows = rows_of(60, [3, 9, 1, 14, 40])
    require_same(scores(config, rows, options), scores(config, rows, None))


@settings(max_examples=25)
@given(st.integers(0, 80), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_rows_of_any_lengths_and_prefixes_come_out_the_same(
    shared: int, lengths: list[int], seed: int, most_rows: int
) -> None:
    config, rows = LlamaConfig(**SIZES), rows_of(shared, lengths, seed)
    require_same(scores(config, rows, {"one_pass": False, "most_rows": most_rows}), scores(config, rows, None))


def test_a_call_with_more_than_rows_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    add_fused_lm_head(model)
    call = trimmed(model, Accelerator(cpu=True))
    ids, mask, labels = rows_of(4, [3, 5])
    assert call(input_ids=ids, attention_mask=mask).logits.shape == (*ids.shape, 50)
    plain = {"input_ids": ids, "attention_mask": mask, "labels": labels, "fused_lm_head": True}
    expected = call(**plain).log_probs
    monkeypatch.setattr("trainer.logprobs.label_logprobs", None)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    torch.testing.assert_close(call(**plain, position_ids=positions).log_probs, expected)
