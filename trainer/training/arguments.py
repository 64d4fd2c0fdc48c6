"""From the words of a command line to the dataclasses of a run, checked before anything is loaded.

`TrlParser` reads flags and `--config`. What is not given follows from the policy (an adapter's shape, how it was
played), from the machine and from other flags; a flag or a key always wins. Flags that are refused raise; those that
have no effect, and combinations that train badly, are lines on stderr, by the main rank.

An adapter goes on being trained, with its own rank, scaling and modules. Its base stays what it was, so that servers
which hold the base take what is pushed, and so does whoever uses the result. A KL term (`--beta`) is measured from the
adapter as it was at the start, also in a run that is resumed. For another shape, or all weights, it is merged first.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from transformers import SchedulerType
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import ModelConfig, TrlParser

from inference.adapters import NamedPolicy, width_of
from inference.precision import Precision, measure_precision
from inference.weights.nccl import has_vllm, why_not_from
from sqlenv.parser import refuse
from trainer.config import ConfigError, advise, check_numbers, config_errors, prompt_in
from trainer.engines import server_urls
from trainer.eval.output_folder import RunKind, find_output
from trainer.flags.config_file import CONFIG, as_defaults, read_config, split_config
from trainer.flags.configs import (
    BEST,
    EVALUATION_METRICS,
    Config,
    SQLEnvConfig,
    WarmupConfig,
    check_given,
    check_needs,
    check_packages,
)
from trainer.flags.early import Command
from trainer.policy import (
    SETTINGS_FILE,
    TRAIN_NAMES,
    WARMUP_NAMES,
    SavedPlay,
    Settled,
    read_play,
    resolve_policy,
    saved_play,
    settle,
)
from trainer.rollout.rewards import reward_hacking_advice, rewards_of
from trainer.training.questions import BatchShape

AnyConfig = TypeVar("AnyConfig", bound=Config)
NamedPlay = tuple[str, SavedPlay]
"""A policy's name, and how it was played."""
EPISODES_PER_STEP = {Command.TRAIN: 64, Command.WARMUP: 16}
"""Eight groups of eight: enough with both rights and wrongs in them, on any machine. 16 demonstrations were measured to
teach a model of 135 million parameters the actions in 29 steps."""
LIGHT_BYTES = 100_000_000
"""Of weights; a policy of as many is trained on a CPU in minutes."""


def parse_train(argv: Sequence[str], start_play: NamedPlay | None = None) -> tuple[SQLEnvConfig, ModelConfig]:
    """Read the flags and `--config` of `sqlenv train`. Raises ConfigError.

    `start_play` is how the policy was played where that is not yet saved beside it.
    """
    return _parse(Command.TRAIN, SQLEnvConfig, argv, start_play)


def parse_warmup(argv: Sequence[str], start_play: NamedPlay | None = None) -> tuple[WarmupConfig, ModelConfig]:
    """Read the flags and `--config` of `sqlenv warmup`; as `parse_train`. Raises ConfigError."""
    return _parse(Command.WARMUP, WarmupConfig, argv, start_play)


def _parse(
    command: Command, kind: type[AnyConfig], argv: Sequence[str], start_play: NamedPlay | None
) -> tuple[AnyConfig, ModelConfig]:
    parser = FlagParser((kind, ModelConfig), command.prog)
    given = parser.given(argv)
    check_numbers(given)
    name = given.get("model_name_or_path")
    if not name:
        raise ConfigError("name the policy to train with --model_name_or_path (a folder or a model on the Hub)")
    output = find_output(RunKind[command.name], given)
    policy = resolve_policy(str(name), given.get("model_revision"))
    machine = Machine.here(bool(given.get("use_cpu")), width_of(policy.base))
    planned = bool(given.get("dry_run")) and machine.cpu and "use_cpu" not in given
    shape = implied_flags(policy, given)
    names = TRAIN_NAMES if command is Command.TRAIN else WARMUP_NAMES
    inherited, settled = _taken_over(given, policy, output.checkpoint, start_play, names)
    device = Machine(gpu=True, bf16=True, ranks=machine.ranks) if planned else machine
    chosen = machine_defaults(command, given | shape, device) | shape | inherited | {"output_dir": str(output.folder)}
    if planned:  # transformers refuses bfloat16 where the GPU that is planned for is not
        chosen["use_cpu"] = True
    defaults = parser.defaults() | chosen
    check_given(kind, given, defaults)
    with config_errors():
        config, model = parser.parse_dict(chosen | given)
    config.custom_system_prompt = settled.settings.custom_system_prompt
    config.resume_from_checkpoint = None if output.checkpoint is None else str(output.checkpoint)
    check_packages(config, model, elsewhere=planned)
    lines = [*starting_line(policy), *output.lines, *settled.lines]
    if not planned:
        lines += _machine_lines(given, machine, policy if command is Command.TRAIN else None)
    lines += check_needs(given, vars(config) | vars(model))
    if isinstance(config, SQLEnvConfig):
        config.plans_gpu = planned
        changed = {name: defaults.get(name) for name, value in given.items() if value != defaults.get(name)}
        config.changed = json.loads(json.dumps(changed, default=str))
        check_together(config, model)
        lines += reward_hacking_advice(
            rewards_of(config.reward_functions),
            config.reward_weights,
            config.multi_objective_aggregation,
            config.step_budget,
        )
    advise(command.prog, lines)
    return config, model


def check_together(config: SQLEnvConfig, model: ModelConfig) -> None:
    """Refuse flags of `sqlenv train` that do not go together, each with what to change. Raises ConfigError."""
    if _keeps_best(config) and config.metric_for_best_model in (None, "loss"):
        # transformers puts "loss" where nothing was given, and there is no loss in an evaluation.
        config.metric_for_best_model, config.greater_is_better = BEST, True
    for wrong, text in _conflicts(config, model):
        if wrong:
            raise ConfigError(text)


def _keeps_best(config: SQLEnvConfig) -> bool:
    return bool(config.load_best_model_at_end or config.save_strategy == SaveStrategy.BEST)


def _conflicts(config: SQLEnvConfig, model: ModelConfig) -> Iterator[tuple[object, str]]:
    shape, stale, turns = BatchShape.of(config), f"--staleness {config.staleness}", config.advantages == "turn"
    yield (
        config.staleness and shape.steps_per_batch > 1,
        f"{stale} needs batches that are trained on in one update, and here it is {shape.steps_per_batch}; leave out "
        "--steps_per_generation and --num_iterations, or --staleness",
    )
    yield (
        config.staleness and not config.use_vllm,
        f"{stale} has rollouts and training at the same time, and Hugging Face generate uses the very model that is "
        "trained; add --use_vllm true, or leave --staleness out",
    )
    yield (
        config.staleness and not config.vllm_importance_sampling_correction,
        f"{stale} trains on samples of earlier weights, which --vllm_importance_sampling_correction false leaves "
        "uncorrected; leave one of them out",
    )
    yield (
        turns and config.use_liger_kernel,
        "--advantages turn gives each token its own, which Liger's loss does not take; leave out one",
    )
    yield (
        turns and config.multi_objective_aggregation != "sum_then_normalize",
        "--advantages turn compares sums of rewards, and --multi_objective_aggregation "
        f"{config.multi_objective_aggregation} scales each one for itself; leave one of them out",
    )
    for flag, given in (
        ("--dynamic_sampling", config.dynamic_sampling > 0),
        ("--rollout_downsampling", config.rollout_downsampling > 1),
        ("--guided_starts", config.guided_starts),
        ("--advantages turn", turns),
    ):
        yield (
            given and shape.rows % shape.generations,
            f"{flag} judges whole groups, and each rank has {shape.rows} rows, no multiple of --num_generations "
            f"{shape.generations}; change --per_device_train_batch_size or --gradient_accumulation_steps",
        )
    evaluates = config.eval_strategy != IntervalStrategy.NO
    yield (
        evaluates and config.eval_episodes == 0,
        f"--eval_strategy {config.eval_strategy.value} evaluates as training goes on, and --eval_episodes 0 leaves no "
        "questions to evaluate on; change one of the two",
    )
    schedule = SchedulerType(config.lr_scheduler_type)
    yield (
        schedule in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY),
        f"--lr_scheduler_type {schedule.value} follows the loss of evaluations, and they have none; use "
        "constant_with_warmup, linear or cosine",
    )
    best = config.metric_for_best_model if _keeps_best(config) else None
    yield (
        best and not evaluates,
        "the best checkpoint is known by evaluations; add --eval_strategy steps --eval_steps N",
    )
    yield (
        best and f"eval_{best.removeprefix('eval_')}" not in EVALUATION_METRICS,
        f"--metric_for_best_model must be one of {', '.join(EVALUATION_METRICS)}, not {best}",
    )
    yield (
        config.sync_ref_model and model.use_peft,
        "--sync_ref_model moves a whole reference model; an adapter's is its base. Leave one of them out",
    )
    if not config.use_vllm:
        return
    quantized = model.load_in_4bit or model.load_in_8bit
    yield (
        quantized and config.weight_sync not in ("auto", "lora"),
        f"--weight_sync {config.weight_sync} sends whole weights, and quantized ones are not: use lora",
    )
    special = "--use_dora" if model.use_dora else "--lora_modules_to_save" if model.lora_modules_to_save else ""
    fix = "leave it out" if quantized else "add --weight_sync disk, which sends whole weights, or leave it out"
    yield (
        model.use_peft and special and config.weight_sync in ("auto", "lora"),
        f"{special}: vLLM serves no such adapter; {fix}",
    )
    yield (
        config.weight_sync == "lora" and not model.use_peft,
        "--weight_sync lora pushes adapters, and this run trains none; add --use_peft",
    )
    server_urls(config)
    if config.weight_sync == "nccl" and not config.plans_gpu:  # else it is not this machine that will train
        reason = why_not_from(torch.cuda.is_available() and not config.use_cpu, has_vllm())
        yield reason, reason


class FlagParser(TrlParser):  # type: ignore[misc]  # TRL carries no types
    """TRL's parser, which tells what a user has given from what is a default, and refuses in one line."""

    def __init__(self, kinds: Sequence[type], prog: str) -> None:
        super().__init__(kinds, prog=prog, usage=f"{prog} [flags]", allow_abbrev=False, add_help=False)
        self._kinds = kinds

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        refuse(self, message)

    def defaults(self) -> dict[str, Any]:
        """The dataclasses' own defaults."""
        return {
            each.name: each.default if each.default_factory is MISSING else each.default_factory()
            for kind in self._kinds
            for each in fields(kind)
        }

    def given(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the values that flags or the config file give; a flag wins. Raises ConfigError.

        A value that does not fit its flag ends the process, with status 2 and one line.
        """
        path, flags = split_config(argv)
        written = {} if path is None else read_config(path)
        variables = written.pop("env", None) or {}
        if not isinstance(variables, dict):
            raise ConfigError(f"--{CONFIG} {path}: env must hold a value for each environment variable")
        os.environ.update({name: str(value) for name, value in variables.items()})
        # Not `set_defaults`, which would put the mark itself where nothing was given.
        self.set_defaults_with_config(**dict.fromkeys(self.defaults(), argparse.SUPPRESS))
        if unknown := self.set_defaults_with_config(**as_defaults(written)):
            raise ConfigError(f"--{CONFIG} {path}: there is no flag {unknown[0]}")
        for action in self._actions:  # argparse looks at the choices of flags alone
            value = written.get(action.dest)
            if action.choices and value is not None and value not in action.choices:
                known = ", ".join(map(str, action.choices))
                raise ConfigError(f"--{action.dest} must be one of {known}, not {value!r}")
        return dict(vars(self.parse_args(flags)))


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank of this run computes with."""

    gpu: bool = False
    """True for CUDA."""
    cpu: bool = False
    """True when there is no accelerator of any kind."""
    bf16: bool = False
    """True when the hardware computes matrix products in bfloat16, on a CPU: clearly faster than in float32."""
    ranks: int = 1
    measured: Precision | None = None
    """What that was told from, on a CPU."""

    @classmethod
    def here(cls, use_cpu: bool = False, width: int | None = None) -> Machine:
        """This process's; `use_cpu` leaves its accelerators alone. `width`: of the policy's hidden states."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if use_cpu or not torch.accelerator.is_available():
            measured = measure_precision(width)
            return cls(cpu=True, bf16=measured.dtype == "bfloat16", ranks=ranks, measured=measured)
        gpu = torch.cuda.is_available()
        return cls(gpu, False, not gpu or torch.cuda.is_bf16_supported(including_emulation=False), ranks)


def machine_defaults(command: Command, given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """The defaults that depend on the machine and on what was given."""
    trains = command is Command.TRAIN
    # On a GPU, an adapter trains about as well as all weights, in a quarter of the memory.
    lora = machine.gpu if given.get("use_peft") is None else bool(given["use_peft"])
    chosen: dict[str, Any] = {
        "use_peft": lora,
        # On every linear layer: attention alone learns less at any rank ("LoRA Without Regret", 2025).
        "lora_target_modules": "all-linear",
        # The logprobs of a step are computed again in training mode: with dropout, they would be others.
        "lora_dropout": 0.0,
    }
    if lora:
        chosen["learning_rate"] = 1e-5 if trains else 3e-4
    if machine.cpu:
        # TRL refuses to start without a GPU unless it is told that none is wanted.
        chosen["use_cpu"] = True
    if not given.get("fp16") and "bf16" not in given:
        # Autocast halves the memory of activations and is several times faster where the hardware is made for
        # bfloat16; elsewhere it is slower than float32. A T4 has float16 alone.
        chosen["bf16"] = machine.bf16
        if machine.gpu and not machine.bf16 and "fp16" not in given:
            chosen["fp16"] = True
    if machine.gpu and (lora or given.get("load_in_4bit") or given.get("load_in_8bit")):
        # The frozen base needs no more digits than autocast computes with. Weights that are trained stay in float32:
        # bfloat16 has eight bits, and rounds an update by a millionth away.
        chosen["dtype"] = "bfloat16" if machine.bf16 else "float16"
    if trains and "num_train_epochs" in given:
        chosen["max_steps"] = -1
    if not trains:
        # It saves a GPU's memory at the price of a third more work, which a CPU feels more than the memory.
        chosen["gradient_checkpointing"] = not machine.cpu
    sets_step = {"gradient_accumulation_steps", "generation_batch_size", "steps_per_generation", "auto_find_batch_size"}
    if not given.keys() & sets_step:
        # Whoever lowers the micro-batch, to save memory, still gets the same step.
        rows = int(given.get("per_device_train_batch_size", 8 if trains else 4)) * machine.ranks
        chosen["gradient_accumulation_steps"] = max(1, EPISODES_PER_STEP[command] // rows)
    elif "gradient_accumulation_steps" not in given:
        chosen["gradient_accumulation_steps"] = 1
    return chosen


def _machine_lines(given: Mapping[str, Any], machine: Machine, policy: NamedPolicy | None) -> list[str]:
    """Say which precision a CPU computes in, and why; and what it is enough for, unless the `policy` is small."""
    lines = []
    if policy is not None and machine.cpu and "use_cpu" not in given:
        folder = Path(policy.base.location)
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")] if folder.is_dir() else []
        if not weights or sum(file.stat().st_size for file in weights) > LIGHT_BYTES:
            lines.append(
                "there is no GPU here, and a step of this takes minutes on a CPU: configs/tiny.yaml is made for one, "
                "and so is configs/smollm2.yaml, with a small language model (--use_cpu true says that you know)"
            )
    if machine.measured is not None and not given.get("fp16") and "bf16" not in given:
        lines.append(f"--bf16 {str(machine.bf16).lower()}: {machine.measured}")
    return lines


_LORA = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""ModelConfig's flags that shape an adapter, and what PEFT calls them."""


def implied_flags(policy: NamedPolicy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the flags that were not given, as an adapter has them; nothing for a full checkpoint.

    Raises ConfigError for flags that it contradicts.
    """
    adapter = policy.adapter
    if adapter is None:
        return {}
    merge = f"merge it first (sqlenv export {policy.name} --out FOLDER), and name FOLDER"
    if given.get("use_peft") is False:
        raise ConfigError(f"--use_peft false trains all weights, and {policy.name} is an adapter; {merge}")
    shape = {flag: adapter.config.get(key) for flag, key in _LORA.items()}
    for flag in shape.keys() & given.keys():
        asked, own = (
            sorted(map(str, v)) if isinstance(v, list) else [str(v or "none")] for v in (given[flag], shape[flag])
        )
        # PEFT writes down which layers all-linear was.
        if asked not in (own, ["all-linear"]):
            raise ConfigError(
                f"--{flag} {' '.join(asked)}: the adapter {policy.name} was made with {' '.join(own)}, and its "
                f"training continues with that; leave the flag out, or {merge}"
            )
    return {"use_peft": True, **{flag: value for flag, value in shape.items() if value is not None}}


def starting_line(policy: NamedPolicy) -> list[str]:
    """Say where training starts, in one line, when that is an adapter."""
    if policy.adapter is None:
        return []
    modules = policy.adapter.config.get("target_modules")
    where = modules if isinstance(modules, str) else ", ".join(sorted(modules or []))
    rank = policy.adapter.rank
    return [f"continuing with the adapter {policy.name} (rank {rank}, {where}) on {policy.base.location}"]


def _taken_over(
    given: Mapping[str, Any],
    policy: NamedPolicy,
    checkpoint: Path | None,
    start_play: NamedPlay | None,
    names: Sequence[str],
) -> tuple[dict[str, Any], Settled]:
    """Return the defaults of flags that follow from how the policy was played that training starts from, or the run
    that it resumes, and how it is played now. Raises SQLEnvError.
    """
    said = {name: given[name] for name in names if name in given}
    if (file := given.get("system_prompt")) is not None:
        said["custom_system_prompt"] = prompt_in(file)
    if isinstance(variables := said.get("chat_template_kwargs"), str):
        with suppress(ValueError):  # the dataclass says what is wrong with it
            said["chat_template_kwargs"] = json.loads(variables)
    saved: SavedPlay | None
    if checkpoint is not None and (settings := checkpoint / SETTINGS_FILE).is_file():
        name, saved = str(checkpoint), read_play(settings)
    else:
        name, saved = start_play or (policy.name, saved_play(policy.ref))
    inherited = {} if saved is None else {n: getattr(saved.settings, n) for n in names if n != "custom_system_prompt"}
    # None is no number, but whatever the command does without one.
    flags = {name: str(v) if isinstance(v, Enum) else v for name, v in inherited.items() if v is not None}
    return flags, settle(name, saved, said, names)
