"""What a user's flags and `--config` say, read by `TrlParser` and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, ModelConfig, TrlParser

from trainer.config import ConfigError, SQLEnvArguments, config_errors
from trainer.engines import check_vllm_flags
from trainer.evaluating import settle_evaluation

DESCRIPTION = """\
GRPO on SQLEnv, with evaluation before and after, and the report.

Arguments are TRL's (GRPOConfig, ModelConfig) and SQLEnv's own, from flags and --config FILE.yaml. All that a run writes
is in its --output_dir: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints, model/ and report.html.
"""


def parse_arguments(argv: Sequence[str]) -> tuple[SQLEnvArguments, GRPOConfig, ModelConfig]:
    """Read flags and `--config`. Raises ConfigError."""
    parser = TrlParser((SQLEnvArguments, GRPOConfig, ModelConfig), prog="sqlenv train", description=DESCRIPTION)
    # TRL recomputes the logprobs with dropout on, and they would not be those that were sampled under.
    parser.set_defaults(lora_dropout=0.0)
    # Servers are the only way here; and the default mode of the correction silently drops long episodes.
    parser.set_defaults(vllm_mode="server", vllm_importance_sampling_mode="token_truncate")
    # transformers wants the evaluation batches to fill with these; we play each question once (`trainer.evaluating`).
    parser.set_defaults(num_generations_eval=1)
    with config_errors():
        arguments, grpo, model_config = parser.parse_args_and_config(list(argv))
    if not model_config.model_name_or_path:
        raise ConfigError("name the policy to train with --model_name_or_path (a folder or a model on the Hub)")
    if grpo.use_vllm:
        check_vllm_flags(arguments, grpo, model_config)
    settle_evaluation(grpo, arguments.eval_episodes)
    if grpo.max_completion_length is None or grpo.max_completion_length <= 0:
        raise ConfigError(f"--max_completion_length must be positive, not {grpo.max_completion_length}")
    if grpo.enable_jit_checkpoint:
        raise ConfigError(
            "leave --enable_jit_checkpoint out: SIGTERM saves a checkpoint anyway, at the end of the step"
        )
    if str(grpo.resume_from_checkpoint).lower() == "true":
        grpo.resume_from_checkpoint = get_last_checkpoint(grpo.output_dir) if Path(grpo.output_dir).is_dir() else None
        if grpo.resume_from_checkpoint is None:
            raise ConfigError(f"{grpo.output_dir} holds no checkpoint to resume from; was save_strategy set?")
    return arguments, grpo, model_config


def require_questions(count: int, grpo: GRPOConfig) -> None:
    """Refuse a data set that does not fill one step: TRL would drop the step, and train nothing without a word."""
    wanted = grpo.generation_batch_size // grpo.num_generations
    if count < wanted:
        fix = "Give more questions, or lower --per_device_train_batch_size or --gradient_accumulation_steps"
        raise ConfigError(f"one step plays {wanted} questions, and the data set has {count} for training. {fix}")
