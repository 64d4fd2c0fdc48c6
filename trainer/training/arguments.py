"""What a user's flags and `--config` say, read by `TrlParser` and checked before anything is loaded.

Flags that are refused raise; those that have no effect, and combinations that train badly, are said on stderr, one
line each, by the main rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from trl import GRPOConfig, ModelConfig, SFTConfig

from env_server.dataset import Question
from env_server.types import AnswerMode
from inference.adapters import width_of
from trainer.config import ActionFormat, ConfigError, SQLEnvArguments, WarmupArguments, config_errors, prompt_in
from trainer.engines import check_vllm_flags
from trainer.eval.output_folder import Output, RunKind, find_output
from trainer.flags.combinations import check_combinations, check_mappings, check_quantisation, check_trackers
from trainer.flags.defaults import Machine, train_defaults, warmup_defaults
from trainer.flags.given import FlagParser, read_given
from trainer.flags.ranges import check_ranges
from trainer.flags.table import TRAIN_FLAGS, WARMUP_FLAGS
from trainer.policy import (
    SETTINGS_FILE,
    TRAIN_NAMES,
    WARMUP_NAMES,
    PlaySettings,
    SavedPlay,
    read_play,
    resolve_policy,
    saved_play,
    settle,
)
from trainer.rollout.players import with_sql
from trainer.training.batch_shape import BatchSettings, check_batches
from trainer.training.evaluating import settle_evaluation
from trainer.training.starting_point import implied_flags, starting_line

NamedPlay = tuple[str, SavedPlay]
"""A policy's name, and how it was played."""
LIGHT_BYTES = 100_000_000
"""Of weights; a policy of as many is trained on a CPU in minutes."""
DESCRIPTION = """\
GRPO on SQLEnv, with evaluation before and after, and the report.

Arguments are TRL's (GRPOConfig, ModelConfig) and SQLEnv's own, from flags and --config FILE.yaml. All that a run writes
is in its --output_dir: config.json, metrics.jsonl, episodes.jsonl, evaluations/, checkpoints, model/ and report.html.

A config with `stages:` runs a warm-up and GRPO one after the other: docs/training.md.
"""


def parse_arguments(
    argv: Sequence[str], start_play: NamedPlay | None = None
) -> tuple[SQLEnvArguments, GRPOConfig, ModelConfig]:
    """Read flags and `--config`; `start_play` is how the policy was played where that is not yet saved beside it.

    Raises ConfigError.
    """
    kinds = (SQLEnvArguments, GRPOConfig, ModelConfig)
    given = read_given(kinds, argv, "sqlenv train")
    check_ranges(given)
    output = find_output(RunKind.TRAIN, given)
    start, said = _starting_point(given)
    machine = _machine(given)
    planned = bool(given.get("dry_run")) and machine.cpu and "use_cpu" not in given
    defaults = train_defaults(given | start, Machine(True, False, True, machine.ranks) if planned else machine) | start
    taken_over = _take_over(given, output.checkpoint, start_play, TRAIN_NAMES)
    defaults |= {**taken_over.flags, "output_dir": str(output.folder)}
    said += [*output.lines, *taken_over.lines]
    if planned:
        # transformers refuses bfloat16 where the GPU that is planned for is not.
        defaults["use_cpu"] = True
    advice = said + TRAIN_FLAGS.check(given, _defaults_of(kinds) | defaults)
    if machine.cpu and "use_cpu" not in given and not planned:
        advice += _slow_on_a_cpu(given.get("model_name_or_path"))
    advice += [] if planned else _precision_line(given, machine)
    parser = FlagParser(kinds, "sqlenv train", description=DESCRIPTION)
    parser.set_defaults(**defaults)
    with config_errors():
        arguments, grpo, model_config = parser.parse_args_and_config(list(argv))
    arguments.custom_system_prompt, arguments.plans_gpu = taken_over.system_prompt, planned
    if not model_config.model_name_or_path:
        raise ConfigError("name the policy to train with --model_name_or_path (a folder or a model on the Hub)")
    if grpo.use_vllm:
        check_vllm_flags(arguments, grpo, model_config)
    check_batches(grpo, BatchSettings.of(arguments))
    settle_evaluation(grpo, arguments.eval_episodes)
    advice += TRAIN_FLAGS.check_needs(given, vars(arguments) | vars(grpo) | vars(model_config))
    advise("sqlenv train", [*advice, *check_combinations(arguments, grpo, model_config)])
    _name_checkpoint(grpo, output)
    return arguments, grpo, model_config


def departures(argv: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of the flags that were given another value, as the run would have them without. As above."""
    kinds = (SQLEnvArguments, GRPOConfig, ModelConfig)
    given = read_given(kinds, argv, "sqlenv train")
    start, _ = _starting_point(given)
    machine = _machine(given)
    defaults = train_defaults(given | start, machine) | start
    output = find_output(RunKind.TRAIN, given)
    defaults |= {**_take_over(given, output.checkpoint, None, TRAIN_NAMES).flags, "output_dir": str(output.folder)}
    defaults = _defaults_of(kinds) | defaults
    changed = {name: defaults.get(name) for name, value in given.items() if value != defaults.get(name)}
    plain: dict[str, Any] = json.loads(json.dumps(changed, default=str))
    return plain


def parse_warmup_arguments(
    argv: Sequence[str], description: str, start_play: NamedPlay | None = None
) -> tuple[WarmupArguments, SFTConfig, ModelConfig]:
    """Read the flags and `--config` of `sqlenv warmup`; as `parse_arguments`. Raises ConfigError."""
    kinds = (WarmupArguments, SFTConfig, ModelConfig)
    given = read_given(kinds, argv, "sqlenv warmup")
    check_ranges(given)
    output = find_output(RunKind.WARMUP, given)
    start, said = _starting_point(given)
    machine = _machine(given)
    defaults = warmup_defaults(given | start, machine) | start
    taken_over = _take_over(given, output.checkpoint, start_play, WARMUP_NAMES)
    defaults |= {**taken_over.flags, "output_dir": str(output.folder)}
    advice = [
        *said,
        *output.lines,
        *_precision_line(given, machine),
        *taken_over.lines,
        *WARMUP_FLAGS.check(given, _defaults_of(kinds) | defaults),
    ]
    parser = FlagParser(kinds, "sqlenv warmup", description=description)
    parser.set_defaults(**defaults)
    with config_errors():
        arguments, sft, model_config = parser.parse_args_and_config(list(argv))
    arguments.custom_system_prompt = taken_over.system_prompt
    if not model_config.model_name_or_path:
        raise ConfigError("name the model to warm up with --model_name_or_path (a folder or a model on the Hub)")
    check_mappings(sft)
    check_trackers(sft.report_to)
    check_quantisation(sft, model_config)
    advice += WARMUP_FLAGS.check_needs(given, vars(arguments) | vars(sft) | vars(model_config))
    advise("sqlenv warmup", advice)
    _name_checkpoint(sft, output)
    return arguments, sft, model_config


def _machine(given: Mapping[str, Any]) -> Machine:
    """Return what this rank computes with. Raises SQLEnvError."""
    name = given.get("model_name_or_path")
    width = width_of(resolve_policy(str(name), given.get("model_revision")).base) if name else None
    return Machine.here(use_cpu=bool(given.get("use_cpu")), width=width)


def _precision_line(given: Mapping[str, Any], machine: Machine) -> list[str]:
    """Say which precision a CPU computes in, and why, unless a flag chose it."""
    chosen = machine.measured is None or given.get("fp16") or "bf16" in given
    return [] if chosen else [f"--bf16 {str(machine.bf16).lower()}: {machine.measured}"]


def _slow_on_a_cpu(name: str | None) -> list[str]:
    """Say what a CPU is enough for, unless the policy is on this disk and no larger than that."""
    if name is not None:
        folder = Path(resolve_policy(name).base.location)
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if folder.is_dir() else []
        if weights and sum(file.stat().st_size for file in weights) <= LIGHT_BYTES:
            return []
    return [
        "there is no GPU here, and a step of this takes minutes on a CPU: configs/tiny.yaml is made for one, and so is "
        "configs/smollm2.yaml, with a small language model (--use_cpu true says that you know)"
    ]


def _starting_point(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags that follow from the policy that is named, and what to say of it. Raises SQLEnvError."""
    if not given.get("model_name_or_path"):
        return {}, []
    policy = resolve_policy(str(given["model_name_or_path"]), given.get("model_revision"))
    return implied_flags(policy, given), starting_line(policy)


@dataclass(frozen=True, slots=True)
class _TakenOver:
    """What a run takes over from its policy: defaults of flags, the system prompt, and what to say of it."""

    flags: Mapping[str, Any]
    system_prompt: str | None
    lines: Sequence[str]


def _take_over(
    given: Mapping[str, Any], checkpoint: Path | None, start_play: NamedPlay | None, names: Sequence[str]
) -> _TakenOver:
    """Look at how the policy was played that training starts from, or the run that goes on. Raises SQLEnvError."""
    said = {name: given[flag] for name in names if (flag := _FLAG_OF.get(name, name)) in given}
    if isinstance(prompt := said.get("custom_system_prompt"), str):
        said["custom_system_prompt"] = prompt_in(prompt)
    if isinstance(variables := said.get("chat_template_kwargs"), str):
        with suppress(ValueError):  # the parser says what is wrong with it
            said["chat_template_kwargs"] = json.loads(variables)
    name, saved = start_play or (str(given.get("model_name_or_path") or ""), None)
    if checkpoint is not None and (file := checkpoint / SETTINGS_FILE).is_file():
        name, saved = str(checkpoint), read_play(file)
    elif saved is None and name:
        saved = saved_play(resolve_policy(name, given.get("model_revision")).ref)
    settled = settle(name, saved, said, names)
    flags = {}
    if saved is not None:
        inherited = {name: getattr(saved.settings, name) for name in names if name not in _FLAG_OF}
        # None is no number, but whatever the command does without one.
        flags = {name: str(v) if isinstance(v, Enum) else v for name, v in inherited.items() if v is not None}
    return _TakenOver(flags, settled.settings.custom_system_prompt, settled.lines)


_FLAG_OF = {"custom_system_prompt": "system_prompt"}
"""Whose flag has another name: it is a file, and what was saved is its text."""


def play_settings(arguments: SQLEnvArguments, grpo: GRPOConfig) -> PlaySettings:
    """Return how a policy that is trained is to be played."""
    return PlaySettings(
        data=arguments.data,
        answer_mode=AnswerMode(arguments.answer_mode),
        action_format=ActionFormat(arguments.action_format),
        chat_template_kwargs=grpo.chat_template_kwargs or {},
        custom_system_prompt=arguments.custom_system_prompt,
        few_shot=arguments.few_shot,
        step_budget=arguments.step_budget,
        error_hints=arguments.error_hints,
        max_completion_length=grpo.max_completion_length,
        max_turn_length=arguments.max_turn_length,
        max_thinking_length=arguments.max_thinking_length,
        eval_episodes=arguments.eval_episodes,
        seed=grpo.seed,
    )


def warmup_play_settings(arguments: WarmupArguments) -> PlaySettings:
    """Return how a policy that is warmed up is to be played."""
    return PlaySettings(
        data=arguments.data.split(",")[0],
        answer_mode=AnswerMode(arguments.answer_mode),
        action_format=ActionFormat(arguments.action_format),
        chat_template_kwargs=arguments.template_variables,
        custom_system_prompt=arguments.custom_system_prompt,
        step_budget=arguments.step_budget,
        error_hints=arguments.error_hints,
    )


def _name_checkpoint(config: GRPOConfig | SFTConfig, output: Output) -> None:
    """Name the checkpoint to resume from, which `--resume_from_checkpoint true` leaves open."""
    config.resume_from_checkpoint = None if output.checkpoint is None else str(output.checkpoint)


def advise(command: str, lines: Sequence[str]) -> None:
    """Say the lines on stderr, once for all ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"{command}: {line}\n" for line in lines)


def _defaults_of(kinds: Sequence[type]) -> dict[str, Any]:
    """The dataclasses' own defaults; a factory's is made."""
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for kind in kinds
        for field in fields(kind)
    }


def require_questions(questions: Sequence[Question], grpo: GRPOConfig, reward_functions: Sequence[str] = ()) -> None:
    """Refuse a data set that does not fill one step: TRL would drop the step, and train nothing without a word.

    And one without gold SQL, where `structure` is a reward. Raises SQLEnvError.
    """
    count = len(questions)
    wanted = grpo.generation_batch_size // grpo.num_generations
    if count < wanted:
        fix = "Give more questions, or lower --per_device_train_batch_size or --gradient_accumulation_steps"
        raise ConfigError(f"one step plays {wanted} questions, and the data set has {count} for training. {fix}")
    if "structure" in reward_functions:
        with_sql(questions, "--reward_functions structure")
