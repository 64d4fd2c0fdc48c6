"""The check of a push: the trainer's own logprobs, and which gaps to a server's are noise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from inference.hf.engine import evaluating
from inference.weights.check import FIRST_BOUND, GROWTH, HARMLESS, LARGEST_GAP, GapMonitor, gap
from inference.weights.transport import WeightSyncError
from tests.logprobs import logprobs_of


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


def test_the_gap_is_a_root_mean_square() -> None:
    assert gap([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.3, -3.4, -4.0]) == pytest.approx(0.25)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_the_same(broken: float) -> None:
    with pytest.raises(WeightSyncError, match="the server's logprob is"):
        gap([-1.0, -2.0], [-1.0, broken])
    with pytest.raises(WeightSyncError, match="the trainer's logprob is"):
        gap([broken, -2.0], [broken, -2.0])


def test_missing_tokens_are_never_the_same() -> None:
    with pytest.raises(WeightSyncError, match="for 2 tokens and the server for 1"):
        gap([-1.0, -2.0], [-1.0])
    with pytest.raises(WeightSyncError, match="for 0 tokens"):
        gap([], [])


@given(st.floats(0.0, FIRST_BOUND), st.lists(st.floats(0.0, 2 * LARGEST_GAP)), st.booleans())
def test_later_gaps_are_judged_by_the_first(first: float, later: list[float], strict: bool) -> None:
    monitor = GapMonitor(strict)
    monitor.judge(first)
    bound = max(HARMLESS, GROWTH * first)
    for found in later:
        if found > LARGEST_GAP or (strict and found > bound):
            with pytest.raises(WeightSyncError, match="logprobs differ"):
                monitor.judge(found)
        else:
            monitor.judge(found)


def test_a_gap_that_grows_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    monitor = GapMonitor(strict=False)
    for found, warnings in ((0.01, 0), (0.04, 0), (0.06, 1), (0.3, 2)):
        monitor.judge(found)
        assert len(caplog.records) == warnings
    GapMonitor(strict=False).judge(2 * FIRST_BOUND)
    assert len(caplog.records) == 3
