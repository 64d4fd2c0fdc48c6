"""Evaluation during training: which flags it takes, and whether training begins with one."""

from __future__ import annotations

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer.eval.statistics import EvaluationSummary, Interval
from trainer.training.arguments import parse_train
from trainer.training.evaluating import EvaluateAtStart, evaluation_metrics

CPU = ("--model_name_or_path", "x", "--use_cpu", "true", "--bf16", "false")
EVERY_TWO = ("--eval_strategy", "steps", "--eval_steps", "2")
SUMMARY = EvaluationSummary(8, 2, 1, 3, 0.25, Interval(0.1, 0.5), {}, {}, 0.3, 4.5, 0.9, {}, {})


def test_groups_of_any_size_go_with_evaluation() -> None:
    grpo, _ = parse_train([*CPU, *EVERY_TWO, "--num_generations", "4"])
    assert (grpo.eval_steps, grpo.metric_for_best_model) == (2, None)


def test_the_best_checkpoint_is_the_most_successful_one() -> None:
    best = (*CPU, *EVERY_TWO, "--save_strategy", "best", "--load_best_model_at_end", "true")
    grpo, _ = parse_train(best)
    assert (grpo.metric_for_best_model, grpo.greater_is_better) == ("eval_success_rate", True)
    grpo, _ = parse_train([*best, "--metric_for_best_model", "success_low"])
    assert (grpo.metric_for_best_model, grpo.greater_is_better) == ("success_low", True)


def test_the_metrics_of_an_evaluation() -> None:
    numbers = (0.25, 0.1, 0.5, 0.3, 4.5, 0.9, 8, 1)
    names = ("success_rate", "success_low", "success_high", "reward", "steps", "parse_rate", "episodes", "failed")
    assert evaluation_metrics(SUMMARY) == {f"eval_{name}": n for name, n in zip(names, numbers, strict=True)}


class Known:
    """What a run knows of its evaluations: whether there is one where it begins."""

    def __init__(self, known: bool) -> None:
        self._known = known
        self.gone_on_from: list[int] = []

    def resume_from(self, step: int) -> None:
        self.gone_on_from.append(step)

    def known(self, step: int) -> EvaluationSummary | None:
        return SUMMARY if self._known else None


@pytest.mark.parametrize(
    ("step", "known", "strategy", "on_start", "begins"),
    [
        (0, True, "no", False, True),  # what was played before training is told to the trackers
        (0, False, "no", True, False),  # no questions
        (4, False, "steps", False, True),  # it was cut short
        (4, True, "steps", True, False),
        (5, False, "steps", False, False),  # none was due
        (5, False, "steps", True, True),
        (2, False, "steps", False, False),  # before eval_delay
        (4, False, "no", False, False),
    ],
)
def test_where_training_begins_with_an_evaluation(
    step: int, known: bool, strategy: str, on_start: bool, begins: bool
) -> None:
    arguments = TrainingArguments(
        "runs/x", use_cpu=True, bf16=False, eval_strategy=strategy, eval_steps=2, eval_delay=3, eval_on_start=on_start
    )
    evaluations = Known(known)
    state = TrainerState(global_step=step, eval_steps=2)
    EvaluateAtStart(evaluations).on_train_begin(arguments, state, TrainerControl())
    assert arguments.eval_on_start is begins
    assert evaluations.gone_on_from == [step]
