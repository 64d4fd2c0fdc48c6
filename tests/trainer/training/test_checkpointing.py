"""Schedules of a training run: every step has a rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from trainer.training.checkpointing import CheckpointingTrainer


class Plain(CheckpointingTrainer, Trainer):  # type: ignore[misc]  # transformers carries no types
    """transformers' trainer, with what ours changes in the schedule."""


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "constant", "inverse_sqrt", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_schedules_first_step_has_a_rate_and_its_decay_is_transformers_own(name: str, warmup: int) -> None:
    """A ramp of n steps has the rates 1/n to n/n of the full one, where transformers' has 0/n to (n - 1)/n."""

    def rates(kind: type[Trainer]) -> list[float]:
        arguments = TrainingArguments("unused", use_cpu=True, bf16=False, lr_scheduler_type=name, warmup_steps=warmup)
        arguments.learning_rate = 1.0
        trainer = kind(nn.Linear(6, 3), arguments)
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
