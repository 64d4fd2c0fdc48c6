"""The probe: what it asks, what the trainer's model says to it, and what counts as the same."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from inference.hf import evaluating
from inference.weights.probe import Tolerance, compare, logprobs_of

FLOAT32, HALF = Tolerance.of(torch.float32), Tolerance.of(torch.bfloat16)


def tiny_policy() -> PreTrainedModel:
    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=96,
        attention_dropout=0.5,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
def test_logprobs_are_the_models_own_and_without_dropout(temperature: float) -> None:
    model = tiny_policy().eval()
    prompt, tokens = (5, 6, 7, 8), (9, 10, 11)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    rows = torch.log_softmax(logits / (temperature or 1.0), -1)
    expected = [rows[3, 9].item(), rows[4, 10].item(), rows[5, 11].item()]
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert logprobs_of(model, prompt, tokens, temperature) == pytest.approx(expected, abs=1e-6)
    assert [module.training for module in model.modules()] == modes


def test_half_precision_is_summed_in_float32() -> None:
    model = tiny_policy().to(torch.bfloat16)
    every = [logprobs_of(model, (5, 6), (token,))[0] for token in range(61)]
    assert math.fsum(math.exp(value) for value in every) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("prompt", "tokens"), [((), (3,)), ((3,), ())])
def test_a_probe_without_prompt_or_tokens_is_refused(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a probe needs"):
        logprobs_of(tiny_policy(), prompt, tokens)


def test_modes_return_after_an_exception() -> None:
    model = tiny_policy().train()
    inside = []
    with pytest.raises(KeyError), evaluating(model):  # noqa: PT012
        inside = [module.training for module in model.modules()]
        raise KeyError
    assert not any(inside)
    assert all(module.training for module in model.modules())


def test_tolerances_follow_the_dtype() -> None:
    assert Tolerance(largest=5e-4) == FLOAT32 == Tolerance.of(torch.float64)
    assert Tolerance(mean=0.1) == HALF == Tolerance.of(torch.float16)


def test_what_is_within_the_tolerance_is_the_same() -> None:
    assert compare([-1.0, -2.0], [-1.0004, -2.0], FLOAT32) == ""
    assert compare([-1.0, -2.0], [-1.19, -2.0], HALF) == ""


def test_the_sentence_says_how_much_where_and_how_many() -> None:
    said = compare([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.001, -3.5, -4.0], FLOAT32)
    assert said == (
        "logprobs differ by 0.5 at token 2 (trainer -3.0000, server -3.5000) and by 0.125 on average, where at most "
        "0.0005 is allowed; 2 of 4 tokens are beyond that"
    )
    assert "a mean of at most 0.1 is allowed" in compare([-1.0, -2.0], [-1.3, -2.0], HALF)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tolerance", [FLOAT32, HALF, Tolerance()])
def test_what_is_not_finite_is_never_the_same(broken: float, tolerance: Tolerance) -> None:
    assert "the server's logprob is" in compare([-1.0, -2.0], [-1.0, broken], tolerance)
    assert "the trainer's logprob is" in compare([broken, -2.0], [broken, -2.0], tolerance)


def test_missing_tokens_are_never_the_same() -> None:
    assert "for 2 tokens and the server for 1" in compare([-1.0, -2.0], [-1.0], HALF)
    assert "for 0 tokens" in compare([], [], HALF)
