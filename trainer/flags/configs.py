"""`SQLEnvConfig` and `WarmupConfig`: TRL's dataclasses with SQLEnv's fields and defaults; what becomes of each field.

Of TRL's some three hundred fields, those in `UNSUPPORTED` are refused with the reason; those in `NEEDS` do something
beside another flag alone, and a line says so; `check_together` has what does not go together. All others are honoured.
Nothing is ignored in silence.

Defaults that depend on the machine and on what was given are in `trainer.training.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames
from trl import GRPOConfig, ModelConfig, SFTConfig

from env_server.types import AnswerMode
from inference.launch.plan import PORT
from trainer.config import ActionFormat, ConfigError, SQLEnvArguments, WarmupArguments
from trainer.export.hub import Destination
from trainer.flags.early import Command, flags_of
from trainer.policy import PlaySettings


@dataclass(repr=False)
class SQLEnvConfig(SQLEnvArguments, GRPOConfig):  # type: ignore[misc]  # TRL carries no types
    """The flags of `sqlenv train`: `GRPOConfig` with SQLEnv's fields and defaults."""

    output_dir: str = field(
        default="runs/train", metadata={"help": "Where the run writes (default: runs/NAME, after the model)."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "'true': go on where the run in --output_dir was stopped."}
    )
    # What the field trains small models with; an adapter needs ten times as much.
    learning_rate: float = field(
        default=1e-6,
        metadata={"help": "The highest learning rate (default: 1e-5 for an adapter, 1e-6 for all weights)."},
    )
    # A rate that falls to nothing makes longer runs incomparable.
    lr_scheduler_type: str = "constant_with_warmup"
    # Adam's estimates are poor in its first steps; as a share, so that a run of a few steps gets to its rate.
    warmup_steps: float = 0.05
    # A bare run ends: a few hundred updates are where small models have learned most of what they will.
    max_steps: int = field(default=200, metadata={"help": "Updates of the weights; -1: --num_train_epochs."})
    gradient_accumulation_steps: int = field(
        default=8, metadata={"help": "Micro-batches in a step (default: what makes 64 episodes)."}
    )
    # The whole episode: fifteen turns with their observations, of which 512 tokens hold two or three.
    max_completion_length: int = field(default=4096, metadata={"help": "Tokens of an episode after its prompt."})
    # See `rewards.bound_without_answer` for why not 1 each.
    reward_weights: list[float] | None = field(
        default_factory=lambda: [1.0, 0.2, 0.2, 0.1],
        metadata={"help": "Weights of correctness, progress, operational, format, and what --reward_functions names."},
    )
    # Scaled by its own spread, a group that is all wrong or all right counts as much for its noise in the smaller
    # rewards as a group that correctness divides counts for its answers: 42% of the gradient's weight in the demo's
    # first five steps.
    scale_rewards: str = field(default="batch", metadata={"choices": ["group", "batch", "none"]})
    loss_type: str = field(
        default="dapo",
        metadata={"choices": ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]},
    )
    importance_sampling_level: str = field(default="token", metadata={"choices": ["token", "sequence"]})
    multi_objective_aggregation: str = field(
        default="sum_then_normalize", metadata={"choices": ["sum_then_normalize", "normalize_then_sum"]}
    )
    # TRL's default masks a whole sequence whose ratio is large, and so silently drops the long episodes.
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"choices": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]},
    )
    # The logprobs of a step are computed again in training mode: with dropout, they would not be those that were
    # sampled under.
    disable_dropout: bool = True
    # transformers wants evaluation batches to fill with these; each question is played once (`evaluating`).
    num_generations_eval: int | None = 1
    # One push, of the policy when it is trained; see `trainer.export.hub`.
    hub_strategy: str = "end"
    # Servers are the only way here; TRL's port is that of environment servers.
    vllm_mode: str = "server"
    vllm_server_port: int = PORT
    # A step takes from seconds to minutes; each is worth a line.
    logging_steps: float = 1
    # A wait of the ranks is as long as the slowest one's work, such as curating a large data set; half an hour, the
    # usual bound, would end a run that is well. A rank that is gone is noticed by its broken connection.
    ddp_timeout: int = 21_600
    # Something to go on from when a machine is taken away, without filling the disk.
    save_steps: float = 50
    save_total_limit: int | None = 2
    changed: dict[str, Any] = field(default_factory=dict, init=False)
    """The defaults of the flags that were given another value, as the run would have them without; not a flag."""

    def __post_init__(self) -> None:
        SQLEnvArguments.__post_init__(self)
        if self.max_steps == 0:
            raise ConfigError("--max_steps must be positive, or -1 for as many as --num_train_epochs are")
        if self.num_generations < 2:
            raise ConfigError(
                f"--num_generations must be at least 2, not {self.num_generations}: GRPO compares episodes"
            )
        GRPOConfig.__post_init__(self)
        check_mapping("chat_template_kwargs", self.chat_template_kwargs)
        if self.sync_ref_model and not self.beta:
            raise ConfigError("--sync_ref_model moves the reference of the KL term, and --beta 0 has no such term")
        Destination.of(self)

    def __getstate__(self) -> dict[str, Any]:
        """Checkpoints pickle their arguments: without the token."""
        return {**vars(self), "env_token": None}

    def trl_dict(self) -> dict[str, Any]:
        """TRL's fields alone, for a run's config.json."""
        return {
            name: value for name, value in self.to_dict().items() if name not in SQLEnvArguments.__dataclass_fields__
        }

    def play_settings(self) -> PlaySettings:
        """How a policy that is trained is to be played."""
        return PlaySettings(**_shared(self), **{name: getattr(self, name) for name in TRAIN_ONLY})


@dataclass(repr=False)
class WarmupConfig(WarmupArguments, SFTConfig):  # type: ignore[misc]
    """The flags of `sqlenv warmup`: `SFTConfig` with SQLEnv's fields and defaults."""

    output_dir: str = field(
        default="runs/warmup", metadata={"help": "Where the run writes (default: runs/NAME, after the model)."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "'true': go on where the run in --output_dir was stopped."}
    )
    # A few hundred episodes are a few dozen steps: small models need large ones, and an adapter larger ones still.
    learning_rate: float = field(
        default=1e-4,
        metadata={"help": "The highest learning rate (default: 3e-4 for an adapter, 1e-4 for all weights)."},
    )
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.05
    # One pass: episodes on the same databases resemble each other.
    num_train_epochs: float = 1.0
    # Rows of like length side by side need little padding. More of them share more, and take more memory: the longest
    # episodes of a data set come together.
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = field(
        default=4, metadata={"help": "Micro-batches in a step (default: what makes 16 episodes)."}
    )
    train_sampling_strategy: str = "group_by_length"
    # As many tokens as the model's context has; TRL's own 1,024 are a short episode.
    max_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of an episode; longer ones are left out (default: what the model allows)."},
    )
    loss_type: str = field(default="nll", metadata={"choices": ["nll", "dft", "chunked_nll"]})
    logging_steps: float = 1
    ddp_timeout: int = 21_600  # as above
    save_strategy: str = field(default="no", metadata={"choices": ["no", "steps", "epoch"]})

    def __post_init__(self) -> None:
        WarmupArguments.__post_init__(self)
        SFTConfig.__post_init__(self)

    def play_settings(self) -> PlaySettings:
        """How a policy after its warm-up is to be played."""
        return PlaySettings(**_shared(self))


Config = SQLEnvConfig | WarmupConfig
TRAIN_ONLY = (
    *("few_shot", "max_completion_length", "max_turn_length", "max_thinking_length", "eval_episodes", "seed"),
)
"""Of `PlaySettings`, what a warm-up does not decide: it plays episodes that a script has written, to their end."""


def _shared(config: Config) -> dict[str, Any]:
    """Of `PlaySettings`, what both commands decide."""
    variables = config.chat_template_kwargs
    return {
        "data": config.data.split(",")[0],
        "answer_mode": AnswerMode(config.answer_mode),
        "action_format": ActionFormat(config.action_format),
        "chat_template_kwargs": variables if isinstance(variables, dict) else {},
        "custom_system_prompt": config.custom_system_prompt,
        "step_budget": config.step_budget,
    }


BEST = "eval_success_rate"
"""By what the best checkpoint is chosen."""
EVALUATION_METRICS = (
    BEST,
    *(
        f"eval_{name}"
        for name in ("success_low", "success_high", "reward", "steps", "parse_rate", "episodes", "failed")
    ),
)


def _each(reasons: Mapping[str, str]) -> dict[str, str]:
    """One entry for each of the names, which are separated by spaces."""
    return {name: reason for names, reason in reasons.items() for name in names.split()}


_DISTRIBUTION = (
    "the engines sample from the policy's whole distribution, which the importance ratio compares with; use "
    "--temperature"
)
_RECOMPUTED = "logprobs are computed again in training mode, and with noise they would not be those sampled under"
_OWN_SERVER = "the server is started apart from the trainer; give it to `sqlenv inference"
_NO_EVALUATION = "a warm-up evaluates nothing; `sqlenv evaluate` plays questions"
_ENCODED = "episodes come to TRL as token ids with labels on the policy's own tokens, and need no preparation"
_BOTH = {
    "parallelism_config": "it cannot be given by flag; `accelerate launch --config_file` takes it",
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint anyway, at the end of the step",
    "lora_task_type": "the policy is a causal language model",
    "do_train": "the command trains",
    "do_predict": "there are no predictions; `sqlenv evaluate` plays questions",
    "local_rank": "a rank's number comes from its launcher",
    "remove_unused_columns": "the rows have no columns to remove",
    "label_names": "nothing evaluates on labels",
    "disable_tqdm": "training prints a line for each logging step instead of a bar",
    "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
    "include_for_metrics batch_eval_metrics prediction_loss_only bf16_full_eval fp16_full_eval": "an evaluation plays "
    "episodes with the policy as it trains, and has no batches",
}
UNSUPPORTED: Mapping[type, Mapping[str, str]] = {
    SQLEnvConfig: _each(
        {
            **_BOTH,
            "hub_always_push": "there is one push, at the end",
            "top_p top_k min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex": _DISTRIBUTION,
            "lora_dropout": f"{_RECOMPUTED}; use --weight_decay against overfitting",
            "neftune_noise_alpha": _RECOMPUTED,
            "auto_find_batch_size": "a smaller batch would tear groups apart; set --per_device_train_batch_size, and "
            "the number of episodes in a step stays what it is",
            "vllm_mode": "SQLEnv does not run vLLM inside the trainer; start `sqlenv inference --model ...` beside it "
            "(--share_gpu on the same GPU), and name it with --vllm_server_base_url",
            "vllm_gpu_memory_utilization": f"{_OWN_SERVER} --gpu_memory_utilization`",
            "vllm_max_model_length": f"{_OWN_SERVER} --max_model_len`",
            "vllm_tensor_parallel_size": f"{_OWN_SERVER} ... -- --tensor-parallel-size N`",
            "vllm_model_impl": f"{_OWN_SERVER} ... -- --model-impl NAME`",
            "vllm_enable_sleep_mode": "servers do not sleep; `sqlenv inference --share_gpu` leaves most of the GPU's "
            "memory to the trainer",
            "vllm_group_port": "the trainer finds a free port for the weights by itself",
            "do_eval": "--eval_episodes and --eval_strategy say what is evaluated",
            "num_generations_eval": "an evaluation plays each question once, greedily",
            "max_tool_calling_iterations": "--step_budget bounds the steps of an episode",
            "log_multimodal": "there are no images",
            "label_smoothing_factor": "the loss of GRPO has no labels",
            "average_tokens_across_devices": "the loss of GRPO counts the tokens of all ranks by itself",
            "include_num_input_tokens_seen": "GRPO logs num_tokens by itself",
            "data_seed train_sampling_strategy length_column_name": "--seed orders the questions",
            "dataloader_drop_last": "a step is always whole; questions that do not fill one are left out",
            "use_cache cache_implementation use_transformers_continuous_batching use_transformers_paged "
            "transformers_continuous_batching_config": "SQLEnv's own engine generates, with its own cache and batches",
            "ds3_gather_for_generation": "with DeepSpeed ZeRO-3, vLLM servers generate, and get the weights",
        }
    ),
    WarmupConfig: _each(
        {
            **_BOTH,
            "eval_strategy eval_on_start load_best_model_at_end do_eval eval_steps eval_delay eval_packing "
            "metric_for_best_model greater_is_better": _NO_EVALUATION,
            "chat_template_path eos_token": "a turn is written and ended as the tokenizer's own files say, in every "
            "command; change it there",
            "assistant_only_loss dataset_kwargs completion_only_loss dataset_text_field": _ENCODED,
            "truncation_mode": "an episode longer than --max_length is left out, not cut",
        }
    ),
}
"""What is refused, and why: the run would be another one than was asked for, or the flag would do nothing."""

NEEDS: Mapping[str, str] = _each(
    {
        "lora_r lora_alpha lora_target_modules lora_target_parameters lora_modules_to_save": "--use_peft",
        "use_rslora use_dora": "--use_peft",
        "bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage": "--load_in_4bit",
        "gradient_checkpointing_kwargs": "--gradient_checkpointing",
        "liger_kernel_config": "--use_liger_kernel",
        "hub_model_id hub_strategy hub_revision hub_always_push": "--push_to_hub",
        "save_steps": "--save_strategy steps",
        "num_train_epochs": "--max_steps -1",
        "fsdp_config": "--fsdp",
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout": "--use_vllm",
        "weight_sync weight_sync_check weight_sync_dir": "--use_vllm",
        "ref_model_mixup_alpha ref_model_sync_steps": "--sync_ref_model",
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target": "--use_adaptive_entropy",
        "num_completions_to_print log_unique_prompts": "--log_completions",
        "use_bias_correction_kl": "--beta",
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min": (
            "--vllm_importance_sampling_correction"
        ),
        "sapo_temperature_neg sapo_temperature_pos": "--loss_type sapo",
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg": "--loss_type vespo",
        "eval_steps eval_delay": "--eval_strategy steps",
        "metric_for_best_model greater_is_better": "--load_best_model_at_end or --save_strategy best",
        "packing_strategy": "--packing",
        "noisy_expert_fraction": "--max_episodes",
        "samples_per_question": "--rejection_sampling",
    }
)
"""What does something beside another flag alone: one that is on, or has the value that is named."""


def honours(command: Command, config: type[Config], name: str, value: str) -> bool:
    """Whether a command does something with a flag of this value."""
    flag = flags_of(command).get(name)
    return flag is not None and name not in UNSUPPORTED[config] and value in flag.metadata.get("choices", (value,))


def check_given(config: type[Config], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse flags that are not supported. Raises ConfigError. A default, and what is off, ask for nothing."""
    for name, value in given.items():
        off = value == defaults.get(name) or value in (None, False, 0, {}, "{}", "no")
        if name in UNSUPPORTED[config] and not off:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            raise ConfigError(f"--{name} {shown}: {UNSUPPORTED[config][name]}; leave it out")


def check_needs(given: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return what to tell a user of whose flags some do nothing beside the `values` of all."""
    said = [
        f"--{name} has no effect without {NEEDS[name]}"
        for name in given
        if name in NEEDS and not any(_is_so(need, values) for need in NEEDS[name].split(" or "))
    ]
    if "env_token" in given and values["env_server"] == "local":
        said.append("--env_token has no effect without --env")
    return said


def _is_so(need: str, values: Mapping[str, Any]) -> bool:
    name, _, wanted = need.removeprefix("--").partition(" ")
    value = values[name]
    return str(getattr(value, "value", value)) == wanted if wanted else bool(value)


def check_mapping(name: str, value: Any) -> None:
    """Refuse what is no mapping. Raises ConfigError."""
    if not isinstance(value or {}, dict):
        raise ConfigError(f'--{name} {value} is no mapping; write it in JSON: \'{{"key": "value"}}\'')


def check_packages(config: Config, model: ModelConfig, *, elsewhere: bool = False) -> None:
    """Refuse what needs a package that is not installed, and weights of few bits that would be trained themselves.

    `elsewhere`: the run is planned for another machine. Raises ConfigError.
    """
    for name in ("model_init_kwargs", "lr_scheduler_kwargs", "gradient_checkpointing_kwargs"):
        check_mapping(name, getattr(config, name))
    for name in config.report_to:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(INTEGRATION_TO_CALLBACK)
            raise ConfigError(f"--report_to {name}: there is no such tracker; known are {known}")
        if name not in (*get_available_reporting_integrations(), "azure_ml", "flyte"):
            raise ConfigError(f"--report_to {name}: {name} is not installed; pip install {name}")
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise ConfigError("--use_liger_kernel: liger-kernel is not installed; pip install liger-kernel")
    flag = "--load_in_4bit" if model.load_in_4bit else "--load_in_8bit" if model.load_in_8bit else ""
    if flag and not model.use_peft:
        raise ConfigError(f"{flag}: quantized weights cannot be trained, an adapter beside them can; add --use_peft")
    optimizer = OptimizerNames(config.optim).value
    if any(part in optimizer for part in ("8bit", "bnb", "paged", "lion", "ademamix")) and "torch" not in optimizer:
        flag = flag or f"--optim {optimizer}"
    if flag and not elsewhere and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{flag}: bitsandbytes is not installed; in SQLEnv's folder: pip install -e '.[quantization]'"
        )


def check_optimizer(config: TrainingArguments, model: nn.Module) -> None:
    """Let transformers look at the optimizer and the schedule, which it makes only once the run is under way.

    Raises ValueError or ImportError, in its words.
    """
    Trainer.get_optimizer_cls_and_kwargs(config, model)
    some = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    get_scheduler(config.lr_scheduler_type, some, 1, 2, config.lr_scheduler_kwargs)
