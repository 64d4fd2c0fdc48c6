"""Watches a training run and says once what ails it: on the terminal, and in health.jsonl, which the report shows.

`health` decides; a run that goes on remembers what it has logged and said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from trainer.config import SQLEnvArguments
from trainer.results.run_files import HealthWarning, RunFolder
from trainer.training.batch_shape import BatchShape
from trainer.training.health import Watched, diagnose

SAME_THROUGHOUT = (0, "fixed")
"""The curriculum and the weighting under which a reward means the same in every step."""


def watched(arguments: SQLEnvArguments, grpo: GRPOConfig, ranks: int) -> Watched:
    """What the flags say of how a run's metrics are to be read."""
    shape = BatchShape.of(grpo)
    return Watched(
        episodes=shape.rows * shape.batches_per_step * ranks,
        float16=grpo.fp16,
        comparable=(arguments.curriculum, arguments.reward_weighting) == SAME_THROUGHOUT,
    )


class HealthWatch(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Looks at each logged step. It comes after the run's log, which cuts off the steps that are taken again."""

    def __init__(self, folder: RunFolder, run: Watched, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._run = run
        self._say = say
        self._rows: list[Mapping[str, float | None]] = []
        self._said: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on from what the run has logged and said."""
        self._rows = [row for row in self._folder.metrics() if "loss" in row]
        self._said = {warning.sign for warning in self._folder.warnings()}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float | None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say what the steps so far show, unless it was said."""
        if logs is None or "loss" not in logs:
            return
        self._rows.append(dict(logs))
        for found in diagnose(self._rows, self._run):
            symptom = found.symptom
            if symptom.sign in self._said:
                continue
            self._said.add(symptom.sign)
            warning = HealthWarning(state.global_step, symptom.sign, found.seen, symptom.cause, symptom.cure)
            self._folder.add_warning(warning)
            self._say(warning_text(warning))


def warning_text(warning: HealthWarning) -> str:
    """A warning in the lines of a terminal."""
    return (
        f"warning at step {warning.step}: {warning.sign} ({warning.seen})\n"
        f"    likely cause: {warning.cause}\n"
        f"    what helps: {warning.cure.replace('`', '')}"
    )
