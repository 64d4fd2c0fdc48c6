"""How much memory training takes on the GPU that is here: measured, on made-up rows of the greatest length.

Two optimizer steps, so that the optimizer's state is there in the second, with the model, optimizer and loss of the
run. Where a micro-batch does not fit it is halved until one does, so that the flags that fit are known, not guessed.
"""

from __future__ import annotations

import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset as HubDataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from inference.out_of_memory import is_out_of_memory, release
from trainer.grpo import SQLEnvTrainer, model_arguments, use_engine


def measure(
    grpo: GRPOConfig, model_config: ModelConfig, tokenizer: PreTrainedTokenizerBase, prompt: int, width: int
) -> tuple[int, float]:
    """The rows of a micro-batch that fit on this GPU, halved until they do, and the bytes at the peak.

    Raises RuntimeError when one row does not fit. Collective: every rank calls it.
    """
    rows = grpo.per_device_train_batch_size
    while True:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            train_longest(grpo, model_config, tokenizer, prompt, width, rows)
            return rows, float(torch.cuda.max_memory_reserved())
        except RuntimeError as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
            release(error)
        finally:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rows //= 2


class _OneAttempt(SQLEnvTrainer):
    """Raises when memory runs out, where a run goes on with half the micro-batch."""

    training_step = GRPOTrainer.training_step


class _NoEngine:
    def sync_weights(self) -> None:
        """TRL asks for it; there is no engine."""


def train_longest(
    grpo: GRPOConfig,
    model_config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompt: int,
    width: int,
    rows: int,
) -> None:
    """Take two optimizer steps, each of two micro-batches of so many made-up rows. Writes nothing that stays."""

    def rollout(prompts: list[Any], _: Any) -> dict[str, Any]:
        def made_up(length: int) -> list[list[int]]:
            return torch.randint(len(tokenizer), (len(prompts), length)).tolist()

        completion, count = width - prompt, len(prompts)
        return {
            "prompt_ids": made_up(prompt),
            "completion_ids": made_up(completion),
            "logprobs": [[-1.0] * completion] * count,
            "env_mask": [[1] * completion] * count,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    with TemporaryDirectory(prefix="sqlenv-preflight-") as folder:
        args = copy.copy(grpo)
        args.output_dir, args.report_to, args.disable_tqdm, args.push_to_hub = folder, [], True, False
        args.save_strategy, args.load_best_model_at_end = SaveStrategy.NO, False
        args.eval_strategy, args.eval_on_start, args.logging_strategy = IntervalStrategy.NO, False, IntervalStrategy.NO
        args.max_steps, args.gradient_accumulation_steps, args.steps_per_generation, args.num_iterations = 2, 2, 2, 1
        args.per_device_train_batch_size, args.generation_batch_size = rows, 2 * rows * grpo.world_size
        args.num_generations, args.max_completion_length = 2, width - prompt
        args.reward_weights, args.use_vllm = None, False
        trainer = _OneAttempt(
            **model_arguments(args, model_config),
            reward_funcs=reward,
            args=args,
            train_dataset=HubDataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 64 * rows),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        use_engine(trainer, _NoEngine())
        trainer.train()
