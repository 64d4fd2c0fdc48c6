"""TRL's supervised trainer for a warm-up, without the waste: it reads what is learned, and no padding.

Most of an episode is what the environment says, and all episodes begin with the same prompt. `WarmupTrainer` has the
model read no more than the labels need (`trainer.training.scoring`). Loss, gradients and metrics are TRL's to rounding.
"""

from __future__ import annotations

import logging
from typing import Any

from peft import PeftModel
from trl import SFTTrainer

from trainer.training.scoring import passes_are_collectives, read_less

_LOG = logging.getLogger(__name__)


class WarmupTrainer(SFTTrainer):  # type: ignore[misc]  # TRL carries no types
    """TRL's trainer, reading what is learned alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        self.why_not = read_less(
            model,
            temperature=1.0,
            outputs=("log_probs", "entropy", "is_top1"),
            one_pass=passes_are_collectives(self.accelerator),
        )
        """Why the model reads whole rows; "" where it does not."""
        if self.why_not:
            _LOG.warning("rows are read whole, padding and all: %s", self.why_not)
