"""Evaluation during training: TRL's trainer, with evaluations that play what the run's other evaluations play.

transformers decides when (`eval_strategy`, `eval_steps`, `eval_delay`), keeps the best checkpoint
(`load_best_model_at_end`, `save_strategy best`) and tells the trackers; of its own evaluation, and TRL's, nothing runs.
Promises:

1. Evaluations leave training alone: with and without them, a run's weights are the same to the bit.
2. On several ranks each plays its share, and all see the same numbers.
3. A run that is asked to stop leaves the evaluation that it is in, keeps nothing of it, saves a checkpoint and stops.
   Where it goes on, that evaluation is the first thing that it does.
4. What a resumed run had evaluated is not played again; evaluations of steps that it takes again are dropped.
"""

from __future__ import annotations

from math import inf
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from trainer.eval.statistics import EvaluationSummary
from trainer.flags.configs import EVALUATION_METRICS

PREFIX = "eval_"
"""What transformers tells evaluations by; trackers and metrics.jsonl show `eval/` instead."""


def evaluation_metrics(summary: EvaluationSummary) -> dict[str, float]:
    """The numbers of an evaluation, under the names that transformers knows them by."""
    interval = summary.interval
    numbers = (summary.success_rate, interval.low, interval.high, summary.mean_reward, summary.mean_steps)
    rest = (summary.parse_rate, summary.episodes, summary.failed)
    return dict(zip(EVALUATION_METRICS, (*numbers, *rest), strict=True))


def worst_metrics(args: TrainingArguments) -> dict[str, float]:
    """The metrics of an evaluation that was cut short or failed: no checkpoint is the best by them."""
    name = args.metric_for_best_model
    return {} if name is None else {PREFIX + name.removeprefix(PREFIX): -inf if args.greater_is_better else inf}


class EvaluationsSoFar(Protocol):
    """What a run knows of its evaluations; every rank asks."""

    def resume_from(self, step: int) -> None:
        """Drop what was evaluated after a step that training goes on from."""

    def known(self, step: int) -> EvaluationSummary | None:
        """What was evaluated at a step; 0 is before training."""


class EvaluateAtStart(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Has training begin with an evaluation: the one before it, for the trackers, or one that was cut short."""

    def __init__(self, evaluations: EvaluationsSoFar) -> None:
        self._evaluations = evaluations

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide by where training begins; transformers reads `eval_on_start` next."""
        step = state.global_step
        self._evaluations.resume_from(step)
        known = self._evaluations.known(step) is not None
        args.eval_on_start = known if step == 0 else not known and (args.eval_on_start or _is_due(args, state))


def _is_due(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that is done is one of those to evaluate after."""
    step = state.global_step
    return bool(
        args.eval_strategy == IntervalStrategy.STEPS and step % state.eval_steps == 0 and args.eval_delay <= step
    )
