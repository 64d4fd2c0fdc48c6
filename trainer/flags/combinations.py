"""Flags of `sqlenv train` that are well alone and wrong together: refused, or advised against in one line.

Before anything is loaded. Pure, but for the look at which packages are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, ModelConfig

from trainer.config import ConfigError, SQLEnvArguments
from trainer.export.hub import Destination
from trainer.rollout.rewards import reward_hacking_advice, rewards_of

PROMPT_TOKENS = 350
"""The rules, a question and the names of the tables, with a usual tokenizer."""
OBSERVATION_TOKENS = 150
"""A usual observation; the longest, 2,000 characters, is up to ten times that."""
FEWEST_TURNS = 3
"""Describe, query, answer."""
SCALES = ("group", "batch", "none")
MAPPINGS = ("model_init_kwargs", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs")
CHECKPOINTING = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""What `torch.utils.checkpoint` takes."""
BITSANDBYTES_OPTIMIZERS = ("8bit", "bnb", "paged", "lion", "ademamix")
"""What is in the names of the optimizers that bitsandbytes has."""
ALWAYS_UNCHECKED = frozenset({"azure_ml", "flyte"})
"""Trackers whose package transformers does not look for under their name."""


def check_combinations(arguments: SQLEnvArguments, grpo: GRPOConfig, model: ModelConfig) -> list[str]:
    """Return advice against combinations that train badly. Raises ConfigError for those that cannot work."""
    if grpo.max_completion_length is None or grpo.max_completion_length <= 0:
        raise ConfigError(f"--max_completion_length must be positive, not {grpo.max_completion_length}")
    if not grpo.temperature > 0:
        raise ConfigError(
            f"--temperature must be positive, not {grpo.temperature}: without chance, a group is one episode"
        )
    if grpo.max_steps == 0:
        raise ConfigError("--max_steps must be positive, or -1 for as many as --num_train_epochs are")
    if grpo.scale_rewards not in SCALES:
        raise ConfigError(f"--scale_rewards must be one of {list(SCALES)}, not {grpo.scale_rewards!r}")
    if grpo.sync_ref_model and not grpo.beta:
        raise ConfigError("--sync_ref_model moves the reference of the KL term, and --beta 0 has no such term")
    if grpo.sync_ref_model and model.use_peft:
        raise ConfigError(
            "--sync_ref_model moves a whole reference model; an adapter's is its base. Leave one of them out"
        )
    check_mappings(grpo, "chat_template_kwargs")
    check_trackers(grpo.report_to)
    Destination.of(grpo)
    check_quantisation(grpo, model, elsewhere=arguments.plans_gpu)
    if grpo.use_vllm:
        _check_adapters_on_servers(arguments, model)
    return [
        *reward_hacking_advice(
            rewards_of(arguments.reward_functions),
            grpo.reward_weights,
            grpo.multi_objective_aggregation,
            arguments.step_budget,
        ),
        *length_advice(grpo.max_completion_length, arguments.max_turn_length),
    ]


def check_mappings(config: TrainingArguments, *more: str) -> None:
    """Refuse what is no mapping, and settings that checkpointing does not have. Raises ConfigError."""
    for name in (*MAPPINGS, *more):
        value = getattr(config, name)
        if not isinstance(value or {}, dict):
            raise ConfigError(f'--{name} {value} is no mapping; write it in JSON: \'{{"key": "value"}}\'')
    unknown = (config.gradient_checkpointing_kwargs or {}).keys() - CHECKPOINTING
    if unknown:
        raise ConfigError(f"--gradient_checkpointing_kwargs takes {', '.join(CHECKPOINTING)}, not {', '.join(unknown)}")
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ConfigError("--use_liger_kernel: liger-kernel is not installed; pip install liger-kernel")


def check_optimizer(config: TrainingArguments, model: nn.Module) -> None:
    """Let transformers look at the optimizer and the schedule, which it makes only once the run is under way.

    Raises ValueError or ImportError, in its words.
    """
    Trainer.get_optimizer_cls_and_kwargs(config, model)
    some = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    get_scheduler(config.lr_scheduler_type, some, 1, 2, config.lr_scheduler_kwargs)


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are unknown or not installed. Raises ConfigError."""
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(
                f"--report_to {name}: there is no such tracker; known are {', '.join(INTEGRATION_TO_CALLBACK)}"
            )
        if name not in (*get_available_reporting_integrations(), *ALWAYS_UNCHECKED):
            raise ConfigError(f"--report_to {name}: {name} is not installed; pip install {name}")


def check_quantisation(config: TrainingArguments, model: ModelConfig, *, elsewhere: bool = False) -> None:
    """Refuse weights of few bits that would be trained themselves, and what misses bitsandbytes. Raises ConfigError.

    `elsewhere`: what is installed here does not matter.
    """
    flag = "--load_in_4bit" if model.load_in_4bit else "--load_in_8bit" if model.load_in_8bit else ""
    if flag and not model.use_peft:
        raise ConfigError(
            f"{flag}: weights of so few bits cannot be trained, an adapter beside them can; add --use_peft"
        )
    optimizer = OptimizerNames(config.optim).value
    if any(part in optimizer for part in BITSANDBYTES_OPTIMIZERS) and "torch" not in optimizer:
        flag = flag or f"--optim {optimizer}"
    if flag and not elsewhere and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{flag}: bitsandbytes is not installed; in SQLEnv's folder: pip install -e '.[quantization]'"
        )


def _check_adapters_on_servers(arguments: SQLEnvArguments, model: ModelConfig) -> None:
    """vLLM takes plain LoRA, and a push of whole weights needs weights that are whole. Raises ConfigError."""
    transport = arguments.weight_sync
    quantised = model.load_in_4bit or model.load_in_8bit
    if quantised and transport not in ("auto", "lora"):
        raise ConfigError(
            f"--weight_sync {transport} sends whole weights, and quantised ones are not; use --weight_sync lora"
        )
    special = "--use_dora" if model.use_dora else "--lora_modules_to_save" if model.lora_modules_to_save else ""
    if model.use_peft and special and transport in ("auto", "lora"):
        fix = "leave it out" if quantised else "add --weight_sync disk, which sends whole weights, or leave it out"
        raise ConfigError(f"{special}: vLLM serves no such adapter; {fix}")


def length_advice(completion: int, turn: int) -> list[str]:
    """Say when the budgets, in tokens, leave an episode too few turns to explore and answer."""
    advice = []
    if turn > completion:
        advice.append(
            f"--max_turn_length {turn} is more than the whole episode may have (--max_completion_length {completion})"
        )
    elif completion < (wanted := FEWEST_TURNS * (turn + OBSERVATION_TOKENS)):
        advice.append(
            f"--max_completion_length {completion} starves episodes: {FEWEST_TURNS} turns of --max_turn_length {turn} "
            f"with their observations take about {wanted} tokens"
        )
    return advice


def context_advice(context: int, turn: int) -> list[str]:
    """Say when a context has no room for the prompt and one whole turn."""
    if context >= PROMPT_TOKENS + turn:
        return []
    return [
        f"a context of {context} tokens is less than a prompt (about {PROMPT_TOKENS}) and a turn of --max_turn_length "
        f"{turn} together; most episodes will fail or be cut short"
    ]
