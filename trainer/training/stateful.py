"""What a run has learnt from its episodes beside the policy's weights, kept in its checkpoints."""

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


class Stateful(Protocol):
    """What resumes as if it had not been interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in JSON's types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept. Raises ConfigError where it does not fit."""


class Delayed(Generic[S, R]):
    """A state that each batch's results update, as later batches may know it; both of JSON's types. `Stateful`.

    `lag`: the number of batches before one that may not have ended when it is started. `state_of` is a function of the
    batches before those, however early or late the others end: the same on every rank, and in a run that resumes.
    """

    def __init__(self, initial: S, update: Callable[[S, R], S], lag: int) -> None:
        self._state = initial
        """What every batch to come may know."""
        self._pending: list[tuple[int, R]] = []
        """Batches whose results are not in `_state` yet, with their results."""
        self._update = update
        self._lag = lag

    def state_of(self, batch: int) -> S:
        """Return what a batch may know."""
        state = self._state
        for earlier, results in self._pending:
            if earlier < batch - self._lag:
                state = self._update(state, results)
        return state

    def add(self, batch: int, results: R) -> None:
        """Take the results of a batch; called once for each batch, in their order."""
        self._pending.append((batch, results))
        while self._pending and self._pending[0][0] <= batch - self._lag:
            self._state = self._update(self._state, self._pending.pop(0)[1])

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        return {"state": self._state, "pending": list(self._pending)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        self._state = state["state"]
        self._pending = [(batch, results) for batch, results in state["pending"]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, and the file of a checkpoint that keeps it. `flags`: a run without them has no such file."""

    stateful: Stateful
    file: str
    flags: str


class SaveStates(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Keeps states in each checkpoint, and loads them where a run resumes."""

    def __init__(self, *saved: Saved) -> None:
        self._saved = saved

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load what the checkpoint has. Raises ConfigError when it lacks something."""
        for saved in self._saved if args.resume_from_checkpoint else ():
            path = Path(args.resume_from_checkpoint) / saved.file
            try:
                saved.stateful.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError as error:
                raise ConfigError(
                    f"{path} is missing: the checkpoint is of a run without {saved.flags}; leave the flags as they were"
                ) from error

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            for saved in self._saved:
                (folder / saved.file).write_text(json.dumps(saved.stateful.state_dict()), encoding="utf-8")
