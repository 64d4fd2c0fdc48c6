"""Who watches a run: what is said and kept, once, and what the flags say of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from trainer.results.run_files import RunFolder
from trainer.training import health
from trainer.training.arguments import parse_arguments
from trainer.training.health import Watched
from trainer.training.health_watch import HealthWatch, watched

FAILING = {"loss": 0.1, "rollout/success_rate": 0.0, "rollout/no_signal": 0.875}


class Run:
    """A run that logs, is watched, and goes on from its folder."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder.create(path, {})
        self.said: list[str] = []
        self._arguments = TrainingArguments(output_dir=str(path), use_cpu=True, bf16=False)
        self.begin()

    def begin(self) -> None:
        self._watch = HealthWatch(self.folder, Watched(episodes=64), self.said.append)
        self._watch.on_train_begin(self._arguments, TrainerState(), TrainerControl())

    def log(self, step: int, logs: dict[str, float | None]) -> None:
        with self.folder.metrics_writer() as writer:
            writer.write({"step": step, **logs})
        self._watch.on_log(self._arguments, TrainerState(global_step=step), TrainerControl(), logs)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_warning_is_said_once_and_kept(run: Run) -> None:
    for step in range(1, 9):
        run.log(step, {**FAILING})
    assert run.said == [
        "warning at step 5: nearly every episode fails (success 0.0%, no signal 88% in 320 episodes)\n"
        "    likely cause: the policy cannot do it even now and then\n"
        "    what helps: warm up, or more of it; easier data; --num_generations 16"
    ]
    (kept,) = run.folder.warnings()
    assert (kept.step, kept.sign, kept.cure) == (5, health.ALL_FAIL.sign, health.ALL_FAIL.cure)


def test_a_run_that_goes_on_remembers_what_it_has_logged_and_said(run: Run) -> None:
    for step in range(1, 4):
        run.log(step, {**FAILING})
    run.begin()
    run.log(4, {**FAILING})
    assert run.said == []
    run.log(5, {**FAILING})
    assert len(run.said) == 1
    run.begin()
    run.log(6, {**FAILING})
    run.log(7, {**FAILING, "grad_norm": float("nan")})
    assert len(run.said) == 2
    assert [warning.step for warning in run.folder.warnings()] == [5, 7]


def test_evaluations_and_closing_words_are_no_steps(run: Run) -> None:
    for step in range(1, 6):
        run.log(step, {"eval_success_rate": 0.0, "rollout/success_rate": 0.0, "rollout/no_signal": 1.0})
    run.begin()
    for step in range(6, 10):
        run.log(step, {**FAILING})
    run.log(9, {"train_loss": float("nan"), "grad_norm": float("nan")})
    assert run.said == []


CPU = ("--model_name_or_path", "x", "--use_cpu", "true")


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        ((), 1, Watched(episodes=64)),
        (("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"), 3, Watched(episodes=24)),
        (("--num_iterations", "4"), 1, Watched(episodes=64)),
        (("--steps_per_generation", "4"), 1, Watched(episodes=32)),
        (("--curriculum", "20"), 1, Watched(episodes=64, comparable=False)),
        (("--reward_weighting", "adaptive"), 1, Watched(episodes=64, comparable=False)),
    ],
)
def test_the_flags_say_how_metrics_are_read(flags: tuple[str, ...], ranks: int, expected: Watched) -> None:
    arguments, grpo, _ = parse_arguments([*CPU, "--bf16", "false", *flags])
    assert watched(arguments, grpo, ranks) == expected
