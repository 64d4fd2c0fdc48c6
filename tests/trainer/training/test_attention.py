"""Attention in blocks on a CPU: as near to the exact result as PyTorch's kernel, which does what is left to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import trainer.training.attention as attention
from trainer.training.attention import NAME, attend, blockwise_attention

CPU = torch.device("cpu")


class Case(NamedTuple):
    rows: int
    heads: int
    groups: int
    width: int
    before: int
    """Keys that all queries see: what rows share at their beginning."""


CASES = [Case(2, 6, 2, 17, 40), Case(1, 4, 4, 33, 0), Case(5, 8, 1, 1, 12), Case(3, 9, 3, 20, 300)]


def inputs(case: Case, seed: int = 0) -> tuple[list[Tensor], Tensor, Any]:
    draw = torch.Generator().manual_seed(seed)
    length = case.before + case.width
    shapes = [(case.heads, case.width), (case.groups, length), (case.groups, length)]
    tensors = [torch.randn(case.rows, heads, tokens, 64, generator=draw) for heads, tokens in shapes]
    mask = torch.ones(1, 1, case.width, length, dtype=torch.bool).tril(case.before)
    return tensors, mask, SimpleNamespace(num_key_value_groups=case.heads // case.groups, is_causal=True)


def run(way: Any, case: Case, dtype: torch.dtype, mask: Tensor | None = None) -> list[Tensor]:
    """What comes out, and the gradients."""
    tensors, usual, module = inputs(case)
    given = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    out, weights = way(module, *given, usual if mask is None else mask, scaling=0.125)
    assert weights is None
    draw = torch.Generator().manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, given, torch.randn(out.shape, generator=draw).to(dtype))]


@pytest.mark.parametrize("scores", [1, 5_000, 1_000_000], ids="blocks of {:,} scores".format)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_as_exact_as_the_kernel(case: Case, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", scores)
    exact = run(sdpa_attention_forward, case, torch.float32)
    kernel, ours = (run(way, case, torch.bfloat16) for way in (sdpa_attention_forward, attend))
    for truth, usual, found in zip(exact, kernel, ours, strict=True):
        assert found.shape == truth.shape
        assert found.dtype == torch.bfloat16
        wrong = (found.float() - truth).norm() / truth.norm().clamp(min=1e-3)
        assert wrong < max(0.01, 2 * (usual.float() - truth).norm() / truth.norm().clamp(min=1e-3))


@pytest.mark.parametrize("scores", [1, 1_000_000], ids="blocks of {:,} scores".format)
def test_each_row_has_its_own_mask(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", scores)
    case = Case(3, 6, 2, 70, 40)
    usual = inputs(case)[1]
    mask = usual.repeat(case.rows, 1, 1, 1)
    mask[0, :, :, :7] = False  # padding before
    mask[2, :, 40:] = False  # queries that see nothing
    exact = run(sdpa_attention_forward, case, torch.float32, mask)[0]
    ours = run(attend, case, torch.bfloat16, mask)[0]
    for row, until in ((0, 70), (1, 70), (2, 40)):
        assert (ours[row, :until].float() - exact[row, :until]).norm() < 0.01 * exact[row, :until].norm()
    assert ours.isfinite().all()


def test_keys_that_nobody_sees_have_no_gradient() -> None:
    case = Case(2, 6, 2, 17, 40)
    mask = inputs(case)[1].clone()
    mask[..., 50:] = False
    of_key, of_value = run(attend, case, torch.bfloat16, mask)[2:]
    assert not of_key[:, :, 50:].any()
    assert not of_value[:, :, 50:].any()
    assert of_value[:, :, :50].any()


def test_without_a_mask_rows_look_back_alone() -> None:
    case = CASES[1]
    (query, key, value), mask, module = inputs(case)
    query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    assert torch.equal(attend(module, query, key, value, None)[0], attend(module, query, key, value, mask)[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_is_left_to_the_kernel(case: Case) -> None:
    for expected, found in zip(
        run(sdpa_attention_forward, case, torch.float32), run(attend, case, torch.float32), strict=True
    ):
        assert torch.equal(expected, found)


def test_other_masks_are_left_to_the_kernel() -> None:
    case = CASES[0]
    additive = torch.zeros(1, 1, case.width, case.before + case.width, dtype=torch.bfloat16)
    for expected, found in zip(
        *(run(way, case, torch.bfloat16, additive) for way in (sdpa_attention_forward, attend)), strict=True
    ):
        assert torch.equal(expected, found)


def model(implementation: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).train()


def test_a_model_attends_so_in_the_block_alone() -> None:
    ids = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    policy = model()
    exact = policy(input_ids=ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        kernel = policy(input_ids=ids).logits
        with blockwise_attention(policy, CPU):
            assert policy.config._attn_implementation == NAME
            ours = policy(input_ids=ids).logits
    assert policy.config._attn_implementation == "sdpa"
    assert not torch.equal(ours, kernel), "it was used"
    assert (ours - exact).norm() < 2 * (kernel - exact).norm()
    with pytest.raises(KeyError), blockwise_attention(policy, CPU):
        raise KeyError
    assert policy.config._attn_implementation == "sdpa"


def test_other_ways_to_attend_are_left_alone() -> None:
    eager = model("eager")
    with blockwise_attention(eager, CPU):
        assert eager.config._attn_implementation == "eager"
    policy = model()
    with blockwise_attention(policy, torch.device("meta")):
        assert policy.config._attn_implementation == "sdpa"
    policy.gradient_checkpointing_enable()
    with blockwise_attention(policy, CPU):
        assert policy.config._attn_implementation == "sdpa", "the backward pass comes after the block"
