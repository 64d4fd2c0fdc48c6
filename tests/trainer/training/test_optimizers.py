"""Muon beside AdamW: who gets which parameter, that a schedule and a checkpoint reach both; the rates of schedules."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

from trainer.training.checkpointing import CheckpointingTrainer
from trainer.training.optimizers import MuonAdamW


def toy(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 6, generator=generator)
    targets = torch.randn(32, 3, generator=generator)
    loss: torch.Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


def train(model: nn.Module, optimizer: MuonAdamW, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_hidden_matrices_go_to_muon_and_everything_else_to_adamw() -> None:
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, adamw = MuonAdamW(model, muon_lr=0.02, adamw_lr=0.003).param_groups
    matrices, others = ({names[id(p)] for p in group["params"]} for group in (muon, adamw))
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    expected = {f"model.layers.{i}.{layer}.weight" for i in range(2) for layer in layers}
    frozen = "model.layers.0.mlp.up_proj.weight"
    assert matrices == expected - {frozen}
    assert others == set(names.values()) - expected
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= others
    assert (muon["lr"], adamw["lr"]) == (0.02, 0.003)


def test_the_loss_goes_down_by_both_parts_and_not_at_a_rate_of_nothing() -> None:
    model = toy()
    optimizer = MuonAdamW(model, muon_lr=0.02, adamw_lr=0.01)
    start = copy.deepcopy(model.state_dict())
    losses = train(model, optimizer, steps=60)
    assert losses[-1] < 0.5 * losses[0]
    end = copy.deepcopy(model.state_dict())
    assert all(not torch.equal(value, start[name]) for name, value in end.items())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    train(model, optimizer, steps=2)
    assert all(torch.equal(value, end[name]) for name, value in model.state_dict().items())
    assert optimizer.step(lambda: 1.5) == 1.5, "a closure is evaluated"


def test_a_checkpoint_goes_on_as_if_nothing_had_happened() -> None:
    model = toy()
    optimizer = MuonAdamW(model, muon_lr=0.02, adamw_lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    train(model, optimizer, steps=5)
    schedule.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    expected = train(model, optimizer, steps=5)

    other = toy(seed=9)
    restored = MuonAdamW(other, muon_lr=1.0, adamw_lr=1.0)
    rescheduled = torch.optim.lr_scheduler.LambdaLR(restored, lambda step: 0.9**step)
    other.load_state_dict(saved[0])
    restored.load_state_dict(saved[1])
    rescheduled.load_state_dict(saved[2])
    assert [group["lr"] for group in restored.param_groups] == pytest.approx([0.018, 0.009])
    assert train(other, restored, steps=5) == expected
    rescheduled.step()
    assert [group["lr"] for group in restored.param_groups] == pytest.approx([0.0162, 0.0081])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Plain(CheckpointingTrainer, Trainer):  # type: ignore[misc]  # transformers carries no types
    """transformers' trainer, with what ours changes in the schedule."""


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "constant", "inverse_sqrt", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_schedules_first_step_has_a_rate_and_its_decay_is_transformers_own(name: str, warmup: int) -> None:
    """A ramp of n steps has the rates 1/n to n/n of the full one, where transformers' has 0/n to (n - 1)/n."""

    def rates(kind: type[Trainer]) -> list[float]:
        arguments = TrainingArguments("unused", use_cpu=True, bf16=False, lr_scheduler_type=name, warmup_steps=warmup)
        arguments.learning_rate = 1.0
        trainer = kind(toy(), arguments)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        scheduler, used = trainer.create_scheduler(10, optimizer), []
        for _ in range(10):
            used.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return used

    ours, theirs = rates(Plain), rates(Trainer)
    ramp = [1.0] * warmup if name == "constant" else [(step + 1) / warmup for step in range(warmup)]
    assert ours == pytest.approx([*ramp, *theirs[warmup:]])
    assert ours[0] > 0
