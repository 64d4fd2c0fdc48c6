"""SQLEnv's own flags: the fields that `SQLEnvConfig` and `WarmupConfig` (`trainer.flags.configs`) add to TRL's.

Plain dataclasses, each checked when it is made. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from env_server.dataset import Hardness
from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from inference.launch.plan import WeightSyncMode
from inference.weights.transport import SyncCheck

TOKEN_VARIABLE = "SQLENV_TOKEN"
WEIGHT_SYNCS = ["auto", *(mode.value for mode in WeightSyncMode)]
ENV_HELP = (
    "Where episodes are played: 'local' (in this process), or the URLs of servers that `sqlenv serve` runs, "
    "separated by commas: ws://host:8000,ws://other:8000."
)
ACTION_FORMAT_HELP = (
    "How the policy writes its actions: 'text' (DESCRIBE pets), or 'tools' (calls in the model's own format, of tools "
    "that its chat template declares)."
)
SYSTEM_PROMPT_HELP = "A file with the system message to use instead of SQLEnv's own."
FEW_SHOT_HELP = "Worked episodes on training databases to show before every question; those questions are not asked."
DIFFICULTY_HELP = (
    "Train on questions of these levels alone, separated by commas: easy, medium, hard, extra (Spider's hardness; "
    "default: all). What is evaluated on stays all."
)
FOLDS_HELP = (
    "Train on a part of the training databases alone: '1,2/3' deals them into three parts, by their names, and takes "
    "the first two, so that '3/3' is left for GRPO after a warm-up. What is evaluated on stays all."
)
THINKING_HELP = (
    "Tokens that a thought may have in each turn, beside --max_turn_length; then it is closed and the action follows. "
    "0 closes it at once. (512 where the chat template knows of thoughts, unless said otherwise.)"
)
TOKEN_HELP = f"Token of the servers (default: the environment variable {TOKEN_VARIABLE})."


class ActionFormat(StrEnum):
    """How the policy writes its actions: as a line of text, or as calls of tools in the model's own format."""

    TEXT = "text"
    TOOLS = "tools"


class ConfigError(SQLEnvError, ValueError):
    """An argument is missing, unknown or out of range; the text names it."""


def token_of(flag: str | None) -> str | None:
    """The token that was given by flag, else by variable."""
    return flag or os.environ.get(TOKEN_VARIABLE)


def prompt_in(path: str) -> str:
    """Return the text of a --system_prompt file. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--system_prompt {path}: {reason}") from None
    if not text:
        raise ConfigError(f"--system_prompt {path}: the file is empty")
    return text


REWARD_WEIGHTINGS = ["fixed", "adaptive"]
ADVANTAGES = ["episode", "turn"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POSITIVE = _names("""
    step_budget max_concurrency max_turn_length rollout_downsampling samples_per_question max_completion_length
    num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size
    num_iterations num_train_epochs max_length temperature lora_r lora_alpha logging_steps save_steps save_total_limit
    eval_steps
""")
NOT_NEGATIVE = _names("""
    few_shot max_thinking_length staleness dynamic_sampling noisy_expert_fraction max_minutes learning_rate warmup_steps
    weight_decay max_grad_norm beta epsilon epsilon_high seed data_seed
""")
"""Flags whose numbers TRL and transformers do not check, and which would divide by zero or train on NaN."""


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse a number that its flag does not take. Raises ConfigError."""
    for name, value in given.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float):
                continue
            if not math.isfinite(number):
                raise ConfigError(f"--{name} must be a finite number, not {number}")
            if name in POSITIVE and number <= 0:
                raise ConfigError(f"--{name} must be positive, not {number}")
            if name in NOT_NEGATIVE and number < 0:
                raise ConfigError(f"--{name} must not be negative, not {number}")


def check_values(config: Any) -> None:
    """Refuse what a field of a dataclass does not take. Raises ConfigError."""
    check_numbers(vars(config))
    for each in fields(config):
        value, choices = getattr(config, each.name), each.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise ConfigError(f"--{each.name} must be one of {', '.join(choices)}, not {value!r}")


def advise(command: str, lines: Sequence[str]) -> None:
    """Print the lines on stderr, on one rank of all."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.writelines(f"{command}: {line}\n" for line in lines)


@contextmanager
def config_errors() -> Iterator[None]:
    """Raise what a parser makes of bad arguments, or of a missing file, as a one-line ConfigError."""
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


@dataclass
class EpisodeArguments:
    """What `sqlenv train` and `sqlenv warmup` alike ask about the policy and its episodes."""

    answer_mode: str = field(
        default="value",
        metadata={
            "help": "What ANSWER carries: 'value' (the answer itself) or 'sql' (a query that yields it).",
            "choices": [mode.value for mode in AnswerMode],
        },
    )
    step_budget: int = field(default=15, metadata={"help": "Steps in an episode."})
    action_format: str = field(
        default="text", metadata={"help": ACTION_FORMAT_HELP, "choices": [each.value for each in ActionFormat]}
    )
    system_prompt: str | None = field(default=None, metadata={"help": SYSTEM_PROMPT_HELP})
    difficulty: str | None = field(default=None, metadata={"help": DIFFICULTY_HELP})
    folds: str | None = field(default=None, metadata={"help": FOLDS_HELP})
    custom_system_prompt: str | None = field(default=None, init=False)
    """The text of `system_prompt`, or that of the policy that training starts from; not a flag."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.system_prompt is not None:
            self.custom_system_prompt = prompt_in(self.system_prompt)
        _ = self.difficulties, self.kept_folds

    @property
    def environment(self) -> EnvSettings:
        """What decides an episode besides its question and its actions."""
        return EnvSettings(step_budget=self.step_budget)

    @property
    def difficulties(self) -> tuple[Hardness, ...]:
        """`difficulty`, from the easiest level to the hardest; all of them where none is given. Raises ConfigError."""
        if self.difficulty is None:
            return tuple(Hardness)
        names = [name.strip() for name in self.difficulty.split(",")]
        known = [level.value for level in Hardness]
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"--difficulty takes {', '.join(known)}, separated by commas, not {unknown[0]!r}")
        return tuple(level for level in Hardness if level in names)

    @property
    def kept_folds(self) -> tuple[frozenset[int], int]:
        """`folds`: the numbers of those that are kept, from 1, and how many there are. Raises ConfigError."""
        if self.folds is None:
            return frozenset((1,)), 1
        kept, _, count = (part.strip() for part in self.folds.partition("/"))
        numbers = [number.strip() for number in (*kept.split(","), count)]
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise ConfigError(f"--folds takes those that are kept and their number, as in 1,2/3, not {self.folds!r}")
        *chosen, total = map(int, numbers)
        if not all(1 <= number <= total for number in chosen):
            raise ConfigError(f"--folds {self.folds}: the folds are 1 to {total}")
        return frozenset(chosen), total


@dataclass
class SQLEnvArguments(EpisodeArguments):
    """What SQLEnv adds to `GRPOConfig` and `ModelConfig`."""

    data: str = field(
        default="synthetic",
        metadata={
            "help": "Data set to train and evaluate on: 'synthetic', 'synthetic:SEED', 'spider:PATH', 'bird:PATH' or "
            "the path of a folder with your own databases."
        },
    )
    max_concurrency: int = field(default=64, metadata={"help": "Episodes in flight at once."})
    max_turn_length: int = field(default=256, metadata={"help": "Tokens that the policy may generate in one turn."})
    max_thinking_length: int | None = field(default=None, metadata={"help": THINKING_HELP})
    few_shot: int = field(default=0, metadata={"help": FEW_SHOT_HELP})
    weight_sync: str = field(
        default="auto",
        metadata={
            "help": "With --use_vllm, how servers get the weights: 'disk' (a folder that both sides see; works "
            "everywhere), 'lora' (the adapter alone), 'nccl' (other GPUs or hosts), or 'auto'.",
            "choices": WEIGHT_SYNCS,
        },
    )
    weight_sync_check: str = field(
        default="warn",
        metadata={
            "help": "What follows when servers' logprobs drift from the trainer's: 'warn', 'strict' (stop) or "
            "'off', which also leaves out the check of the first push that every tensor arrives.",
            "choices": [check.value for check in SyncCheck],
        },
    )
    weight_sync_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder for 'disk' and 'lora', under the same path for the servers (default: OUTPUT_DIR/weights)."
        },
    )
    env_server: str = field(
        default="local",
        metadata={
            "aliases": ["--env"],
            "help": f"{ENV_HELP} A config file writes env_server: TRL reads env otherwise.",
        },
    )
    env_token: str | None = field(default=None, repr=False, metadata={"help": TOKEN_HELP})
    staleness: int = field(
        default=0,
        metadata={
            "help": "With --use_vllm, updates of the weights that a token may be old when it is trained on. 0: "
            "rollouts and training take turns. 1: the next batch is played while this one is trained on."
        },
    )
    dynamic_sampling: float = field(
        default=0.0,
        metadata={
            "help": "Replace groups without signal (all right or all wrong) by further questions', up to this many "
            "for each group of a batch, as in DAPO (0: none)."
        },
    )
    rollout_downsampling: int = field(
        default=1,
        metadata={
            "help": "Play this many times --num_generations episodes of each question, and train on those whose "
            "rewards differ most, as in PODS: more to learn from where training takes longer than rollouts."
        },
    )
    guided_starts: bool = field(
        default=False,
        metadata={
            "help": "Play a question whose group is all wrong once more with the first steps given, and train on what "
            "follows: the oracle's steps, or where a question has no SQL, those of an earlier success of the policy."
        },
    )
    advantages: str = field(
        default="episode",
        metadata={
            "help": "What a token's advantage is: its episode's ('episode'), or that and its turn's, compared with "
            "the turns of the group's other episodes whose transcripts were the same up to there ('turn').",
            "choices": ADVANTAGES,
        },
    )
    reward_functions: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Rewards beside correctness, progress, operational and format: 'structure', or functions of an "
            "episode of your own as FILE.py:FUNCTION. Each weighs 0.1 unless --reward_weights has a number for it."
        },
    )
    reward_weighting: str = field(
        default="fixed",
        metadata={
            "help": "Whether --reward_weights are what every batch is weighed by ('fixed'), or the most ('adaptive'): "
            "then the weight of a reward sinks as its episodes differ less, in relation to correctness.",
            "choices": REWARD_WEIGHTINGS,
        },
    )
    eval_episodes: int = field(
        default=400,
        metadata={
            "help": "Evaluation questions played greedily before and after training, spread evenly over the "
            "evaluation databases (0: none, -1: all)."
        },
    )
    dry_run: bool = field(
        default=False,
        metadata={
            "help": "Check the flags, files, servers and memory of this run, print the plan, and end: status 0 when it "
            "can work, 2 when not. A GPU that is here takes two steps on the longest rows; where none is, the run is "
            "planned for one, unless --use_cpu true. Nothing is written."
        },
    )
    plans_gpu: bool = field(default=False, init=False)
    """A dry run without --use_cpu where no GPU is here; not a flag."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named: object = self.reward_functions
        if isinstance(named, str):  # a config file may name one without a list
            self.reward_functions = [named]

    def to_log(self) -> dict[str, Any]:
        """What a run's files may show: everything but the token."""
        names = [each.name for each in fields(SQLEnvArguments) if each.init]
        return {name: getattr(self, name) for name in names if name != "env_token"}


@dataclass
class WarmupArguments(EpisodeArguments):
    """What `sqlenv warmup` adds to `SFTConfig` and `ModelConfig`."""

    data: str = field(
        default="synthetic",
        metadata={
            "help": "Data sets to play on, separated by commas; only their training databases are used. What comes of "
            "it is evaluated on the first one, unless sqlenv evaluate is told another."
        },
    )
    noisy_expert_fraction: float = field(
        default=0.0,
        metadata={
            "help": "Fraction of the demonstrations that do not take the shortest way: tables in any order, samples, "
            "values looked up, parts of the query first, and mistakes that are seen and fixed. Mistakes are masked."
        },
    )
    max_episodes: int = field(
        default=2_000,
        metadata={
            "help": "Episodes to play on each data set, spread evenly over its databases (-1: every question; 0: none, "
            "with --rejection_sampling)."
        },
    )
    rejection_sampling: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files with episodes that a policy sampled on training questions of --data (of `sqlenv evaluate "
            "--split train --temperature 1 --samples 8 --episodes_out FILE`, or a run's episodes.jsonl): those whose "
            "answer is right, and no false positive, are trained on too."
        },
    )
    samples_per_question: int = field(
        default=4,
        metadata={"help": "Episodes of one question that --rejection_sampling takes at most."},
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Variables of the chat template, in JSON; the same as training is going to have."},
    )
    max_minutes: float = field(
        default=0.0,
        metadata={
            "help": "Stop after this many minutes of training, over all starts of one that is resumed (0: no limit)."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noisy_expert_fraction > 1.0:
            raise ConfigError(f"--noisy_expert_fraction must be at most 1, not {self.noisy_expert_fraction}")
        if self.max_episodes < -1 or (self.max_episodes == 0 and not self.rejection_sampling):
            raise ConfigError("--max_episodes must be positive, -1 for all questions, or 0 beside --rejection_sampling")
        for file in self.rejection_sampling or ():
            if not Path(file).is_file():
                raise ConfigError(f"--rejection_sampling {file}: there is no such file")
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = _json_object("--chat_template_kwargs", self.chat_template_kwargs)

    @property
    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, as they were checked."""
        return self.chat_template_kwargs if isinstance(self.chat_template_kwargs, dict) else {}


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f'{flag} must be a JSON object such as {{"enable_thinking": false}}, not {text}')
    return found
