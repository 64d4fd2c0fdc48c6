"""Perturbation: every tensor counts, every bit returns, and the outputs stay tame."""

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

from inference.weights.perturb import PerturbError, perturbed
from inference.weights.probe import Tolerance, logprobs_of

VOCAB = 61
PROMPT, TOKENS = (tuple(random.Random(seed).choices(range(VOCAB), k=20)) for seed in (0, 1))
FLOAT32 = Tolerance.of(torch.float32).largest or 0.0

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


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_that_missed_any_one_tensor_is_found_out(policy: str) -> None:
    model = POLICIES[policy]()
    original = bits(model)
    with perturbed(model):
        everything = logprobs_of(model, PROMPT, TOKENS)
        for name, parameter in model.named_parameters():
            changed = parameter.detach().clone()
            parameter.data.copy_(original[name])
            stale = distance(logprobs_of(model, PROMPT, TOKENS), everything)
            parameter.data.copy_(changed)
            assert stale > 10 * FLOAT32, name
    assert all(same(parameter, original[name]) for name, parameter in model.named_parameters())


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
    with perturbed(model):
        inside = logits()
    assert torch.isfinite(inside).all()
    assert 0.3 < inside.std() / before.std() < 3
    assert inside.softmax(-1).max() < max(0.5, 1.5 * before.softmax(-1).max().item())
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
    with perturbed(model):
        for name, parameter in model.named_parameters():
            assert same(parameter, before[name]) == (name == "empty"), name
    for name, parameter in model.named_parameters():
        assert same(parameter, before[name]), name
        assert parameter.data_ptr() == addresses[name]
        assert parameter.grad_fn is None


def test_every_process_makes_the_same_change() -> None:
    one, other = tiny(), tiny()
    with perturbed(one), perturbed(other):
        assert all(same(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_tied_tensors_are_changed_once_even_as_two_parameters() -> None:
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3, bias=False)
    second.weight.data = first.weight.data
    before = first.weight.detach().clone()
    with perturbed(nn.Sequential(first, second)):
        assert same(first.weight, before.roll(1))
        assert same(second.weight, first.weight)
    assert same(first.weight, before)


def test_an_exception_inside_passes_and_nothing_stays_changed() -> None:
    model = tiny()
    before = bits(model)
    with pytest.raises(KeyError), perturbed(model):
        raise KeyError
    assert all(same(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_failure_on_the_way_in_changes_nothing() -> None:
    model = tiny()
    before = bits(model)
    # Writing to an expanded tensor fails: by then, the parameters before it have been changed.
    model.late = nn.Parameter(torch.arange(2.0)[:, None].expand(2, 2))
    with pytest.raises(RuntimeError), perturbed(model):
        pytest.fail("entered")
    del model.late
    assert all(same(parameter, before[name]) for name, parameter in model.named_parameters())


def test_only_what_an_adapter_push_carries_when_asked() -> None:
    model = adapted(modules_to_save=["lm_head"])
    before = bits(model)
    with perturbed(model, trainable_only=True):
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
                with perturbed(model):
                    assert torch.is_grad_enabled()
            optimiser.step()
            optimiser.zero_grad()
        loss: float = model(input_ids=ids, labels=ids).loss.item()
        return loss

    assert loss_after(disturb=True) == loss_after(disturb=False)


def test_parameters_that_zero3_holds_elsewhere_are_refused() -> None:
    model = nn.Linear(2, 2)
    setattr(model.weight, "ds_id", 0)  # noqa: B010
    with pytest.raises(PerturbError, match="ZeRO-3"), perturbed(model):
        pytest.fail("entered")
