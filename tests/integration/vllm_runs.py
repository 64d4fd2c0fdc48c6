"""What tests of `sqlenv train --use_vllm` share: a short run of the tiny policy, and what its metrics have to say."""

from __future__ import annotations

from pathlib import Path

from trainer.tiny import BASE_CHECKPOINT

FLAGS = [
    *("--model_name_or_path", str(BASE_CHECKPOINT), "--data", "synthetic", "--eval_episodes", "16"),
    *("--max_turn_length", "64", "--max_completion_length", "512", "--max_steps", "3"),
    *("--gradient_accumulation_steps", "1"),
    *("--per_device_train_batch_size", "8", "--num_generations", "4", "--learning_rate", "1e-3"),
    *("--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none", "--use_cpu", "true"),
    *("--bf16", "false", "--gradient_checkpointing", "false", "--seed", "3"),
]
NO_CHECKPOINTS = ("--save_strategy", "no")
LORA = ("--use_peft", "true", "--lora_r", "8", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj")


def command(folder: Path, urls: str, *flags: str) -> list[str]:
    """Return the arguments of a short run of the tiny policy on servers."""
    vllm = ("--use_vllm", "true", "--vllm_server_base_url", urls)
    return ["train", "--output_dir", str(folder), *FLAGS, *vllm, *flags]


def token_exact(metrics: dict[str, float]) -> bool:
    """Whether a step was trained on tokens that the servers drew with the trainer's weights."""
    return (
        metrics["sampling/sampling_logp_difference/max"] < 1e-3
        and metrics["sampling/importance_sampling_ratio/min"] > 1 - 1e-3
        and metrics["sampling/importance_sampling_ratio/max"] < 1 + 1e-3
    )
