"""What tests of the trainers share: made-up episodes for a real trainer on a random policy, and how runs compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from trainer.grpo import use_engine

ROWS, WINDOW, STEPS = 4, 2, 2
SHARED = 40
"""Tokens that all prompts begin with."""


class Rollouts:
    """Made-up episodes of several lengths, with the environment's tokens between the policy's; and their count.

    Some begin with turns that the policy has said and that are not trained, some have nothing that is.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self.batches: list[dict[str, Any]] = []

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        draw = random.Random(len(self.batches) + 100 * trainer.accelerator.process_index)
        lengths = [draw.randint(3, 12) for _ in prompts]

        def ids(count: int) -> list[int]:
            return [draw.randrange(4, self._vocabulary) for _ in range(count)]

        def mask(length: int) -> list[int]:
            dropped = draw.choice((0, 0, 0, 2, length))
            return [0] * dropped + [draw.randint(0, 3) and 1 for _ in range(length - dropped)]

        system = [4 + place % 9 for place in range(SHARED)]
        batch = {
            "prompt_ids": [system + ids(draw.randint(2, 5)) for _ in prompts],
            "completion_ids": [ids(length) for length in lengths],
            "logprobs": [[-draw.uniform(4, 7) for _ in range(length)] for length in lengths],
            "env_mask": [mask(length) for length in lengths],
            "worth": [draw.random() for _ in prompts],
        }
        self.batches.append(batch)
        return batch


def reward_worth(worth: list[float], **_: Any) -> list[float]:
    """The made-up reward."""
    return worth


class Weights:
    """What TRL asks to sync; see `trainer.grpo.use_engine`."""

    def sync_weights(self) -> None:
        """Nothing to do."""


def train_on(
    policy: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, kind: type[GRPOTrainer], **flags: Any
) -> tuple[Any, Rollouts]:
    """Train a policy for STEPS steps of WINDOW micro-batches of ROWS rows, with some flags of TRL."""
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": WINDOW,
        "num_generations": 4,
        "max_steps": STEPS,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "optim": "adamw_torch",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    rollouts = Rollouts(len(tokenizer))
    adapter = flags.pop("peft_config", None)
    trainer = kind(
        model=str(policy),
        reward_funcs=reward_worth,
        args=GRPOConfig(**arguments | flags),
        train_dataset=HubDataset.from_list([{"prompt": [{"role": "user", "content": "cats"}]}] * 16),
        processing_class=tokenizer,
        rollout_func=rollouts,
        peft_config=adapter,
    )
    use_engine(trainer, Weights())
    trainer.train()
    return trainer, rollouts


Train = Callable[..., tuple[Any, Rollouts]]


def weights(trainer: GRPOTrainer) -> Tensor:
    """All of them, as they are after training."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def measured(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """What was logged, times apart."""
    volatile = ("time", "runtime", "per_second")
    return [{k: v for k, v in row.items() if not k.endswith(volatile)} for row in trainer.state.log_history]


def require_equal(one: GRPOTrainer, other: GRPOTrainer) -> None:
    """The weights, and all that was measured."""
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=1e-6)
    for row, expected in zip(measured(one), measured(other), strict=True):
        assert row == pytest.approx(expected, abs=1e-5, nan_ok=True)
