"""The help of `sqlenv train` and `sqlenv warmup`: SQLEnv's flags, and of TRL's those that most runs set, in groups.

TRL's parser lists all two hundred and more in the order of its classes; that list is `--help-all`. What is here needs
neither TRL nor torch, which take seconds to import. The texts of SQLEnv's flags are those of its dataclasses. Pure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from sqlenv.parser import Parser
from trainer.config import SQLEnvArguments, WarmupArguments
from trainer.policy import TRAIN_NAMES, WARMUP_NAMES


@dataclass(frozen=True, slots=True)
class TRLFlag:
    """A flag of TRL's, in our words; `default` is None where it follows from others, and `help` says how."""

    metavar: str
    help: str
    default: Any = None


_BOTH: Mapping[str, TRLFlag] = {
    "use_peft": TRLFlag("BOOL", "Train a LoRA adapter, and leave the model as it is (default: on a GPU)."),
    "lora_r": TRLFlag("N", "Rank of the adapter.", 16),
    "output_dir": TRLFlag(
        "FOLDER", "Where the run writes (default: runs/NAME, after the model; another, where that holds a policy)."
    ),
    "resume_from_checkpoint": TRLFlag("true", "Go on where the run in --output_dir was stopped."),
    "learning_rate": TRLFlag("X", "Of an adapter it should be ten times that of all weights."),
    "per_device_train_batch_size": TRLFlag("N", "Episodes that one forward pass takes; the lower, the less memory."),
    "seed": TRLFlag("N", "Of questions, sampling and a new adapter.", 42),
    "use_cpu": TRLFlag("BOOL", "Leave the GPU alone (default: where there is none)."),
    "report_to": TRLFlag("NAME", "A tracker to log to as well: tensorboard, trackio, wandb and others."),
    "push_to_hub": TRLFlag("BOOL", "Push the policy to the Hub when it is trained; --hub_model_id names it."),
}
TRAIN_TRL: Mapping[str, TRLFlag] = {
    **_BOTH,
    "model_name_or_path": TRLFlag(
        "MODEL", "What is trained: a checkpoint, a LoRA adapter or a run, by its folder or by a name on the Hub."
    ),
    "load_in_4bit": TRLFlag("BOOL", "Hold the model in 4 bits beside the adapter (QLoRA)."),
    "max_steps": TRLFlag("N", "Updates of the weights.", 200),
    "learning_rate": TRLFlag("X", "Default: 1e-5 for an adapter, 1e-6 for all weights."),
    "num_generations": TRLFlag("N", "Episodes of each question, which are compared with each other.", 8),
    "per_device_train_batch_size": TRLFlag("N", "Episodes that one forward pass takes; the lower, the less memory.", 8),
    "gradient_accumulation_steps": TRLFlag("N", "Forward passes in a step (default: what makes 64 episodes)."),
    "temperature": TRLFlag("X", "Of the sampling of training episodes.", 1.0),
    "beta": TRLFlag("X", "Weight of the KL term against the model as it was.", 0.0),
    "loss_type": TRLFlag("NAME", "Which form of GRPO.", "dapo"),
    "reward_weights": TRLFlag(
        "X X X X [X ...]",
        "Of correctness, progress, operational, format, and what --reward_functions names.",
        [1.0, 0.2, 0.2, 0.1],
    ),
    "max_completion_length": TRLFlag("N", "Tokens of a whole episode after its prompt.", 4096),
    "eval_strategy": TRLFlag("NAME", "'steps': evaluate during training, too.", "no"),
    "eval_steps": TRLFlag("N", "With --eval_strategy steps, after how many."),
    "use_vllm": TRLFlag("BOOL", "Generate on vLLM servers, which `sqlenv inference` starts.", False),
    "vllm_server_base_url": TRLFlag("URLS", "Where they are (default: http://127.0.0.1:8001)."),
    "save_steps": TRLFlag("N", "Steps between two checkpoints.", 50),
}
WARMUP_TRL: Mapping[str, TRLFlag] = {
    **_BOTH,
    "model_name_or_path": TRLFlag(
        "MODEL", "What learns: a checkpoint, a LoRA adapter or a run, by its folder or by a name on the Hub."
    ),
    "learning_rate": TRLFlag("X", "Default: 3e-4 for an adapter, 1e-4 for all weights."),
    "num_train_epochs": TRLFlag("X", "Passes through the episodes.", 1.0),
    "per_device_train_batch_size": TRLFlag("N", "Episodes that one forward pass takes; the lower, the less memory.", 4),
    "gradient_accumulation_steps": TRLFlag("N", "Forward passes in a step (default: what makes 16 episodes)."),
    "max_length": TRLFlag("N", "Tokens of an episode; longer ones are left out (default: what the model allows)."),
    "save_strategy": TRLFlag("NAME", "'steps' or 'epoch': save checkpoints on the way.", "no"),
}

TRAIN_GROUPS: Mapping[str, str] = {
    "the policy": "model_name_or_path use_peft lora_r load_in_4bit output_dir resume_from_checkpoint",
    "questions and episodes": "data difficulty folds answer_mode action_format step_budget error_hints few_shot "
    "system_prompt",
    "lengths, in tokens": "max_completion_length max_turn_length max_thinking_length",
    "learning": "max_steps learning_rate num_generations per_device_train_batch_size gradient_accumulation_steps "
    "temperature beta loss_type reward_weights reward_functions reward_weighting advantages dynamic_sampling "
    "rollout_downsampling guided_starts seed",
    "evaluation": "eval_episodes eval_strategy eval_steps",
    "environments": "env_server env_token max_concurrency",
    "vLLM servers": "use_vllm vllm_server_base_url staleness weight_sync weight_sync_check weight_sync_dir",
    "the run": "dry_run use_cpu save_steps report_to push_to_hub",
}
WARMUP_GROUPS: Mapping[str, str] = {
    "the policy": "model_name_or_path use_peft lora_r output_dir resume_from_checkpoint",
    "what is learned": "data difficulty folds max_episodes noisy_expert_fraction rejection_sampling correct_mistakes "
    "samples_per_question answer_mode action_format step_budget error_hints system_prompt chat_template_kwargs",
    "learning": "learning_rate num_train_epochs max_minutes per_device_train_batch_size "
    "gradient_accumulation_steps max_length seed",
    "the run": "use_cpu save_strategy report_to push_to_hub",
}

_METAVARS = {"int": "N", "float": "X", "bool": "BOOL", "str": "TEXT"}
_NAMED = {
    "data": "DATA",
    "difficulty": "LEVELS",
    "folds": "FOLDS",
    "env_server": "URLS",
    "system_prompt": "FILE",
    "weight_sync_dir": "FOLDER",
    "rejection_sampling": "FILE",
    "chat_template_kwargs": "JSON",
}
"""What stands for the values of our flags, where that is not their type's."""

_TRAIN = """\
GRPO on SQLEnv, with evaluation before and after, and a report.

These are SQLEnv's flags, and of TRL's (GRPOConfig, ModelConfig) those that most
runs set. --help-all lists all; each works, or says why it does not.
"""
_TRAIN_EXAMPLES = """\
examples:
  sqlenv train --config configs/tiny.yaml           a tiny policy, without a GPU
  sqlenv train --config configs/small-gpu.yaml --dry_run  will it work, and fit?
  sqlenv train --config configs/small-gpu.yaml --data my-shop      your own data
  sqlenv train --config configs/stages.yaml               warm-up and then GRPO
"""
_WARMUP = """\
Supervised warm-up on play that the environment has verified: it teaches a model
the moves, before GRPO teaches it which of them pay.

These are SQLEnv's flags, and of TRL's (SFTConfig, ModelConfig) those that most
runs set. --help-all lists all; each works, or says why it does not.
"""
_WARMUP_EXAMPLES = """\
examples:
  sqlenv warmup --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --use_peft true
  sqlenv warmup --model_name_or_path runs/warm --rejection_sampling own.jsonl
"""


def train_help() -> str:
    """The help of `sqlenv train`."""
    return _help("sqlenv train", _TRAIN, _TRAIN_EXAMPLES, SQLEnvArguments, TRAIN_TRL, TRAIN_GROUPS, TRAIN_NAMES)


def warmup_help() -> str:
    """The help of `sqlenv warmup`."""
    return _help("sqlenv warmup", _WARMUP, _WARMUP_EXAMPLES, WarmupArguments, WARMUP_TRL, WARMUP_GROUPS, WARMUP_NAMES)


def _help(
    prog: str,
    description: str,
    examples: str,
    ours: type,
    trl: Mapping[str, TRLFlag],
    groups: Mapping[str, str],
    inherited: Sequence[str],
) -> str:
    known = {field.name: field for field in fields(ours)}
    parser = Parser(prog=prog, usage=f"{prog} --model_name_or_path MODEL [flags]", add_help=False,
                    description=description, epilog=examples)  # fmt: skip
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names.split():
            if name in known:
                _add_own(group, known[name], name in inherited)
            else:
                flag = trl[name]
                group.add_argument(
                    f"--{name}",
                    metavar=flag.metavar,
                    help=_escaped(_with_default(flag.help, flag.default, name in inherited)),
                )
    group = parser.add_argument_group("help and files")
    group.add_argument("--config", metavar="FILE", help="A YAML file whose keys are flags; a flag wins over it.")
    group.add_argument("--help", action="store_true", help="This.")
    group.add_argument("--help-all", action="store_true", help="Every flag, TRL's own with their own texts.")
    return parser.format_help()


def _add_own(group: argparse._ArgumentGroup, field: Field[Any], inherited: bool) -> None:
    names: Sequence[str] = field.metadata.get("aliases") or [f"--{field.name}"]
    kind = str(field.type).partition(" ")[0]
    default = None if field.default is MISSING else field.default
    group.add_argument(
        *names,
        dest=field.name,
        metavar=_NAMED.get(field.name, _METAVARS.get(kind, "TEXT")),
        help=_escaped(_with_default(field.metadata["help"], default, inherited)),
    )


def _with_default(text: str, default: Any, inherited: bool) -> str:
    """Say the default, unless it is nothing, or the text speaks of it; `inherited`: the policy may bring another."""
    if default is None or default is False or "default" in text:
        return text
    if inherited:
        default = f"the policy's, else {default}"
    shown = " ".join(f"{number:g}" for number in default) if isinstance(default, list) else default
    return f"{text.removesuffix('.')} (default: {shown})."


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
