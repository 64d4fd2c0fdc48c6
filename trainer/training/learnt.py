"""What a run has learnt beside the policy's weights, kept in its checkpoints.

It is what came out of its episodes, where that draws the questions or weighs the rewards of those to come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainer.config import ConfigError

S = TypeVar("S")
R = TypeVar("R")


class Learnt(Protocol):
    """What goes on after a restart as if there had been none."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in JSON's types; {} when there is nothing to keep."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint kept."""


class Delayed(Generic[S, R]):
    """A state that each batch's results update, as later batches may know it.

    `lag`: the number of batches before one that may not have ended when it is started. `state_of` is a function of the
    batches before those, however early or late the others end: the same on every rank, and in a run that resumes.
    """

    def __init__(self, initial: S, update: Callable[[S, R], S], lag: int) -> None:
        self.state = initial
        """What every batch to come may know."""
        self.pending: list[tuple[int, R]] = []
        """Batches whose results are not in `state` yet, with their results."""
        self._update = update
        self._lag = lag

    def state_of(self, batch: int) -> S:
        """Return what a batch may know."""
        state = self.state
        for earlier, results in self.pending:
            if earlier < batch - self._lag:
                state = self._update(state, results)
        return state

    def add(self, batch: int, results: R) -> None:
        """Take the results of a batch; of batches in their order."""
        self.pending.append((batch, results))
        self.advance(batch)

    def advance(self, batch: int) -> None:
        """Fold in what the next batch to be started may know, now that a batch has ended."""
        while self.pending and self.pending[0][0] <= batch - self._lag:
            self.state = self._update(self.state, self.pending.pop(0)[1])


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
