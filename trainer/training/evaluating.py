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

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from trl import GRPOConfig
from trl.extras.profiling import profiling_context

from trainer.config import ConfigError
from trainer.eval.statistics import EvaluationSummary
from trainer.training.batches import Batches
from trainer.training.checkpointing import CheckpointingTrainer
from trainer.training.out_of_memory import HalvingTrainer
from trainer.training.step_times import StepTimes, Wait
from trainer.training.trained_tokens import gradient_weight

PREFIX = "eval_"
"""What transformers tells evaluations by; trackers and metrics.jsonl show `eval/` instead."""
BEST = "eval_success_rate"
"""By what the best checkpoint is chosen."""

Evaluate = Callable[[], EvaluationSummary | None]
"""Evaluates the policy as it is, or returns None where there is nothing to say about it; every rank calls it."""


_NUMBERS: Mapping[str, Callable[[EvaluationSummary], float]] = {
    BEST: lambda summary: summary.success_rate,
    "eval_success_low": lambda summary: summary.interval.low,
    "eval_success_high": lambda summary: summary.interval.high,
    "eval_reward": lambda summary: summary.mean_reward,
    "eval_steps": lambda summary: summary.mean_steps,
    "eval_parse_rate": lambda summary: summary.parse_rate,
    "eval_episodes": lambda summary: summary.episodes,
    "eval_failed": lambda summary: summary.failed,
}


def evaluation_metrics(summary: EvaluationSummary) -> dict[str, float]:
    """The numbers of an evaluation, under the names that transformers knows them by."""
    return {name: number(summary) for name, number in _NUMBERS.items()}


def settle_evaluation(grpo: GRPOConfig, eval_episodes: int) -> None:
    """Check the flags on evaluation during training, and let the best checkpoint be the most successful one.

    Raises ConfigError.
    """
    evaluates = grpo.eval_strategy != IntervalStrategy.NO
    if evaluates and eval_episodes == 0:
        raise ConfigError(
            f"--eval_strategy {grpo.eval_strategy.value} evaluates as training goes on, and --eval_episodes 0 leaves "
            "no questions to evaluate on; change one of the two"
        )
    if grpo.lr_scheduler_type in (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY):
        raise ConfigError(
            f"--lr_scheduler_type {grpo.lr_scheduler_type.value} follows the loss of evaluations, and they have none; "
            "use constant_with_warmup, linear or cosine"
        )
    if not grpo.load_best_model_at_end and grpo.save_strategy != SaveStrategy.BEST:
        return
    if not evaluates:
        raise ConfigError("the best checkpoint is known by evaluations; add --eval_strategy steps --eval_steps N")
    # transformers puts "loss" where nothing was given, and there is no loss in an evaluation.
    if grpo.metric_for_best_model in (None, "loss"):
        grpo.metric_for_best_model, grpo.greater_is_better = BEST, True
    name = grpo.metric_for_best_model
    if PREFIX + name.removeprefix(PREFIX) not in _NUMBERS:
        raise ConfigError(f"--metric_for_best_model must be one of {', '.join(_NUMBERS)}, not {name}")


class EvaluationCutShortError(Exception):
    """An evaluation came to no numbers: the run is to stop, or every episode failed."""


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


class SQLEnvTrainer(CheckpointingTrainer, HalvingTrainer):
    """TRL's trainer, with our batches, evaluation and times.

    `train_on` and `evaluate_with` must come before `train`.
    """

    control: TrainerControl
    _batches: Batches
    _evaluate_policy: Evaluate
    _last_loaded_step: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # TRL averages them until its next log, with its own: the run's log and every tracker get both.
        self.times = StepTimes(lambda name, seconds: self._metrics["train"][name].append(seconds))
        self.add_callback(self.times)

    def train_on(self, batches: Batches) -> None:
        """Train on these batches, whatever the training data set's loader draws."""
        self._batches = batches

    def sync_engine(self) -> None:
        """Bring the engine to the weights of now, unless it has them. Collective: every rank calls it."""
        if self._last_loaded_step != self.state.global_step:
            with profiling_context(self, "sync_weights"):
                self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.sync_engine()
        with self.times.waiting(Wait.ROLLOUT):
            prompts = self._batches.prepare(self)
        self.times.played(self._batches.waits)
        played = [{**row, "prompt": prompt} for row, prompt in zip(inputs, prompts, strict=True)]
        scored: dict[str, Any] = super()._generate_and_score_completions(played)
        if (rows := self._batches.token_advantages) is not None:
            # TRL's loss takes (rows, completion) as well as (rows,).
            of_tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            width = scored["completion_ids"].shape[1]
            of_tokens = functional.pad(of_tokens, (0, width - of_tokens.shape[1])).to(scored["advantages"].device)
            scored["advantages"] = scored["advantages"][:, None] + of_tokens
        decided, total = self.accelerator.reduce(gradient_weight(scored, self._batches.decided), "sum").tolist()
        if total > 0:
            self._metrics["train"]["gradient_share/correctness"].append(decided / total)
        return scored

    def evaluate_with(self, evaluate: Evaluate) -> None:
        """Evaluate so from here on."""
        self._evaluate_policy = evaluate

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate the policy as it is and log the numbers. Raises EvaluationCutShortError."""
        summary = self._evaluate_policy()
        if summary is None:
            raise EvaluationCutShortError
        metrics = evaluation_metrics(summary)
        # Not TRL's `log`: it would add, and forget, what has been measured in training since the last one.
        Trainer.log(self, dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        except EvaluationCutShortError:
            return {}
        return metrics

    def _determine_best_metric(self, metrics: Mapping[str, float], trial: Any) -> bool:
        best: bool = bool(metrics) and super()._determine_best_metric(metrics=metrics, trial=trial)
        # `save_strategy best` goes by it alone, and a run that is told to stop must find its checkpoint.
        return best or (self.control.should_training_stop and self.state.global_step < self.state.max_steps)

    def tell(self, summary: EvaluationSummary) -> None:
        """Log an evaluation after training, and let the trackers close what they open for it."""
        Trainer.log(self, evaluation_metrics(summary))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
