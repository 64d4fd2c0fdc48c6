"""SQLEnv's side of TRL's GRPOTrainer: the trainer is built here, with the seam for an engine of our own.

GRPOTrainer does the learning; `Batches` gives it its episodes.

The seam: TRL applies importance-sampling correction, and reports how far the sampled logprobs are from its own,
only when it believes that vLLM generates. So the trainer is built without vLLM, then told that our engine is the
generator (`use_engine`): it calls `sync_weights()` once before the rollout of each new global step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from datasets import Dataset as HubDataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config

from env_server.dataset import Question
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError
from trainer.flags.combinations import check_optimizer
from trainer.models import init_kwargs, keep_gradients, load_to_continue, repair_generation_settings
from trainer.policy import PolicyError, resolve_policy
from trainer.rollout.rewards import weights_of
from trainer.training.arguments import advise
from trainer.training.batches import Batches, prompt_of
from trainer.training.evaluating import SQLEnvTrainer
from trainer.training.step_times import WeightSync


def prompt_rows(questions: Sequence[Question]) -> HubDataset:
    """The data set that TRL is given. Of what it draws from it, the number of rows alone matters; see `Batches`."""
    return HubDataset.from_list([{"prompt": prompt_of(question)} for question in questions])


def use_engine(trainer: GRPOTrainer, weights: WeightSync) -> None:
    """Tell the trainer that an engine of ours generates and `weights` syncs it; see the module's docstring."""
    trainer.use_vllm = True
    trainer.vllm_generation = weights
    trainer._last_loaded_step = -1


def stop_at_turns_ends(trainer: GRPOTrainer, chat: ChatFormat) -> None:
    """Have TRL know every token that a turn may end with: a row that ends with one is not truncated."""
    trainer.eos_token_ids = list(dict.fromkeys((*trainer.eos_token_ids, *chat.stop_ids)))


def model_arguments(grpo: GRPOConfig, model_config: ModelConfig) -> dict[str, Any]:
    """What GRPOTrainer is told of the policy; sets the config's `model_init_kwargs`. Raises PolicyError."""
    policy = resolve_policy(str(model_config.model_name_or_path), model_config.model_revision)
    grpo.model_init_kwargs = init_kwargs(model_config, grpo)
    quantization = get_quantization_config(model_config)
    if policy.adapter is None:
        adapter = get_peft_config(model_config)
        return {"model": policy.base.location, "quantization_config": quantization, "peft_config": adapter}
    return {"model": load_to_continue(policy, grpo, quantization, lora_dropout=model_config.lora_dropout)}


def build_trainer(
    grpo: GRPOConfig,
    model_config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    eval_questions: Sequence[Question],
    batches: Batches,
) -> SQLEnvTrainer:
    """TRL's trainer, with our rewards, rollout and evaluation, on a checkpoint or an adapter.

    Raises PolicyError, ConfigError.
    """
    grpo.reward_weights = weights_of(batches.rewards, grpo.reward_weights)
    policy = model_arguments(grpo, model_config)
    try:
        trainer = SQLEnvTrainer(
            **policy,
            reward_funcs=list(batches.rewards),
            args=grpo,
            train_dataset=prompt_rows(questions),
            # Only so that transformers lets evaluation happen; see `trainer.training.evaluating`.
            eval_dataset=prompt_rows(eval_questions) if eval_questions else None,
            processing_class=tokenizer,
            rollout_func=batches,
        )
        check_optimizer(grpo, trainer.model)
    except OSError as error:
        if error.filename is not None and str(error.filename).startswith(grpo.output_dir):
            raise ConfigError(
                f"--output_dir {grpo.output_dir}: {error.strerror}; it has to belong to the user who runs this, "
                f"number {os.getuid()}"
            ) from error
        raise PolicyError(f"{model_config.model_name_or_path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        # What TRL, PEFT and transformers say of arguments that do not fit the model or each other.
        raise ConfigError(" ".join(str(error).split())) from error
    if line := repair_generation_settings(trainer.model):
        advise("sqlenv train", [line])
    keep_gradients(trainer.model, model_config)
    trainer.train_on(batches)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer
