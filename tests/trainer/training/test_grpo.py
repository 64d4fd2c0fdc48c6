"""The seams of TRL's trainer: the prompts that it is given, and what it is told of the ends of turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from env_server.dataset import Dataset, Split
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat
from trainer.rollout.episodes import Episode
from trainer.training.grpo import prompt_rows, stop_at_turns_ends

Batch = tuple[int, list[Episode]]


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
