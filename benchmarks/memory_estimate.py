"""How far the memory that `sqlenv train --dry_run` estimates is from what a training step takes.

A real step: TRL's trainer as SQLEnv builds it, on made-up rows of the full length; two optimizer steps, so that the
optimizer's state is there. On a CPU the peak is the process's resident memory, on a GPU what torch reserved. One JSON
line with both sides and their ratio.

    python -m benchmarks.memory_estimate --model FOLDER --rows 4 --completion 448 --autocast [--lora] [--checkpointing]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, ModelConfig, get_peft_config

from trainer.training.grpo import use_engine
from trainer.training.memory import GIB, Load, estimate, shape_of
from trainer.training.out_of_memory import HalvingTrainer

PROMPT = 64


class _Weights:
    """TRL asks to sync an engine; there is none."""

    def sync_weights(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Measure, estimate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder with config.json and a tokenizer; weights are random.")
    parser.add_argument("--rows", type=int, default=4, help="Rows of a micro-batch.")
    parser.add_argument("--completion", type=int, default=448, help="Tokens of a completion.")
    parser.add_argument("--lora", action="store_true", help="Train an adapter on all linear layers.")
    parser.add_argument("--autocast", action="store_true", help="Compute in bfloat16.")
    parser.add_argument("--checkpointing", action="store_true", help="Gradient checkpointing.")
    arguments = parser.parse_args()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    on_gpu = torch.cuda.is_available()

    config = AutoConfig.from_pretrained(arguments.model)
    adapter = get_peft_config(
        ModelConfig(use_peft=arguments.lora, lora_r=32, lora_target_modules=["all-linear"], lora_dropout=0.0)
    )
    if adapter is not None:
        adapter.target_modules = "all-linear"
    load = Load(
        rows=arguments.rows,
        prompt=PROMPT,
        completion=arguments.completion,
        autocast=arguments.autocast,
        gradient_checkpointing=arguments.checkpointing,
        optimizer="adamw_torch_fused",
        on_gpu=on_gpu,
    )
    expected = estimate(shape_of(config, adapter), load)

    def rollout(prompts: list[Any], _trainer: HalvingTrainer) -> dict[str, Any]:
        def rows(length: int) -> list[list[int]]:
            return torch.randint(3, config.vocab_size, (len(prompts), length)).tolist()

        return {
            "prompt_ids": rows(PROMPT),
            "completion_ids": rows(arguments.completion),
            "logprobs": [[-1.0] * arguments.completion for _ in prompts],
            "env_mask": [[1] * arguments.completion for _ in prompts],
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(index % 2) for index in range(len(completions))]

    with tempfile.TemporaryDirectory() as folder:
        grpo = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=arguments.rows,
            gradient_accumulation_steps=1,
            num_generations=2,
            max_steps=2,
            max_completion_length=arguments.completion,
            bf16=arguments.autocast,
            use_cpu=not on_gpu,
            gradient_checkpointing=arguments.checkpointing,
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to="none",
            vllm_importance_sampling_mode="token_truncate",
        )
        trainer = HalvingTrainer(
            model=AutoModelForCausalLM.from_config(config, dtype=torch.float32),
            reward_funcs=reward,
            args=grpo,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * 64),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            peft_config=adapter,
            rollout_func=rollout,
        )
        use_engine(trainer, _Weights())
        trainer.train()
    peak = torch.cuda.max_memory_reserved() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "estimated_gib": round(expected.total / GIB, 2),
                "measured_gib": round(peak / GIB, 2),
                "ratio": round(expected.total / peak, 2),
                "parts_gib": {part.name: round(part.bytes / GIB, 2) for part in expected.parts},
                "device": "cuda" if on_gpu else "cpu",
                **vars(arguments),
            }
        )
    )


if __name__ == "__main__":
    main()
