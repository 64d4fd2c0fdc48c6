"""Where the time of a training step goes: `time/*` among TRL's metrics, so in the log, the trackers and the report.

A step's time is the wall-clock time from the end of the one before it (for the first, from the start of training) to
its own end. Guarantees:

1. `time/rollout`, `time/push`, `time/training` and `time/other` add up to it. `rollout` is what the trainer waited for
   episodes, `push` what it waited for weights to arrive; `training` is the rest of the step, `other` what lies between
   two steps: evaluations, checkpoints, logs.
2. `time/queue`, `time/generation`, `time/environment`, `time/judging` and `time/client` add up to `time/rollout`. They
   divide it as `timings.split` divides the batch's own time, that of the slowest rank. So a batch that is played while
   the trainer does something else costs only what the trainer still has to wait for it.
3. Every step has all of them, those that train on an earlier step's episodes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.rollout.timing import Phase

PREFIX = "time/"


class Wait(StrEnum):
    """What the trainer waits for."""

    ROLLOUT = "rollout"
    PUSH = "push"


class WeightSync(Protocol):
    """What TRL calls before the rollout of a new step."""

    def sync_weights(self) -> None:
        """Bring the engine to the trainer's weights."""


class StepTimes(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Takes the times; `log` is given each number of each step."""

    def __init__(self, log: Callable[[str, float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._ended = self._begun = clock()
        self._waited = dict.fromkeys(Wait, 0.0)
        self._waited_before = 0.0
        self._episodes = dict.fromkeys(Phase, 0.0)

    @contextmanager
    def waiting(self, wait: Wait) -> Iterator[None]:
        """The trainer waits in the block."""
        start = self._clock()
        try:
            yield
        finally:
            self._waited[wait] += self._clock() - start

    def timing(self, weights: WeightSync) -> WeightSync:
        """The same, with its pushes timed."""
        return _Timed(weights, self)

    def played(self, parts: Mapping[Phase, float]) -> None:
        """What the episodes of a batch waited for, in seconds."""
        for part, seconds in parts.items():
            self._episodes[part] += seconds

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was before training is in no step."""
        self._start_anew(self._clock())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is not training ends here."""
        self._begun = self._clock()
        self._waited_before = sum(self._waited.values())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the step's times; TRL logs after this."""
        now = self._clock()
        waited = sum(self._waited.values())
        training = now - self._begun - (waited - self._waited_before)
        other = self._begun - self._ended - self._waited_before
        episodes = _divide(self._waited[Wait.ROLLOUT], self._episodes)
        for name, seconds in (*episodes.items(), *self._waited.items(), ("training", training), ("other", other)):
            self._log(f"{PREFIX}{name}", seconds)
        self._start_anew(now)

    def _start_anew(self, now: float) -> None:
        self._ended = self._begun = now
        self._waited = dict.fromkeys(Wait, 0.0)
        self._waited_before = 0.0
        self._episodes = dict.fromkeys(Phase, 0.0)


class _Timed:
    def __init__(self, weights: WeightSync, times: StepTimes) -> None:
        self._weights = weights
        self._times = times

    def sync_weights(self) -> None:
        with self._times.waiting(Wait.PUSH):
            self._weights.sync_weights()


def _divide(seconds: float, parts: Mapping[Phase, float]) -> dict[str, float]:
    """Divide what the trainer waited for episodes as their own time was divided."""
    whole = sum(parts.values())
    return {part: seconds * parts[part] / whole if whole else 0.0 for part in Phase}
