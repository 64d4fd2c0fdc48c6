"""What a run has learnt beside the policy's weights, kept in its checkpoints.

It is what came out of its episodes, where that draws the questions or weighs the rewards of those to come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainer.config import ConfigError


class Learnt(Protocol):
    """What goes on after a restart as if there had been none."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in JSON's types; {} when there is nothing to keep."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Something learnt, and the file of a checkpoint that keeps it. `flags`: a run without them has no such file."""

    learnt: Learnt
    file: str
    flags: str


class SaveLearnt(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Keeps what was learnt in each checkpoint, and goes on from it where a run resumes."""

    def __init__(self, *kept: Kept) -> None:
        self._kept = kept

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up what the checkpoint has. Raises ConfigError when it misses something that it should have."""
        if not args.resume_from_checkpoint:
            return
        for kept in self._kept:
            if not kept.learnt.state():
                continue
            path = Path(args.resume_from_checkpoint) / kept.file
            try:
                kept.learnt.restore(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError as error:
                raise ConfigError(
                    f"{path} is missing: the checkpoint is of a run without {kept.flags}; leave the flags as they were"
                ) from error

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if not state.is_world_process_zero or not folder.is_dir():
            return
        for kept in self._kept:
            if learnt := kept.learnt.state():
                (folder / kept.file).write_text(json.dumps(learnt), encoding="utf-8")
