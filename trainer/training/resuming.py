"""What transformers' Trainer lacks to go on where a run was broken off: it would take a step too many."""

from __future__ import annotations

from typing import Any


class ResumableTrainer:
    """Mixed into a Trainer: takes no step when training has ended already.

    transformers looks whether training is to end after a step, not before one. A run that was broken off after its
    last step, or goes on from the step that it was to end after, would take another one.
    """

    state: Any
    control: Any

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]  # the Trainer's
