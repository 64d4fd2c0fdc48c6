"""The run's log: which lines are written, what they hold, and what is said about the time left."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

import trainer.training.run_log
from env_server.types import ActionType, RewardComponents
from tests.clock import Clock
from trainer.eval.run_files import RunFolder
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn, record
from trainer.training.arguments import parse_train
from trainer.training.run_log import (
    WIDTH,
    RunLog,
    closing_runs,
    commit,
    episode_lines,
    step_text,
    writing_into,
)

TURN = Turn("QUERY x", ActionType.QUERY, "x", True, "", "no such table: x", RewardComponents(total=-0.02))
ROW = TokenRow([1], [2], [-0.1], [1], [0])
EPISODE = record(Episode("e#1", "e", "db", "?", "easy", "f", Outcome.WRONG, (TURN,), ROW), with_versions=True)
OTHER = replace(EPISODE, episode_id="e#2")
ROLLOUT = {"rollout/success_rate": 0.25, "rollout/steps": 3.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer.training.run_log, "time", clock)
    return clock


class Logged:
    """A log, its folder, and what it printed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.log = RunLog(folder, Console(file=self.said, width=40))
        self._arguments = TrainingArguments(output_dir=str(folder.path), use_cpu=True, bf16=False)

    def begin(self, step: int = 0) -> None:
        self.log.on_train_begin(self._arguments, TrainerState(global_step=step), TrainerControl())

    def step(self, step: int, logs: dict[str, float]) -> None:
        state = TrainerState(global_step=step, max_steps=10)
        self.log.on_log(self._arguments, state, TrainerControl(), logs)


@pytest.fixture
def logged(tmp_path: Path, clock: Clock) -> Iterator[Logged]:
    logged = Logged(RunFolder.create(tmp_path / "run", {}))
    yield logged
    logged.log.close()


def test_a_line_holds_what_the_trainer_logs(logged: Logged) -> None:
    logged.begin()
    logged.log.write_episodes(episode_lines(1, [EPISODE, OTHER]))
    logged.step(1, {"loss": 0.5, "reward": 0.1, **ROLLOUT})
    assert logged.folder.metrics() == [{"step": 1, "loss": 0.5, "reward": 0.1, **ROLLOUT}]
    assert [(row.step, row.record) for row in logged.folder.episodes()] == [
        (1, EPISODE),
        (1, OTHER),
    ]


def test_an_evaluation_is_in_the_line_of_its_step_under_the_names_that_trackers_show(logged: Logged) -> None:
    logged.begin()
    evaluation = {"eval_success_rate": 0.5, "eval_success_low": 0.25, "epoch": 0.1}
    logged.step(0, evaluation)
    logged.step(1, {"loss": 0.5})
    said = logged.said.getvalue()
    logged.step(1, evaluation)
    logged.step(2, evaluation)
    shown = {"eval/success_rate": 0.5, "eval/success_low": 0.25}
    assert logged.folder.metrics() == [{"step": 1, "loss": 0.5, **shown}, {"step": 2, **shown}]
    assert logged.said.getvalue() == said, "whoever evaluates says so"


def test_what_is_no_terminal_gets_the_same_lines_whatever_its_width(logged: Logged, clock: Clock) -> None:
    logged.begin()
    clock.now += 90
    logged.step(4, {"loss": 0.5, "reward": 0.125, "entropy": 0.5, "kl": 0.25, "learning_rate": 1e-6, **ROLLOUT})
    assert logged.said.getvalue() == (
        "step    4/10  success 25.0%  weighted +0.125   3.0 steps  2:15 left\n    kl 0.2500  entropy 0.50  lr 1.0e-06\n"
    )


def test_a_run_that_goes_on_counts_its_own_steps_and_cuts_off_those_that_it_takes_again(
    logged: Logged, clock: Clock
) -> None:
    logged.begin()
    for step in (6, 7):
        logged.log.write_episodes(episode_lines(step, [EPISODE]))
        logged.step(step, {"loss": 0.25})
    logged.begin(step=6)
    clock.now += 30
    logged.step(7, {"loss": 0.5})
    assert "1:30 left" in logged.said.getvalue()
    assert [(row["step"], row["loss"]) for row in logged.folder.metrics()] == [(6, 0.25), (7, 0.5)]
    assert [row.step for row in logged.folder.episodes()] == [6]


METRICS = {
    "rollout/success_rate": 0.25,
    "rollout/steps": 12.5,
    "rollout/failed": 0.0,
    "rollout/reward": 0.314,
    "reward": -0.125,
    "reward_std": 0.41,
    "rollout/no_signal": 0.375,
    "completions/mean_length": 1234.4,
    "completions/clipped_ratio": 0.031,
    "kl": 0.0123,
    "entropy": 10.53,
    "sampling/importance_sampling_ratio/min": 0.812,
    "sampling/importance_sampling_ratio/max": 11.84,
    "sampling/sampling_logp_difference/mean": 0.0113,
    "grad_norm": 0.5312,
    "gradient_share/correctness": 0.874,
    "learning_rate": 2.5e-6,
    "loss": 0.01,
}
TIMES = {
    "time/rollout": 8.04,
    "time/queue": 0.04,
    "time/generation": 5.6,
    "time/environment": 1.9,
    "time/judging": 0.3,
    "time/client": 0.2,
    "time/push": 0.2,
    "time/training": 12.4,
    "time/other": 100.0,
}
LEFT = 3723.9


def test_two_lines_hold_what_experts_watch() -> None:
    usual = {name: value for name, value in METRICS.items() if name != "kl"} | TIMES
    assert step_text(12, 60, usual, LEFT) == (
        "step   12/60  success 25.0%  reward +0.31  weighted -0.125±0.41  no signal 38%  "
        "12.5 steps  1234 tokens, 3% clipped  1h02 left\n"
        "    entropy 10.53  ratio 0.81-11.84  gap 1e-02  grad 0.53 (87% correctness)  lr 2.5e-06  "
        "rollout 8.0 s (70% generation), train 12 s"
    )


@pytest.mark.parametrize("width", [20, 40, 80, WIDTH, 200])
def test_lines_break_between_numbers_alone(width: int) -> None:
    wide, narrow = (step_text(12, 100, METRICS | TIMES, LEFT, columns) for columns in (10_000, width))
    longest = max(map(len, re.split("  +|\n", wide)))
    assert all(len(line) <= max(width, 4 + longest) for line in narrow.splitlines())
    assert re.sub(r"\s+", " ", narrow) == re.sub(r"\s+", " ", wide)


def test_what_was_not_measured_is_left_out() -> None:
    metrics: dict[str, Any] = {"loss": 0.5, "reward": 0.5, "entropy": None}
    assert step_text(3, 9, metrics, 30) == "step    3/9  weighted +0.500  0:30 left"


CPU = ("--model_name_or_path", "x", "--use_cpu", "true", "--bf16", "false")
VARIABLES = ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR")


def test_trackers_write_into_the_runs_folder_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    grpo, _ = parse_train([*CPU, "--output_dir", str(tmp_path / "first"), "--report_to", "tensorboard"])
    with writing_into(grpo):
        where = [os.environ[variable] for variable in VARIABLES]
    assert where == [str(tmp_path / "first" / "tensorboard"), str(tmp_path / "first")]
    assert grpo.run_name == "first"
    assert not set(VARIABLES) & set(os.environ), "the next run in this process has a folder of its own"


class Wandb:
    """What of wandb's module matters here: one run is open in the process, or none."""

    def __init__(self, run: object) -> None:
        self.run: object = run

    def finish(self) -> None:
        self.run = None


def test_the_run_that_wandb_keeps_open_ends_with_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with closing_runs():
        wandb = Wandb("opened in training")
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert wandb.run is None
    wandb.run = "the caller's own"
    with closing_runs():
        pass
    assert wandb.run == "the caller's own"


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "-m", "one")
    assert commit(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{git('rev-parse', 'HEAD')} with changes"
