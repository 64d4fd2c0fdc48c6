"""What a run has learnt beside the policy's weights, kept in its checkpoints.

It is what came out of its episodes, where that draws the questions or weighs the rewards of those to come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


class SaveLearnt(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Keeps it in each checkpoint, as the file `name`, and goes on from it where a run resumes.

    `flags`: a run without them keeps none.
    """

    def __init__(self, learnt: Learnt, name: str, flags: str) -> None:
        self._learnt = learnt
        self._name = name
        self._flags = flags

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up what the checkpoint has. Raises ConfigError when it has none, and should."""
        if not args.resume_from_checkpoint or not self._learnt.state():
            return
        path = Path(args.resume_from_checkpoint) / self._name
        try:
            self._learnt.restore(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} is missing: the checkpoint is of a run without {self._flags}; leave the flags as they were"
            ) from error

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        kept = self._learnt.state()
        if kept and state.is_world_process_zero and folder.is_dir():
            (folder / self._name).write_text(json.dumps(kept), encoding="utf-8")
