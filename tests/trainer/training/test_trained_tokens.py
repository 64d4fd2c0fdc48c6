"""Training on the trained tokens alone, in one pass: the loss, the gradients and all that is measured are TRL's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from trl import GRPOTrainer

from tests.fork_server import ForkServer
from tests.trainer.training.made_up import SHARED, STEPS, WINDOW, Train, measured, require_equal, weights
from trainer.training import scoring
from trainer.training.one_pass import OnePassTrainer
from trainer.training.trained_tokens import gradient_weight

DESCENT = {"optim": "sgd", "learning_rate": 0.1}
"""Plain descent: Adam divides by a gradient's size, and makes rounding as large as the rest."""

PER_MICRO_BATCH = ("entropy", "kl", "clip_ratio", "cispo_clip_ratio", "vespo")
"""Metrics that TRL takes the mean of over micro-batches, whatever they hold."""


class Undealt(OnePassTrainer):
    """Leaves the rows in the micro-batches in which TRL put them."""

    def _dealt(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return batches


FLAGS: list[dict[str, Any]] = [
    {"loss_type": "dapo"},
    {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.1},
    {"loss_type": "bnpo", "steps_per_generation": 1},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True, "top_entropy_quantile": 0.5},
    {"loss_type": "sapo", "num_iterations": 2, "max_steps": 4},
    {"loss_type": "cispo", "use_adaptive_entropy": True, "entropy_coef": 0.01},
    {"loss_type": "vespo", "steps_per_generation": 4, "max_steps": 4},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5, "temperature": 0.7},
    {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 2.0},
    {"vllm_importance_sampling_mode": "sequence_mask", "off_policy_mask_threshold": 0.5},
    {"vllm_importance_sampling_correction": False, "delta": 4.0},
    {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "vllm_importance_sampling_mode": "token_mask"},
    {"gradient_checkpointing": True, "pad_to_multiple_of": 16, "cast_lm_head_to_fp32": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_run_is_trls_own_to_rounding(train: Train, flags: dict[str, Any]) -> None:
    stock, played = train(GRPOTrainer, **DESCENT | flags)
    ours, again = train(Undealt, **DESCENT | flags)
    assert again.batches == played.batches
    require_equal(ours, stock)
    dealt, again = train(OnePassTrainer, **DESCENT | flags)
    assert again.batches == played.batches
    torch.testing.assert_close(weights(dealt), weights(stock), rtol=0, atol=1e-6)
    for row, expected in zip(measured(dealt), measured(stock), strict=True):
        assert {k: v for k, v in row.items() if not k.startswith(PER_MICRO_BATCH)} == pytest.approx(
            {k: v for k, v in expected.items() if not k.startswith(PER_MICRO_BATCH)}, abs=1e-5, nan_ok=True
        )


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ({}, [2]),
        ({"loss_type": "bnpo"}, []),
        ({"entropy_coef": 0.1}, []),
        ({"top_entropy_quantile": 0.5}, []),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, [2]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, [2, 2]),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, []),
    ],
    ids=str,
)
def test_rows_of_like_length_share_a_micro_batch_within_an_optimizer_step(
    train: Train, flags: dict[str, Any], windows: list[int]
) -> None:
    """Where the loss is the same."""
    batches: list[tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]] = []

    class Watched(OnePassTrainer):
        def _dealt(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
            dealt = super()._dealt(given)
            batches.append((given, dealt))
            return dealt

    train(Watched, max_steps=1, **flags)
    given, dealt = batches[0]
    if not windows:
        assert dealt is given
    for window in range(len(windows)):
        begin, end = sum(windows[:window]), sum(windows[: window + 1])
        before, after = (
            [(int(i), int(m.sum())) for b in side[begin:end] for i, m in zip(rows_in(b), b["prompt_mask"], strict=True)]
            for side in (given, dealt)
        )
        assert sorted(before) == sorted(after), "no row is lost, and none leaves its step"
        lengths = [
            int(prompt.sum()) + max([place + 1 for place, said in enumerate(own) if said], default=0)
            for batch in dealt[begin:end]
            for prompt, own in zip(batch["prompt_mask"], batch["completion_mask"] * batch["tool_mask"], strict=True)
        ]
        assert lengths == sorted(lengths)


def rows_in(batch: dict[str, Tensor]) -> list[int]:
    """Something that tells rows apart."""
    return [hash(tuple(ids.tolist())) for ids in torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_is_trained_the_same(train: Train, beta: float) -> None:
    adapter = {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": "gaussian"}
    runs = []
    for kind in (GRPOTrainer, Undealt):
        torch.manual_seed(0)
        runs.append(train(kind, peft_config=LoraConfig(**adapter), beta=beta, **DESCENT)[0])
    require_equal(runs[1], runs[0])


def test_two_ranks_are_trls_own_to_rounding(tmp_path: Path, forks: ForkServer) -> None:
    """Each rank leaves what the runs of both trainers came to; also with layers whose pass is a collective."""
    worker = Path(__file__).with_name("two_ranks.py")
    done = forks.run([sys.executable, "-m", "tests.forked_ranks", str(worker), str(tmp_path)], timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(path.read_text() for path in tmp_path.glob("rank-*")) == ["0 agrees", "1 agrees"]


@contextmanager
def counted_tokens() -> Iterator[list[int]]:
    """Note how many tokens each pass through a model's embedding reads."""
    read: list[int] = []
    forward = nn.Embedding.forward

    def counting(self: nn.Embedding, ids: Tensor) -> Tensor:
        read.append(ids.numel())
        embedded: Tensor = forward(self, ids)
        return embedded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", counting)
        yield read


def test_what_rows_share_is_read_once_and_padding_hardly(train: Train) -> None:
    with counted_tokens() as read:
        _, played = train(OnePassTrainer)
    own = 0
    for batch in played.batches:
        for prompt, mask in zip(batch["prompt_ids"], batch["env_mask"], strict=True):
            last = max((place for place, said in enumerate(mask) if said), default=None)
            own += 0 if last is None else len(prompt) - SHARED + last
    most = WINDOW * STEPS
    assert own < sum(read) <= own + most * (SHARED + scoring.PASS_TOKENS)


def test_a_batch_is_read_before_it_is_trained_on_only_where_that_tells_something(train: Train) -> None:
    def passes_without_gradients(**flags: Any) -> int:
        found = 0
        forward = Qwen3MLP.forward

        def counting(self: Qwen3MLP, hidden: Tensor) -> Tensor:
            nonlocal found
            found += not torch.is_grad_enabled()
            output: Tensor = forward(self, hidden)
            return output

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Qwen3MLP, "forward", counting)
            train(OnePassTrainer, **flags)
        return found

    assert passes_without_gradients() == 0
    assert passes_without_gradients(gradient_accumulation_steps=4, steps_per_generation=2) == 0
    assert passes_without_gradients(num_iterations=2) > 0, "the second iteration's weights are others"
    assert passes_without_gradients(steps_per_generation=4) > 0, "the second step's weights are others"
    dropout = LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM", lora_dropout=0.1)
    assert passes_without_gradients(peft_config=dropout) > 0, "two passes differ"


def test_a_batch_without_trained_tokens_changes_nothing_and_fails_nothing(train: Train) -> None:
    """Its gradients are zeros, and not missing: ranks add them up."""
    rollouts: list[Any] = []

    class Untrained(OnePassTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            prompt_ids, completion_ids, masks, *rest = super()._generate(prompts)
            silent = [[0] * len(mask) for mask in masks]
            assert self._trained is not None
            self._trained = torch.zeros_like(self._trained)
            rollouts.append(silent)
            return prompt_ids, completion_ids, silent, *rest

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            assert all(p.grad is not None and not p.grad.any() for p in self.model.parameters())
            return loss

    trainer, _ = train(Untrained, **DESCENT, weight_decay=0.0)
    assert rollouts
    assert [row["loss"] for row in trainer.state.log_history if "loss" in row] == [0.0] * STEPS


def test_the_gradients_weight_is_what_trained_tokens_times_advantages_come_to() -> None:
    """Two groups of two: of the environment's tokens, the padding's and the rows cut off, none counts."""
    batch = {
        "advantages": torch.tensor([1.0, -1.0, 0.25, -0.25]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 1, 1]]),
    }
    assert gradient_weight(batch, [True, True, False, False]).tolist() == [5.0, 5.5]
    assert gradient_weight({**batch, "advantages": torch.zeros(4)}, [True] * 4).tolist() == [0.0, 0.0]
