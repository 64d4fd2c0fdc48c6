"""What becomes of each flag of TRL's that `sqlenv train` and `sqlenv warmup` accept.

TRL's dataclasses have some two hundred fields, and not all of them mean something here: SQLEnv generates with engines
of its own, plays its evaluations as episodes, and starts vLLM apart from the trainer. The tables say of every field
that it is

- honoured: TRL, or SQLEnv, does what its help says;
- refused, with a sentence that says why and what to do instead: the run would be another one than was asked for;
- without effect by nature: leaving it out changes nothing, and the sentence says so to whoever sets it.

Some honoured fields need another one; `Need` says which. Nothing is ignored in silence. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import ConfigError


@dataclass(frozen=True, slots=True)
class Note:
    """A field that is not simply honoured; `neutral` values ask for nothing, and pass."""

    sentence: str
    refused: bool
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Fields that do something only when `met` holds of the values of all."""

    names: str
    words: str
    met: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class FlagTable:
    """Every field that a command accepts: `honoured`, or in `notes`."""

    honoured: frozenset[str]
    notes: Mapping[str, Note]
    needs: tuple[Need, ...]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Fields that TRL checks only once the run is under way."""

    def check(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
        """Return what to tell a user who gave these values; `defaults` are those of the fields.

        Raises ConfigError for a value that is refused.
        """
        said = []
        for name, value in given.items():
            if name in self.choices and value not in (None, *self.choices[name]):
                raise ConfigError(f"--{name} must be one of {list(self.choices[name])}, not {value!r}")
            note = self.notes.get(name)
            if note is None or value == defaults.get(name) or value in note.neutral:
                continue
            if note.refused:
                raise ConfigError(f"--{name} {_shown(value)}: {note.sentence}")
            said.append(f"--{name} has no effect: {note.sentence}")
        return said

    def check_needs(self, given: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[str]:
        """Return what to tell a user of whose flags some do nothing beside the `resolved` values of the others."""
        return [
            f"--{name} has no effect without {need.words}"
            for need in self.needs
            for name in need.names.split()
            if name in given and not need.met(resolved)
        ]


def _shown(value: Any) -> str:
    return " ".join(str(part) for part in value) if isinstance(value, list) else str(value)


def _refused(names: str, sentence: str, *neutral: Any) -> dict[str, Note]:
    return dict.fromkeys(names.split(), Note(sentence, refused=True, neutral=neutral))


def _ineffective(names: str, sentence: str) -> dict[str, Note]:
    return dict.fromkeys(names.split(), Note(sentence, refused=False))


_HONOURED = """
    output_dir run_name project report_to trackio_space_id trackio_bucket_id trackio_static_space_id
    per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
    learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    optim optim_args optim_target_modules weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    bf16 fp16 tf32 gradient_checkpointing gradient_checkpointing_kwargs torch_empty_cache_steps
    torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config
    logging_strategy logging_steps logging_first_step log_on_each_node log_level log_level_replica
    logging_nan_inf_filter skip_memory_metrics debug
    save_strategy save_steps save_total_limit save_only_model save_on_each_node
    resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    seed full_determinism use_cpu accelerator_config
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout
    fsdp fsdp_config deepspeed
    model_init_kwargs trust_remote_code router_aux_loss_coef pad_to_multiple_of shuffle_dataset loss_type
    model_name_or_path model_revision dtype attn_implementation
    use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save
    use_rslora use_dora
    load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
"""
"""By both commands; those of them that a command's notes name are not honoured by that one."""

_NOTES = {
    **_refused(
        "parallelism_config",
        "it cannot be given by flag; `accelerate launch --config_file` takes it",
    ),
    **_refused("enable_jit_checkpoint", "leave it out; SIGTERM saves a checkpoint anyway, at the end of the step"),
    **_refused("lora_task_type", "the policy is a causal language model; leave it out"),
    **_ineffective("do_train", "the command trains"),
    **_ineffective("do_predict", "there are no predictions; `sqlenv evaluate` plays questions"),
    **_ineffective("local_rank", "a rank's number comes from its launcher"),
    **_ineffective("remove_unused_columns", "the rows have no columns to remove"),
    **_ineffective("label_names", "nothing evaluates on labels"),
    **_ineffective(
        "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "include_for_metrics batch_eval_metrics prediction_loss_only bf16_full_eval fp16_full_eval",
        "an evaluation plays episodes with the policy as it trains, and has no batches",
    ),
}


def _on(other: str) -> tuple[str, Callable[[Mapping[str, Any]], bool]]:
    """The words and the condition of a flag that must be on."""
    return f"--{other}", lambda values: bool(values[other])


def _is(other: str, value: str) -> tuple[str, Callable[[Mapping[str, Any]], bool]]:
    """The words and the condition of a flag that must have a value."""
    return f"--{other} {value}", lambda values: bool(values[other] == value)


_NEEDS = (
    Need("lora_r lora_alpha lora_target_modules lora_target_parameters lora_modules_to_save", *_on("use_peft")),
    Need("use_rslora use_dora", *_on("use_peft")),
    Need("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage", *_on("load_in_4bit")),
    Need("gradient_checkpointing_kwargs", *_on("gradient_checkpointing")),
    Need("liger_kernel_config", *_on("use_liger_kernel")),
    Need("hub_model_id hub_strategy hub_revision", *_on("push_to_hub")),
    Need("save_steps", *_is("save_strategy", "steps")),
    Need("num_train_epochs", "--max_steps -1", lambda values: values["max_steps"] <= 0),
    Need("fsdp_config", *_on("fsdp")),
)

_WHOLE_DISTRIBUTION = (
    "the engines sample from the policy's whole distribution, which is the one that the importance ratio compares "
    "with; whatever cuts or bends it makes that ratio wrong. --temperature is there"
)
_SERVERS_OWN = "the server is started apart from the trainer; give it to {}"

TRAIN_FLAGS = FlagTable(
    honoured=frozenset(
        f"""
        {_HONOURED}
        eval_strategy eval_steps eval_delay eval_on_start
        load_best_model_at_end metric_for_best_model greater_is_better
        disable_dropout cast_lm_head_to_fp32 num_generations max_completion_length generation_batch_size
        steps_per_generation temperature chat_template_kwargs
        use_vllm vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_cap
        beta num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level
        reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions
        sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
        use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        off_policy_mask_threshold use_bias_correction_kl
        log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo
        """.split()
    )
    - {"lora_dropout", "hub_always_push"},
    notes={
        **_NOTES,
        **_refused("hub_always_push", "there is one push, at the end; leave it out"),
        **_refused("top_p", _WHOLE_DISTRIBUTION, 1.0),
        **_refused("top_k", _WHOLE_DISTRIBUTION, 0, -1),
        **_refused("min_p", _WHOLE_DISTRIBUTION, 0.0),
        **_refused("repetition_penalty", _WHOLE_DISTRIBUTION, 1.0),
        **_refused("generation_kwargs", _WHOLE_DISTRIBUTION, {}, "{}"),
        **_refused("vllm_structured_outputs_regex", _WHOLE_DISTRIBUTION),
        **_refused(
            "lora_dropout",
            "the logprobs of a step are computed again in training mode, and with dropout they would not be those "
            "that were sampled under; use --weight_decay against overfitting",
        ),
        **_refused(
            "neftune_noise_alpha",
            "the logprobs of a step are computed again in training mode, and with noise on the embeddings they would "
            "not be those that were sampled under",
            0.0,
        ),
        **_refused(
            "auto_find_batch_size",
            "a smaller batch would tear groups apart; set --per_device_train_batch_size, and the number of episodes "
            "in a step stays what it is",
        ),
        **_refused(
            "vllm_mode",
            "that would run vLLM inside the trainer, which SQLEnv does not do; leave it out, start `sqlenv inference "
            "--model ...` beside the trainer (--share_gpu on the same GPU), and name it with --vllm_server_base_url",
        ),
        **_refused("vllm_gpu_memory_utilization", _SERVERS_OWN.format("`sqlenv inference --gpu_memory_utilization`")),
        **_refused("vllm_max_model_length", _SERVERS_OWN.format("`sqlenv inference --max_model_len`")),
        **_refused(
            "vllm_tensor_parallel_size", _SERVERS_OWN.format("`sqlenv inference ... -- --tensor-parallel-size N`")
        ),
        **_refused("vllm_model_impl", _SERVERS_OWN.format("`sqlenv inference ... -- --model-impl NAME`")),
        **_refused(
            "vllm_enable_sleep_mode",
            "servers do not sleep; `sqlenv inference --share_gpu` leaves most of the GPU's memory to the trainer",
        ),
        **_ineffective("vllm_group_port", "the trainer finds a free port for the weights by itself"),
        **_ineffective("do_eval", "--eval_episodes and --eval_strategy say what is evaluated"),
        **_ineffective("num_generations_eval", "an evaluation plays each question once, greedily"),
        **_ineffective("max_tool_calling_iterations", "--step_budget bounds the steps of an episode"),
        **_ineffective("disable_tqdm", "training prints a line for each step instead of a bar"),
        **_ineffective("log_multimodal", "there are no images"),
        **_ineffective("label_smoothing_factor", "the loss of GRPO has no labels"),
        **_ineffective("average_tokens_across_devices", "the loss of GRPO counts the tokens of all ranks by itself"),
        **_ineffective("include_num_input_tokens_seen", "GRPO logs num_tokens by itself"),
        **_ineffective("data_seed train_sampling_strategy length_column_name", "--seed orders the questions"),
        **_ineffective("dataloader_drop_last", "a step is always whole; questions that do not fill one are left out"),
        **_ineffective(
            "use_cache cache_implementation use_transformers_continuous_batching use_transformers_paged "
            "transformers_continuous_batching_config",
            "SQLEnv's own engine generates, with a cache and batches of its own",
        ),
        **_ineffective(
            "ds3_gather_for_generation", "with DeepSpeed ZeRO-3, vLLM servers generate, and the weights are sent there"
        ),
    },
    needs=(
        *_NEEDS,
        Need("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout", *_on("use_vllm")),
        Need("weight_sync weight_sync_check weight_sync_dir", *_on("use_vllm")),
        Need("ref_model_mixup_alpha ref_model_sync_steps", *_on("sync_ref_model")),
        Need("entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target", *_on("use_adaptive_entropy")),
        Need("num_completions_to_print log_unique_prompts", *_on("log_completions")),
        Need("use_bias_correction_kl", "--beta above 0", lambda values: values["beta"] > 0),
        Need(
            "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
            *_on("vllm_importance_sampling_correction"),
        ),
        Need("sapo_temperature_neg sapo_temperature_pos", *_is("loss_type", "sapo")),
        Need("vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg", *_is("loss_type", "vespo")),
        Need("eval_steps", *_is("eval_strategy", "steps")),
        Need("eval_delay", "--eval_strategy steps", lambda values: values["eval_strategy"] != "no"),
        Need(
            "metric_for_best_model greater_is_better",
            "--load_best_model_at_end or --save_strategy best",
            lambda values: values["load_best_model_at_end"] or values["save_strategy"] == "best",
        ),
        Need("env_token", "--env", lambda values: values["env_server"] != "local"),
    ),
    choices={
        "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
        "importance_sampling_level": ("token", "sequence"),
        "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    },
)

SEVERAL = frozenset(
    {
        *("debug", "include_for_metrics", "label_names", "reward_weights"),
        *("lora_modules_to_save", "lora_target_modules", "lora_target_parameters"),
    }
)
"""Fields that take several values."""

_ENCODED = "episodes come to TRL as token ids with labels on the policy's own tokens, and need no preparation"

WARMUP_FLAGS = FlagTable(
    honoured=frozenset(
        f"""
        {_HONOURED}
        auto_find_batch_size neftune_noise_alpha label_smoothing_factor average_tokens_across_devices
        include_num_input_tokens_seen data_seed train_sampling_strategy length_column_name dataloader_drop_last
        use_cache dataset_num_proc max_length packing packing_strategy padding_free activation_offloading pad_token
        """.split()
    ),
    notes={
        **_NOTES,
        **_refused(
            "eval_strategy eval_on_start load_best_model_at_end",
            "a warm-up evaluates nothing; `sqlenv evaluate` plays questions",
            "no",
        ),
        **_ineffective(
            "do_eval eval_steps eval_delay eval_packing metric_for_best_model greater_is_better",
            "a warm-up evaluates nothing; `sqlenv evaluate` plays questions",
        ),
        **_refused(
            "chat_template_path eos_token",
            "a turn is written and ended as the tokenizer's own files say, in every command; change it there",
        ),
        **_refused("assistant_only_loss dataset_kwargs", _ENCODED, {}, "{}"),
        **_ineffective("completion_only_loss dataset_text_field", _ENCODED),
        **_ineffective("disable_tqdm", "training prints a line for each logging step instead of a bar"),
        **_ineffective("truncation_mode", "an episode longer than --max_length is left out, not cut"),
    },
    needs=(
        *_NEEDS,
        Need("hub_always_push", *_on("push_to_hub")),
        Need("lora_dropout", *_on("use_peft")),
        Need("packing_strategy", *_on("packing")),
        Need("noisy_expert_fraction", "episodes to play (--max_episodes)", lambda values: values["max_episodes"] != 0),
        Need("samples_per_question", *_on("rejection_sampling")),
    ),
    choices={"loss_type": ("nll", "dft", "chunked_nll"), "save_strategy": ("no", "steps", "epoch")},
)
