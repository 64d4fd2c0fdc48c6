"""`sqlenv.json` in the checkpoints of a training run: each can be evaluated as the policy that is saved at the end.

It is the last file that a checkpoint gets, and so says that the checkpoint is whole.

Apart from `play_settings`, since a callback of transformers cannot be defined without importing it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainer.policy.play_settings import PlaySettings


class SavePlaySettings(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Writes the file into each checkpoint."""

    def __init__(self, settings: PlaySettings) -> None:
        self._settings = settings

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            self._settings.save(folder)
