"""The trainer: what it overrides of TRL's, and that the loss, the gradients and all metrics stay TRL's own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM, Trainer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from trl import GRPOConfig, GRPOTrainer

from env_server.dataset import Dataset, Split
from tests.fork_server import ForkServer
from tests.trainer.chat.families import family_tokenizer
from tests.trainer.grpo.made_up import SHARED, STEPS, WINDOW, Train, require_equal
from trainer.chat.format import ChatFormat
from trainer.grpo import SQLEnvTrainer, gradient_weight, prompt_rows, stop_at_turns_ends
from trainer.training.checkpointing import CheckpointingTrainer

DESCENT = {"optim": "sgd", "learning_rate": 0.1}
"""Plain descent: Adam divides by a gradient's size, and makes rounding as large as the rest."""

OVERRIDES: list[tuple[type, type, dict[str, str]]] = [
    (
        SQLEnvTrainer,
        GRPOTrainer,
        {
            "compute_loss": "a documented hook: `_compute_loss` calls the model for logprobs and nothing else, as "
            "`model(input_ids=, attention_mask=, labels=, fused_lm_head=True)`, and takes the old logprobs from the "
            "loss's own where `old_per_token_logps` is missing; `importance_sampling_ratio` it reads after the pass",
            "training_step": "a documented hook: what ran out of memory is retried; `_prepare_inputs` is called once",
            "evaluate": "a documented hook: evaluations play episodes; `_determine_best_metric` reads what it returns",
            "_generate_and_score_completions": "no hook is there: prompts come from the batch that was played, and "
            "advantages of tokens go in; without `vllm_importance_sampling_correction` it takes no old logprobs",
        },
    ),
    (
        CheckpointingTrainer,
        Trainer,
        {
            "_run_epoch": "no step is taken when training has ended already",
            "create_scheduler": "a documented hook: no step at a learning rate of 0",
            "_save": "a policy that cannot be written is kept until it can be",
            "_save_checkpoint": "a full disk costs the checkpoint, not the run",
            "create_model_card": "TRL's names a local base `None`",
        },
    ),
]
"""What is to be looked at in a new TRL or transformers, and why we override it."""


@pytest.mark.parametrize(("ours", "theirs", "reasons"), OVERRIDES, ids=lambda value: getattr(value, "__name__", ""))
def test_only_these_methods_are_overridden(ours: type, theirs: type, reasons: dict[str, str]) -> None:
    own = {name for name, value in vars(ours).items() if callable(value) and not name.startswith("__")}
    assert {name for name in own if hasattr(theirs, name)} == set(reasons)


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
    ours, again = train(SQLEnvTrainer, **DESCENT | flags)
    assert again.batches == played.batches
    require_equal(ours, stock)


def test_advantages_may_differ_from_token_to_token(train: Train) -> None:
    class OfTokens(SQLEnvTrainer):
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            scored = super()._generate_and_score_completions(inputs)
            assert scored["advantages"].dim() == 1
            scored["advantages"] = scored["advantages"][:, None].repeat(1, scored["completion_ids"].shape[1])
            return scored

    require_equal(train(OfTokens, **DESCENT)[0], train(SQLEnvTrainer, **DESCENT)[0])


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_adapter_is_trained_the_same(train: Train, beta: float) -> None:
    adapter = {"target_modules": "all-linear", "r": 4, "task_type": "CAUSAL_LM", "init_lora_weights": "gaussian"}
    runs = []
    for kind in (GRPOTrainer, SQLEnvTrainer):
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


def test_a_shared_prefix_goes_through_the_layers_once_and_padding_hardly(train: Train) -> None:
    with counted_tokens() as read:
        _, played = train(SQLEnvTrainer)
    rows = [len(ids) for batch in played.batches for ids in batch["prompt_ids"]]
    longest = max(len(ids) for batch in played.batches for ids in batch["completion_ids"])
    assert min(rows) > SHARED
    assert sum(read) < len(rows) * (max(rows) - SHARED + longest) + STEPS * WINDOW * (SHARED + max(rows))
    assert sum(read) < sum(rows), "less than the prompts alone"


def test_old_logprobs_take_a_pass_only_where_the_losses_own_are_others(train: Train) -> None:
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
            train(SQLEnvTrainer, **flags)
        return found

    assert passes_without_gradients() == 0
    assert passes_without_gradients(gradient_accumulation_steps=4, steps_per_generation=2) == 0
    assert passes_without_gradients(num_iterations=2) > 0, "the second iteration's weights are others"
    assert passes_without_gradients(steps_per_generation=4) > 0, "the second step's weights are others"
    dropout = LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM", lora_dropout=0.1)
    assert passes_without_gradients(peft_config=dropout) > 0, "two passes differ"


def test_a_batch_without_trained_tokens_changes_nothing_and_fails_nothing(train: Train) -> None:
    """Its gradients are zeros, and not missing: ranks add them up."""

    class Untrained(SQLEnvTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            prompt_ids, completion_ids, masks, *rest = super()._generate(prompts)
            return prompt_ids, completion_ids, [[0] * len(mask) for mask in masks], *rest

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)
            assert all(p.grad is not None and not p.grad.any() for p in self.model.parameters())
            return loss

    trainer, _ = train(Untrained, **DESCENT, weight_decay=0.0)
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


def test_a_prompt_is_the_question_and_carries_its_id(pets: Dataset) -> None:
    rows = prompt_rows(pets.select(Split.TRAIN))
    assert rows.column_names == ["prompt"]
    assert [row["prompt"] for row in rows] == [
        [{"role": "user", "content": q.text, "question_id": q.question_id}] for q in pets.select(Split.TRAIN)
    ]


@pytest.mark.parametrize("told", [False, True])
def test_a_row_that_ends_where_turns_end_is_not_truncated_once_trl_is_told(
    told: bool,
    random_policy: Callable[..., Qwen3ForCausalLM],
    pets: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns end with another token than the tokenizer's EOS; rows that TRL takes for cut off teach nothing."""
    tokenizer = family_tokenizer("qwen2_5")
    chat = ChatFormat(tokenizer)
    assert chat.stop_ids[0] != tokenizer.eos_token_id

    def made_up(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        rows = [[5, 6 + index, chat.stop_ids[0]] for index, _ in enumerate(prompts)]
        return {"prompt_ids": [[5]] * len(rows), "completion_ids": rows, "logprobs": [[-6.0] * 3] * len(rows)}

    def places(completions: list[Any], **_: Any) -> list[float]:
        return [float(index) for index, _ in enumerate(completions)]

    config = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        gradient_checkpointing=False,
        mask_truncated_completions=True,
    )
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = GRPOTrainer(
        random_policy(tokenizer),
        places,
        config,
        train_dataset=prompt_rows(pets.questions),
        processing_class=tokenizer,
        rollout_func=made_up,
    )
    if told:
        stop_at_turns_ends(trainer, chat)
    trainer.train()
    (logged, *_) = trainer.state.log_history
    assert logged["completions/clipped_ratio"] == (0.0 if told else 1.0)
    assert (logged["grad_norm"] > 0) == told
