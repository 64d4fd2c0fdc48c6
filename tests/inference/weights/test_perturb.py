"""Perturbation: every tensor changes by as much as was asked for, and every bit returns."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inference.weights.perturb import LORA_B_SIZE, PerturbError, direction, perturbed

VOCAB = 61
PROMPT = tuple(random.Random(0).choices(range(VOCAB), k=20))

TRAINED = 0.1
"""Spread of the weights at which so narrow a model attends and predicts as sharply as a trained one."""


def tiny(architecture: str = "qwen3", *, tied: bool = False, spread: float = 0.02) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "tie_word_embeddings": tied,
        "initializer_range": spread,
    }
    torch.manual_seed(11)
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape))
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**shape))
    return LlamaForCausalLM(LlamaConfig(**shape))


def adapted(**options: Any) -> nn.Module:
    settings = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    peft: nn.Module = get_peft_model(tiny(), LoraConfig(**settings))
    return peft


POLICIES: dict[str, Callable[[], nn.Module]] = {
    "qwen3": tiny,
    "qwen3, tied": lambda: tiny(tied=True),
    "qwen2, trained": lambda: tiny("qwen2", spread=TRAINED),
    "llama, trained": lambda: tiny("llama", spread=TRAINED),
    "lora before training": adapted,
    "dora before training": lambda: adapted(use_dora=True),
}


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bit by bit: equality would take -0.0 for 0.0, and no NaN for itself."""
    (a, b) = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_tensor_changes_by_its_scale(policy: str) -> None:
    model = POLICIES[policy]()
    original = bits(model)
    scales = {name: 0.01 * (index + 1) for index, name in enumerate(original)}
    with perturbed(model, scales) as changes:
        for name, before in original.items():
            size = before.abs() if before.any() else torch.full_like(before, LORA_B_SIZE if "lora_B" in name else 1.0)
            assert torch.allclose(changes.change(name).abs(), scales[name] * size, atol=1e-6), name
            assert same(changes.original(name), before)
    assert all(same(parameter, original[name]) for name, parameter in model.named_parameters())


def test_signs_are_random_in_each_dimension() -> None:
    signs = direction("any", torch.ones(64, 48)).sign()
    assert 0.3 < (signs > 0).float().mean() < 0.7
    assert torch.linalg.matrix_rank(signs) == 1
    assert same(direction("any", torch.ones(64, 48)), signs)
    assert not same(direction("other", torch.ones(64, 48)), signs)


def test_one_tensor_left_behind() -> None:
    model = tiny()
    name = "model.layers.1.post_attention_layernorm.weight"
    original = bits(model)
    with perturbed(model, 0.1) as changes:
        inside = bits(model)
        with changes.left_behind(name):
            differ = {n for n, p in model.named_parameters() if not same(p, inside[n])}
            assert differ == {name}
            assert same(dict(model.named_parameters())[name], original[name])
        assert all(same(parameter, inside[n]) for n, parameter in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_stay_tame(policy: str, dtype: torch.dtype) -> None:
    model = POLICIES[policy]().to(dtype)
    ids = torch.tensor([PROMPT])

    def logits() -> Tensor:
        with torch.no_grad():
            found: Tensor = model(input_ids=ids).logits.float()
        return found

    before = logits()
    with perturbed(model, 0.05):
        inside = logits()
    assert torch.isfinite(inside).all()
    assert not torch.equal(inside, before)
    assert 0.3 < inside.std() / before.std() < 3
    assert torch.equal(logits(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_returns(dtype: torch.dtype) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            special = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-45, 3.0]])
            self.special = nn.Parameter(special.to(dtype))
            self.turned = nn.Parameter(torch.randn(5, 3).to(dtype).T)
            self.one = nn.Parameter(torch.ones(1, 1, dtype=dtype))
            self.constant = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
            self.empty = nn.Parameter(torch.empty(0, 4, dtype=dtype))
            self.scalar = nn.Parameter(torch.tensor(2.0, dtype=dtype))
            self.frozen = nn.Parameter(torch.randn(7, dtype=dtype), requires_grad=False)

    model = Odd()
    before = bits(model)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with perturbed(model, 0.5):
        for name, parameter in model.named_parameters():
            assert same(parameter, before[name]) == (name == "empty"), name
    for name, parameter in model.named_parameters():
        assert same(parameter, before[name]), name
        assert parameter.data_ptr() == addresses[name]
        assert parameter.grad_fn is None


def test_every_process_makes_the_same_change() -> None:
    one, other = tiny(), tiny()
    with perturbed(one, 0.5), perturbed(other, 0.5):
        assert all(same(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_tied_tensors_are_changed_once_even_as_two_parameters() -> None:
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3, bias=False)
    second.weight.data = first.weight.data
    before = first.weight.detach().clone()
    with perturbed(nn.Sequential(first, second), 0.5):
        assert not same(first.weight, before)
        assert same(second.weight, first.weight)
    assert same(first.weight, before)


def test_an_exception_inside_passes_and_nothing_stays_changed() -> None:
    model = tiny()
    before = bits(model)
    with pytest.raises(KeyError), perturbed(model, 0.5):
        raise KeyError
    assert all(same(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_failure_on_the_way_in_changes_nothing() -> None:
    model = tiny()
    before = bits(model)
    # Writing to an expanded tensor fails: by then, the parameters before it have been changed.
    model.late = nn.Parameter(torch.arange(2.0)[:, None].expand(2, 2))
    with pytest.raises(RuntimeError), perturbed(model, 0.5):
        pytest.fail("entered")
    del model.late
    assert all(same(parameter, before[name]) for name, parameter in model.named_parameters())


def test_only_what_an_adapter_push_carries_when_asked() -> None:
    model = adapted(modules_to_save=["lm_head"])
    before = bits(model)
    with perturbed(model, 0.5, trainable_only=True):
        for name, parameter in model.named_parameters():
            carried = "lora_" in name or "modules_to_save" in name
            assert same(parameter, before[name]) != carried, name
    assert all(same(parameter, before[name]) for name, parameter in model.named_parameters())


def test_training_goes_on_afterwards() -> None:
    def loss_after(disturb: bool) -> float:
        model = tiny()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = torch.tensor([PROMPT])
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            if disturb:
                with perturbed(model, 0.5):
                    assert torch.is_grad_enabled()
            optimiser.step()
            optimiser.zero_grad()
        loss: float = model(input_ids=ids, labels=ids).loss.item()
        return loss

    assert loss_after(disturb=True) == loss_after(disturb=False)


def test_parameters_that_zero3_holds_elsewhere_are_refused() -> None:
    model = nn.Linear(2, 2)
    setattr(model.weight, "ds_id", 0)  # noqa: B010
    with pytest.raises(PerturbError, match="ZeRO-3"), perturbed(model, 0.5):
        pytest.fail("entered")
