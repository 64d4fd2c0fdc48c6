"""Where the time of a training step goes: `time/*` among TRL's metrics, so in the log, the trackers and the report.

A step's time is the wall-clock time from the end of the one before it (for the first, from the start of training) to
its own end. Guarantees:

1. `time/rollout`, `time/push`, `time/training` and `time/other` add up to it. `rollout` is what the trainer waited for
   episodes, `push` what it waited for weights to arrive; `training` is the rest of the step, `other` what lies between
   two steps: evaluations, checkpoints, logs.
2. `time/queue`, `time/generation`, `time/environment`, `time/judging` and `time/client` add up to `time/rollout`. They
   divide it as `timing.attribute` does the batch's own time, that of the slowest rank. So a batch that is played while
   the trainer does something else costs only what the trainer still has to wait for it.
3. Every step has all of them, those that train on an earlier step's episodes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.rollout.timing import Phase


class StepTimes(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Takes the times; `log` is given each number of each step."""

    def __init__(self, log: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._reset(clock())

    def _reset(self, now: float) -> None:
        self._ended = self._begun = now
        self._waited = {"rollout": 0.0, "push": 0.0}
        self._waited_before = 0.0
        self._episodes = dict.fromkeys(Phase, 0.0)

    @contextmanager
    def waiting(self, wait: str) -> Iterator[None]:
        """The trainer waits in the block, for a `rollout` or a `push`."""
        start = self._clock()
        try:
            yield
        finally:
            self._waited[wait] += self._clock() - start

    def played(self, parts: Mapping[Phase, float]) -> None:
        """What the episodes of a batch waited for, in seconds."""
        for part, seconds in parts.items():
            self._episodes[part] += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was before training is in no step."""
        self._reset(self._clock())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is not training ends here."""
        self._begun = self._clock()
        self._waited_before = sum(self._waited.values())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the step's times; TRL logs after this."""
        now = self._clock()
        training = now - self._begun - (sum(self._waited.values()) - self._waited_before)
        other = self._begun - self._ended - self._waited_before
        # What the trainer waited for episodes is divided as their own time was.
        whole = sum(self._episodes.values())
        episodes = {
            part: self._waited["rollout"] * seconds / whole if whole else 0.0
            for part, seconds in self._episodes.items()
        }
        for name, seconds in (*episodes.items(), *self._waited.items(), ("training", training), ("other", other)):
            self._log(f"time/{name}", seconds)
        self._reset(now)
