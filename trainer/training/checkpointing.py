"""What the Trainers of transformers and TRL get wrong about checkpoints: how to go on, and a card in each."""

from __future__ import annotations

from typing import Any


class CheckpointingTrainer:
    """Mixed into a Trainer: takes no step when training has ended already, and writes no model card.

    transformers looks whether training is to end after a step, not before one. A run that was broken off after its
    last step, or goes on from the step that it was to end after, would take another one.

    TRL puts a card into each checkpoint, which calls a base that is a local folder `None`. `sqlenv export` writes one.
    """

    state: Any
    control: Any

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]  # the Trainer's

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none."""
