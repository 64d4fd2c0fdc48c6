"""The run's log: which lines are written, what they hold, and what is said about the time left."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

import trainer.training.run_log
from env_server.types import ActionType, RewardComponents
from tests.clock import Clock
from trainer.eval.run_files import RunFolder
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn, record
from trainer.training.run_log import RunLog, episode_lines

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


def test_the_trainers_closing_words_are_no_step(logged: Logged) -> None:
    logged.begin()
    logged.step(10, {"train_runtime": 3.0, "train_loss": 0.1})
    assert logged.folder.metrics() == []
    assert logged.said.getvalue() == ""


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
