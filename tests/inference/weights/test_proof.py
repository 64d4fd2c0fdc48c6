"""The proof of a push: one tensor that stayed behind is found and named, noise is not taken for one.

The server is another implementation of the same policy: float64 and eager attention beside float32, all of it in
bfloat16 beside bfloat16 autocast.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from inference.weights.perturb import Perturbation, PerturbError, perturbed, pushed_parameters
from inference.weights.probe import token_logprobs
from inference.weights.proof import (
    LARGEST_EFFECT,
    LARGEST_SCALE,
    LEAST_SIGNAL,
    NEARER,
    PROBE_TEMPERATURE,
    PROOF_TOKENS,
    SMALLEST_SCALE,
    Evidence,
    Prover,
    Sample,
    plan_scales,
)
from inference.weights.sensitivity import HEAD, effects, overlaps, tied_head
from inference.weights.transport import WeightSyncError
from tests.logprobs import logprobs_of

VOCAB = 211
PROMPT = tuple(random.Random(0).choices(range(VOCAB), k=12))
TOKENS = tuple(random.Random(1).choices(range(VOCAB), k=PROOF_TOKENS))
OTHER_TOKENS = tuple(random.Random(2).choices(range(VOCAB), k=PROOF_TOKENS))


def policy(layers: int, *, tied: bool = True) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


class Pair:
    """A trainer's model, and a server that holds the same weights."""

    def __init__(self, model: nn.Module, half: bool, trainable_only: bool = False) -> None:
        self.model = model
        self.half = half
        self.prover = Prover(
            model, self.logprobs, partial(token_logprobs, model), PROMPT, trainable_only=trainable_only
        )

    def logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            return token_logprobs(self.model, prompt, tokens, temperature)

    def sample(self, tokens: tuple[int, ...] = TOKENS) -> Sample:
        server = copy.deepcopy(self.model).to(torch.bfloat16 if self.half else torch.float64)
        server.config._attn_implementation = "eager"  # type: ignore[union-attr]
        return Sample("http://server", tokens, tuple(logprobs_of(server, PROMPT, tokens, PROBE_TEMPERATURE)))

    @contextmanager
    def proving(self, trainable_only: bool = False) -> Iterator[tuple[float, Perturbation]]:
        at_the_start = self.sample()
        noise = self.prover.distance(at_the_start)
        scales = self.prover.scales(at_the_start, noise)
        with perturbed(self.model, scales, trainable_only=trainable_only) as changes:
            yield noise, changes


def smallest(model: nn.Module, part: str) -> str:
    """The tensor of its kind that is smallest, somewhere in the middle of the model where nothing stands out."""
    names = {name: p.detach().norm().item() for name, p in model.named_parameters() if part in name}
    return min(names, key=lambda name: names[name])


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [2, 30])
def test_a_tensor_that_stayed_behind_is_found_out(layers: int, half: bool) -> None:
    model = policy(layers)
    pair = Pair(model, half)
    middle = f"model.layers.{layers // 2}."
    stale = [
        smallest(model, "norm.weight"),
        smallest(model, "bias"),
        f"{middle}self_attn.q_proj.weight",
        f"{middle}mlp.gate_proj.weight",
    ]
    if half and layers == 30:
        # With random weights everything is attended to alike, and what queries do is lost in thirty layers' rounding.
        stale.remove(f"{middle}self_attn.q_proj.weight")
    head = tied_head(model, pushed_parameters(model, trainable_only=False))
    assert head is not None
    with pair.proving() as (noise, changes):
        clean = pair.sample()
        evidence = pair.prover.examine(clean, noise, changes)
        assert evidence.lacking == ()
        for name in stale:
            with changes.left_behind(name):
                sample, another = pair.sample(), pair.sample(OTHER_TOKENS)
            found = pair.prover.examine(sample, noise, changes)
            assert name in found.lacking
            assert name in pair.prover.confirmed(another, found.lacking, changes)
            assert pair.prover.confirmed(pair.sample(OTHER_TOKENS), found.lacking, changes) == ()
            assert found.complaint().startswith("it keeps what it had of")
        with head.holding(changes.original(head.name)):
            sample = pair.sample()
        assert HEAD in pair.prover.examine(sample, noise, changes).lacking
    without = pair.prover.distance(clean)
    assert NEARER * evidence.with_changes < without < 2 * LARGEST_EFFECT


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_either_half_of_an_adapter_that_stayed_behind_is_named(half: bool) -> None:
    torch.manual_seed(4)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(policy(12), lora).eval()
    pair = Pair(model, half, trainable_only=True)
    with pair.proving(trainable_only=True) as (noise, changes):
        evidence = pair.prover.examine(pair.sample(), noise, changes)
        assert evidence.lacking == ()
        for part in ("q_proj.lora_A", "q_proj.lora_B", "down_proj.lora_A", "down_proj.lora_B"):
            name = next(
                name
                for name, _ in model.named_parameters()
                if f".7.self_attn.{part}" in name or f".7.mlp.{part}" in name
            )
            with changes.left_behind(name):
                sample = pair.sample()
            found = pair.prover.examine(sample, noise, changes)
            assert name in found.lacking
            assert found.complaint().startswith("it keeps what it had of")


def test_of_several_that_stayed_behind_no_other_is_named() -> None:
    pair = Pair(policy(2), half=False)
    stale = ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    with pair.proving() as (noise, changes):
        with changes.left_behind(stale[0]), changes.left_behind(stale[1]):
            two = pair.sample()
        found = pair.prover.examine(two, noise, changes)
        assert found.lacking
        assert set(found.lacking) <= set(stale)


def test_a_server_that_took_nothing_is_no_nearer() -> None:
    pair = Pair(policy(2), half=False)
    before = pair.sample()
    with pair.proving() as (noise, changes):
        found = pair.prover.examine(before, noise, changes)
    assert found.with_changes > 1e3 * pair.prover.distance(before)


def test_what_the_proof_says() -> None:
    fine = Evidence("http://a", 0.01, 0.01, 1.0, 12.0)
    assert fine.complaint() == ""
    none = Evidence("http://a", 0.01, 0.9, 1.0, 12.0)
    assert none.complaint().startswith("logprobs differ by 0.9 from the trainer's with the weights that were pushed")
    one = Evidence("http://a", 0.01, 0.02, 1.0, 12.0, lacking=("model.norm.weight",))
    assert one.complaint().startswith("it keeps what it had of model.norm.weight; logprobs differ by 0.02")
    rest = Evidence("http://a", 0.01, 0.07, 1.0, 12.0)
    assert rest.complaint().startswith("part of the weights did not arrive; logprobs differ by 0.07")
    many = Evidence("http://a", 0.01, 0.02, 1.0, 12.0, lacking=("a", "b", "c"))
    assert "it keeps what it had of a, b, c, and perhaps more; " in many.complaint()


@given(
    st.dictionaries(st.integers().map(str), st.floats(1e-6, 100.0), min_size=1, max_size=400),
    st.floats(1e-8, 10.0),
    st.integers(1, 256),
)
def test_scales_are_within_bounds_or_refused(moved: dict[str, float], noise: float, tokens: int) -> None:
    if LEAST_SIGNAL * noise * math.sqrt(len(moved) / tokens) > LARGEST_EFFECT:
        with pytest.raises(WeightSyncError, match="too much to prove"):
            plan_scales(moved, dict.fromkeys(moved, 1.0), noise, tokens)
        return
    scales = plan_scales(moved, dict.fromkeys(moved, 1.0), noise, tokens)
    assert scales.keys() == moved.keys()
    assert all(0.0 < scale <= LARGEST_SCALE for scale in scales.values())
    planned = [name for name in moved if scales[name] > SMALLEST_SCALE]
    together = math.sqrt(math.fsum((scales[name] * moved[name]) ** 2 for name in planned))
    assert together <= LARGEST_EFFECT * 1.001


def test_gradients_find_what_a_forward_pass_finds() -> None:
    model = policy(2)
    parameters = pushed_parameters(model, trainable_only=False)

    def values() -> Tensor:
        return token_logprobs(model, PROMPT, TOKENS)

    with perturbed(model, 0.01) as changes:
        here = torch.tensor(logprobs_of(model, PROMPT, TOKENS))
        estimated = effects(model, parameters, values, changes.change, 8)
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.bias"):
            with changes.left_behind(name):
                moved = here - torch.tensor(logprobs_of(model, PROMPT, TOKENS))
            assert 0.4 < estimated[name] / moved.square().mean().sqrt().item() < 2.5
            found = overlaps(model, parameters, values, changes.change, moved.tolist())
            assert found[name] == pytest.approx(moved.square().sum().item(), rel=0.1)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_of_a_model_that_zero3_partitions_no_gradients_are_taken() -> None:
    """DeepSpeed leaves an empty tensor in a parameter's place outside of a forward pass, and marks it by `ds_id`."""
    model = policy(2)
    for index, parameter in enumerate(model.parameters()):
        setattr(parameter, "ds_id", index)  # noqa: B010
        parameter.data = torch.empty(0)

    def logprobs(*_: object) -> Tensor:
        """As the forward pass computes them that gathers the parameters."""
        return torch.zeros(PROOF_TOKENS, requires_grad=True)

    prover = Prover(model, logprobs, logprobs, PROMPT, trainable_only=False)
    scales = prover.scales(Sample("http://server", TOKENS, (0.0,) * PROOF_TOKENS), 1e-6)
    with pytest.raises(PerturbError), perturbed(model, scales):
        pytest.fail("entered")
