"""How a policy is meant to be played: `sqlenv.json`, beside the weights of every policy that SQLEnv saves.

Training, warm-up and export write it, and evaluation reads it, so that a policy is evaluated as it was trained,
wherever its folder has gone since. The file also holds the system prompt and the tools, for programs that play the
policy without SQLEnv.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from env_server.errors import SQLEnvError
from env_server.types import AnswerMode
from inference.adapters import Place
from trainer.chat.format import ChatSettings
from trainer.config import ActionFormat

SETTINGS_FILE = "sqlenv.json"
PROMPT_KEY = "system_prompt"
TOOLS_KEY = "tools"


class PlaySettingsError(SQLEnvError):
    """The file beside a policy's weights cannot be read; the text names it."""


@dataclass(frozen=True, slots=True)
class PlaySettings:
    """What makes an evaluation comparable with training, under the names of the flags; lengths are in tokens.

    `max_context_length` None means what the model's config allows, `max_thinking_length` None what `ChatSettings` says.
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


_SETTINGS = TypeAdapter(PlaySettings)


def saved_play(policy: Place) -> SavedPlay | None:
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


def differences(own: PlaySettings, saved: SavedPlay) -> list[str]:
    """Say in one line each what differs from the settings that a policy was saved with."""
    before = asdict(saved.settings)
    lines = [
        f"{_FLAGS.get(name, '--' + name)} {_text(value)}, the run had {_text(before[name])}"
        for name, value in asdict(own).items()
        if value != before[name]
    ]
    if saved.system_prompt != saved.settings.chat.system_prompt:
        lines.append("the system prompt of this version of SQLEnv is not the one that the policy was trained under")
    return lines


_FLAGS = {"eval_episodes": "--episodes", "custom_system_prompt": "--system_prompt"}
"""Those that `sqlenv evaluate` names otherwise."""


def _text(value: object) -> str:
    if value is None:
        return "as the model allows"
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


SETTING_NAMES = tuple(setting.name for setting in fields(PlaySettings))
