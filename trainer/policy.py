"""How a policy is meant to be played: `sqlenv.json`, beside the weights of every policy that SQLEnv saves.

Training, warm-up and export write it. Whatever plays or trains a policy later reads it (`settle`), so that a policy is
played as it was trained, wherever its folder has gone since. The file also holds the system prompt and the tools, for
programs that play the policy without SQLEnv.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from env_server.errors import SQLEnvError
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from inference.adapters import ModelRef, NamedPolicy, PolicyNameError, find_policy
from trainer.chat.format import ChatSettings
from trainer.config import ActionFormat, ConfigError

SETTINGS_FILE = "sqlenv.json"
PROMPT_KEY = "system_prompt"
TOOLS_KEY = "tools"
SCRIPTED = ("random", "oracle")
"""Names that stand for a player without a model, of `sqlenv evaluate`."""


class PolicyError(ConfigError):
    """A policy cannot be loaded: no such folder or model, or not a causal language model with a tokenizer."""


def resolve_policy(name: str, revision: str | None = None) -> NamedPolicy:
    """Return what the name stands for: a folder of a policy or of a run, or a model on the Hub. Raises PolicyError.

    Every command that takes a policy resolves its name here, or with `find_policy` itself.
    """
    if name in SCRIPTED and not Path(name).is_dir():
        raise PolicyError(f"{name} is a scripted player without a model: sqlenv evaluate plays it, as the comparison")
    try:
        return find_policy(name, revision)
    except PolicyNameError as error:
        raise PolicyError(str(error)) from error


class PlaySettingsError(SQLEnvError):
    """The file beside a policy's weights cannot be read; the text names it."""


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """What makes an evaluation comparable with training, under the names of the flags; lengths are in tokens.

    `max_context_length` is what the model's config allowed in training, None where it was not trained yet;
    `max_thinking_length` None means what `ChatSettings` says.
    `few_shot` is a number of worked episodes in the prompt, `eval_episodes` a number of questions, -1 all.
    """

    data: str = "synthetic"
    answer_mode: AnswerMode = AnswerMode.VALUE
    action_format: ActionFormat = ActionFormat.TEXT
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    custom_system_prompt: str | None = None
    few_shot: int = 0
    step_budget: int = 15
    max_completion_length: int = 4_096
    max_context_length: int | None = None
    max_turn_length: int = 256
    max_thinking_length: int | None = None
    eval_episodes: int = -1
    seed: int = 0

    @property
    def chat(self) -> ChatSettings:
        """How the policy is spoken to."""
        return ChatSettings(
            self.answer_mode,
            self.action_format,
            self.chat_template_kwargs,
            self.max_thinking_length,
            self.custom_system_prompt,
        )

    @property
    def environment(self) -> EnvSettings:
        """What decides its episodes."""
        return EnvSettings(step_budget=self.step_budget)

    def save(self, folder: Path) -> None:
        """Write the file into a policy's folder, whole or not at all."""
        content = {**asdict(self), PROMPT_KEY: self.chat.system_prompt, TOOLS_KEY: self.chat.tools}
        text = json.dumps(content, ensure_ascii=False, indent=2)
        temporary = folder / f".{SETTINGS_FILE}.{os.getpid()}"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / SETTINGS_FILE)


@dataclass(frozen=True, slots=True)
class SavedPlay:
    """What the file says."""

    settings: PlaySettings
    system_prompt: str

    @classmethod
    def of(cls, settings: PlaySettings) -> SavedPlay:
        """What the file is going to say."""
        return cls(settings, settings.chat.system_prompt)


_SETTINGS = TypeAdapter(PlaySettings)


def saved_play(policy: ModelRef) -> SavedPlay | None:
    """Return what the policy's folder, or its repository on the Hub, says; None where it says nothing.

    Raises PlaySettingsError when the file is broken.
    """
    # It imports torch, which takes seconds that a scripted player need not wait.
    from transformers.utils import cached_file

    try:
        found = cached_file(
            policy.location,
            SETTINGS_FILE,
            revision=policy.revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):  # there is no such policy, which whoever loads it says better
        return None
    return None if found is None else read_play(Path(found))


def read_play(file: Path) -> SavedPlay:
    """Return what a policy's file says. Raises PlaySettingsError when it is broken."""
    try:
        content = json.loads(file.read_bytes())
        return SavedPlay(_SETTINGS.validate_python(content), str(content.get(PROMPT_KEY, "")))
    except ValidationError as error:
        detail = error.errors()[0]
        where = ".".join(map(str, detail["loc"])) or "the settings"
        raise PlaySettingsError(f"{file}: {where}: {detail['msg']}") from error
    except ValueError as error:
        raise PlaySettingsError(f"{file} is not JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class Settled:
    """How a policy is played in this run, and what to say of that, one line each; none where nothing was taken over."""

    settings: PlaySettings
    lines: tuple[str, ...]


SETTING_NAMES = tuple(setting.name for setting in fields(PlaySettings))
TRAIN_NAMES = tuple(name for name in SETTING_NAMES if name not in ("max_context_length", "eval_episodes", "seed"))
"""What training takes over: the context is the model's, the number of evaluation questions and the seed the run's."""
WARMUP_NAMES = tuple(
    name for name in TRAIN_NAMES if not name.startswith("max_") and name != "few_shot"
)  # it plays episodes that a script has written, to their end
_ALWAYS_SHOWN = ("data", "answer_mode", "action_format", "step_budget")
_FLAGS = {"eval_episodes": "episodes", "custom_system_prompt": "system_prompt"}
"""What users know some of them as."""


def settle(
    policy: str, saved: SavedPlay | None, given: Mapping[str, Any], names: Sequence[str] = SETTING_NAMES
) -> Settled:
    """Return how a policy is played: as `given` by flag or config, else as it was saved, else by default.

    `policy` is what the user calls it, `names` are the settings that the command takes over. Every command that plays
    or trains a policy settles it here.
    """
    if saved is None:
        return Settled(replace(PlaySettings(), **given), ())
    default = PlaySettings()
    inherited = replace(default, **{name: getattr(saved.settings, name) for name in names})
    settings = replace(inherited, **given)
    taken, changed = [], []
    for name in names:
        value, before = getattr(settings, name), getattr(inherited, name)
        if value != before:
            changed.append(f"{_shown(name, value)} (it had {_text(before)})")
        elif name in _ALWAYS_SHOWN or value != getattr(default, name):
            taken.append(_shown(name, value))
    line = f"taken over from {policy}: {', '.join(taken) or 'nothing'}"
    lines = [line + (f"; changed by flag or config: {', '.join(changed)}" if changed else "")]
    if saved.system_prompt != saved.settings.chat.system_prompt:
        lines.append("the system prompt of this version of SQLEnv is not the one that the policy was trained under")
    return Settled(settings, tuple(lines))


def _shown(name: str, value: object) -> str:
    return f"{_FLAGS.get(name, name)} {_text(value)}"


def _text(value: object) -> str:
    if value is None:
        return "default"
    text = json.dumps(value) if isinstance(value, Mapping | bool) else str(value)
    return text if len(text) <= LONGEST_SHOWN else repr(text[:LONGEST_SHOWN] + "...")


LONGEST_SHOWN = 40
"""Characters of a value in a line; a system prompt has more."""
