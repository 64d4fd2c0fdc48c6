"""What `sqlenv train` and `sqlenv warmup` answer before torch is imported, which takes seconds: help and refusals.

Guarantees:

1. `--help` shows SQLEnv's flags, and of TRL's those that most runs set, in groups; `--help_all` shows all.
2. A flag, or a key of `--config`, that nothing knows is refused with the one that it is most like. So are a word that
   belongs to no flag, a number that is none, a config file or data that cannot be read, a policy that is not there, and
   an output folder that the run must not write into.
3. What is refused here would be refused later: `trainer.training.arguments` parses the flags. Several ranks are refused
   there alone, so that one of them speaks for all.

The names, types, defaults and help texts of TRL's fields are literals, read from its source; a test compares them with
the dataclasses themselves.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sqlenv.parser import Parser, did_you_mean
from trainer.config import ConfigError, SQLEnvArguments, WarmupArguments, check_numbers
from trainer.flags.config_file import CONFIG, STAGES, as_defaults, read_config, split_config
from trainer.policy import resolve_policy

_HERE = Path(__file__).with_name("configs.py")
_BASE = (
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A field as a flag: its annotation, default and metadata; `own`: SQLEnv's, and none of TRL's."""

    name: str
    annotation: str
    default: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    own: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Its type as argparse takes it. What is no number is left to the parser that makes the dataclasses."""
        parts = {part.strip() for part in self.annotation.split("|")}
        if len(parts) > 1:  # as TRL's parser reads unions
            parts -= {"None"} if "None" in parts else {"str"}
        if len(parts) == 1 and (item := next(iter(parts))).startswith("list["):
            return {"nargs": "+", "type": {"list[float]": float}.get(item, str)}
        if "bool" in parts:
            return {"nargs": "?", "const": True}
        kind = {"int": int, "float": float}.get(parts.pop()) if len(parts) == 1 else None
        return {} if kind is None else {"type": _or_none(kind) if "None" in self.annotation else kind}


def _or_none(kind: type[int] | type[float]) -> Callable[[str], float | None]:
    def parse(text: str) -> float | None:
        return None if text.lower() in ("none", "null") else kind(text)

    parse.__name__ = kind.__name__  # argparse says what a value is not
    return parse


class Command(Enum):
    """The commands whose flags are TRL's: SQLEnv's dataclass, TRL's, and the class that unites them."""

    TRAIN = (SQLEnvArguments, "trainer/grpo_config.py", "GRPOConfig", "SQLEnvConfig")
    WARMUP = (WarmupArguments, "trainer/sft_config.py", "SFTConfig", "WarmupConfig")

    @property
    def prog(self) -> str:
        """The words that start it."""
        return f"sqlenv {self.name.lower()}"


@cache
def flags_of(command: Command) -> Mapping[str, Flag]:
    """All flags of a command, SQLEnv's first. Raises ModuleNotFoundError where TRL is not installed."""
    ours, *theirs, united = command.value
    found = {
        each.name: Flag(each.name, _annotation(each.type), _default(each), each.metadata, own=True)
        for each in fields(ours)
        if each.init
    }
    for package, *source in (*_BASE, ("trl", *theirs)):
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        for flag in _read(Path(spec.submodule_search_locations[0], source[0]), source[1]):
            found[flag.name] = flag
    for flag in _read(_HERE, united):  # which says no help text again
        metadata = {**found[flag.name].metadata, **flag.metadata}
        found[flag.name] = replace(flag, metadata=metadata)
    return found


def _annotation(kind: Any) -> str:
    """As written; TRL's parser puts the type itself in the place of its name."""
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _default(each: Any) -> Any:
    return each.default if each.default is not MISSING else each.default_factory()


def _read(path: Path, name: str) -> Iterator[Flag]:
    """The fields that a class's own body declares."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    for node in body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            continue
        said: dict[str | None, ast.expr] = {"default": node.value}
        if isinstance(node.value, ast.Call):
            said = {word.arg: word.value for word in node.value.keywords}
        if _literal(said.get("init")) is not False:
            default = said.get("default", said.get("default_factory"))
            metadata = _literal(said.get("metadata")) or {}
            yield Flag(node.target.id, ast.unparse(node.annotation), _literal(default), metadata)


def _literal(node: ast.expr | None) -> Any:
    """The value of an expression, a factory's too; None where it is computed."""
    try:
        return None if node is None else ast.literal_eval(node.body if isinstance(node, ast.Lambda) else node)
    except ValueError:
        return None


HELP, HELP_ALL = ("-h", "--help"), ("--help_all", "--help-all")
MODEL, VARIABLES = "model_name_or_path", "env"

_GROUPS: Mapping[str, str] = {
    "where to begin": "model_name_or_path data output_dir resume_from_checkpoint dry_run",
    "questions and episodes": "difficulty folds answer_mode action_format step_budget few_shot "
    "system_prompt chat_template_kwargs max_turn_length max_thinking_length max_completion_length",
    "demonstrations": "max_episodes noisy_expert_fraction rejection_sampling samples_per_question",
    "rewards and groups": "reward_functions reward_weights reward_weighting advantages num_generations "
    "dynamic_sampling rollout_downsampling guided_starts",
    "environments": "env_server env_token max_concurrency",
    "evaluation": "eval_episodes eval_strategy eval_steps",
    "learning (TRL)": "max_steps num_train_epochs max_minutes learning_rate per_device_train_batch_size "
    "gradient_accumulation_steps max_length temperature beta loss_type seed",
    "adapters (TRL)": "use_peft lora_r load_in_4bit",
    "vLLM servers": "use_vllm vllm_server_base_url staleness weight_sync weight_sync_check weight_sync_dir",
    "the run": "use_cpu save_strategy save_steps report_to push_to_hub",
}
_LEFT_OUT = {Command.TRAIN: "chat_template_kwargs num_train_epochs", Command.WARMUP: "eval_strategy eval_steps"}
"""Flags of a group that most runs of a command do not set."""
_METAVARS = {"int": "N", "float": "X", "bool": "BOOL", "list[float]": "X"}
_HELP: Mapping[str, str] = {
    "model_name_or_path": "A checkpoint, a LoRA adapter or a run to train, by its folder or its name on the Hub.",
    "use_peft": "Train a LoRA adapter, and leave the model as it is (default: on a GPU).",
    "lora_r": "Rank of the adapter.",
    "use_cpu": "Leave the GPU alone (default: where there is none).",
    "num_generations": "Episodes of each question, compared with each other.",
    "vllm_server_base_url": "Where the servers are, which `sqlenv inference` starts (default: http://127.0.0.1:8001).",
    "report_to": "Trackers to log to as well: tensorboard, trackio, wandb and others.",
    "push_to_hub": "Push the policy to the Hub when it is trained; --hub_model_id names it.",
}
"""Of TRL's flags, where its text says too little, or something else."""
_DESCRIPTIONS = {
    Command.TRAIN: """\
GRPO on SQLEnv, with evaluation before and after, and a report.

These are SQLEnv's flags, and of TRL's (GRPOConfig, ModelConfig) those that most
runs set. --help_all lists all; each works, or says why it does not.
""",
    Command.WARMUP: """\
SFT on demonstrations that the environment has verified: it teaches a model the
actions, before GRPO teaches it which of them pay.

These are SQLEnv's flags, and of TRL's (SFTConfig, ModelConfig) those that most
runs set. --help_all lists all; each works, or says why it does not.
""",
}
_EXAMPLES = {
    Command.TRAIN: """\
examples:
  sqlenv train --config configs/tiny.yaml           a tiny policy, without a GPU
  sqlenv train --config configs/small-gpu.yaml --dry_run  will it work, and fit?
  sqlenv train --config configs/small-gpu.yaml --data my-shop      your own data
  sqlenv train --config configs/stages.yaml               warm-up and then GRPO
""",
    Command.WARMUP: """\
examples:
  sqlenv warmup --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --use_peft true
  sqlenv warmup --model_name_or_path runs/warm --rejection_sampling own.jsonl
""",
}


def look(command: Command, argv: Sequence[str]) -> None:
    """Raise ConfigError, or end the process, where the command need not go on: with status 0 after help, else 2."""
    if {*HELP, *HELP_ALL} & set(argv):
        sys.stdout.write(_parser(command, flags_of(command), in_full=bool({*HELP_ALL} & set(argv))).format_help())
        sys.exit(0)
    config, _ = split_config(argv)
    written = {} if config is None else read_config(config)
    variables = written.pop(VARIABLES, None)
    if isinstance(variables, dict):  # set here, since torch reads OMP_NUM_THREADS when it is imported
        os.environ.update({name: str(value) for name, value in variables.items()})
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        _refuse(command, argv, written)


def _refuse(command: Command, argv: Sequence[str], written: Mapping[str, Any]) -> None:
    stages = STAGES in written
    known = dict(flags_of(command))
    if stages:
        known = {**flags_of(Command.WARMUP), **known}
    parser = _parser(command, known)
    if not stages:  # each stage has keys of its own; see `trainer.stages`
        for key in written:
            if key not in known:
                raise ConfigError(f"--{CONFIG}: there is no key {key}{did_you_mean(key, known)}")
        parser.set_defaults(**as_defaults(written))
    namespace, strays = parser.parse_known_args(list(argv))
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    for word in strays:
        if word.endswith((".yaml", ".yml")):
            raise ConfigError(f"name the config file by its flag: --{CONFIG} {word}")
        meant = did_you_mean(word, (f"--{name}" for name in known))
        raise ConfigError(
            f"{word!r} belongs to no flag{meant or ': flags begin with --, and a value with spaces is put in quotes'}"
        )
    check_numbers(given)
    _check_policy(command, given, stages)
    # Help does not wait for these.
    from env_server.data.loading import check_readable
    from trainer.eval.output_folder import RunKind, find_output

    find_output(RunKind.STAGES if stages else RunKind[command.name], {**written, **given})
    if not stages and (data := given.get("data")):
        for source in str(data).split(",") if command is Command.WARMUP else [str(data)]:
            check_readable(source)


def _check_policy(command: Command, given: Mapping[str, Any], stages: bool) -> None:
    if policy := given.get(MODEL):
        resolve_policy(str(policy), given.get("model_revision"))
    elif command is Command.TRAIN and not stages:
        raise ConfigError(
            "name the policy to train with --model_name_or_path (a folder or a model on the Hub), or begin with "
            "--config configs/tiny.yaml, which takes two CPU cores and no GPU"
        )


def _parser(command: Command, flags: Mapping[str, Flag], *, in_full: bool = False) -> Parser:
    """A parser of the flags that leaves out of its result those that are not given."""
    prog = command.prog
    parser = Parser(
        prog=prog,
        usage=f"{prog} --model_name_or_path MODEL [flags]",
        add_help=False,
        argument_default=SUPPRESS,
        description=_DESCRIPTIONS[command],
        epilog=_EXAMPLES[command],
    )
    left_out = _LEFT_OUT[command].split()
    shown = {name: title for title, names in _GROUPS.items() for name in names.split() if name not in left_out}
    shown |= {flag.name: "more" for flag in flags.values() if flag.own and flag.name not in shown}
    titles = [*_GROUPS, "more", *(["all the others of TRL's"] if in_full else [])]
    for title in titles:
        names = [name for name, its_title in shown.items() if its_title == title and name in flags]
        if title == titles[-1] and in_full:
            names = [name for name in flags if name not in shown]
        if names:
            group = parser.add_argument_group(title)
            for name in names:
                _add(group, flags[name], in_full)
    if not in_full:
        for name, flag in flags.items():
            if name not in shown:
                _add(parser, flag, hidden=True)
    group = parser.add_argument_group("help and files")
    group.add_argument(f"--{CONFIG}", metavar="FILE", help="A YAML file whose keys are flags; a flag wins over it.")
    group.add_argument(*HELP[1:], action="store_true", help="This.")
    group.add_argument(*HELP_ALL, action="store_true", help="Every flag.")
    return parser


def _add(group: Any, flag: Flag, in_full: bool = False, *, hidden: bool = False) -> None:
    text = str(flag.metadata.get("help", ""))
    if not flag.own and not in_full:
        text = _HELP.get(flag.name) or re.split(r"(?<=\.)\s", text)[0]
    text = SUPPRESS if hidden else _with_default(text, flag.default).replace("%%", "%").replace("%", "%%")
    metavar = _METAVARS.get(flag.annotation.partition(" ")[0], "TEXT")
    names = (f"--{flag.name}", *flag.metadata.get("aliases", ()))
    group.add_argument(*names, dest=flag.name, metavar=metavar, help=text, **flag.options)
    if (dashed := f"--{flag.name.replace('_', '-')}") not in names:
        group.add_argument(dashed, dest=flag.name, help=SUPPRESS, **flag.options)
    if flag.default is True:
        group.add_argument(f"--no_{flag.name}", dest=flag.name, action="store_false", help=SUPPRESS)


def _with_default(text: str, default: Any) -> str:
    """Say the default, unless it is nothing, or the text speaks of it."""
    if default in (None, False, [], "") or "default" in text.lower():
        return text
    shown = " ".join(f"{number:g}" for number in default) if isinstance(default, list) else default
    return f"{text.removesuffix('.')} (default: {shown})."
