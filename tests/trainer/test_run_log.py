"""The run's log: which lines are written, what they hold, and what is said about the time left."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState, TrainingArguments

import trainer.run_log
from env_server.types import ActionType, RewardComponents
from tests.clock import Clock
from trainer.episodes import Episode, Outcome, TokenRow, Turn, record
from trainer.run_files import RunFolder
from trainer.run_log import RunLog

TURN = Turn("QUERY x", ActionType.QUERY, "x", True, "", "no such table: x", RewardComponents(total=-0.02))
EPISODE = Episode("e#1", "e", "db", "?", "easy", "f", Outcome.WRONG, (TURN,), TokenRow([1], [2], [-0.1], [1]))
OTHER = replace(EPISODE, episode_id="e#2")
ROLLOUT = {"rollout/success_rate": 0.25, "rollout/steps": 3.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer.run_log, "time", clock)
    return clock


class Logged:
    """A log, its folder, and what it printed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.log = RunLog(folder, Console(file=self.said, width=80))
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


def test_a_line_holds_the_trainers_metrics_and_the_rollouts(logged: Logged) -> None:
    logged.begin()
    logged.log.write_batch(0, [EPISODE, OTHER], ROLLOUT)
    logged.step(1, {"loss": 0.5, "reward": 0.1})
    assert logged.folder.metrics().rows == [{"step": 1, "loss": 0.5, "reward": 0.1, **ROLLOUT}]
    assert [(row.step, row.record) for row in logged.folder.episodes().rows] == [
        (0, record(EPISODE)),
        (0, record(OTHER)),
    ]


def test_several_batches_between_two_lines_are_averaged(logged: Logged) -> None:
    logged.begin()
    logged.log.write_batch(0, [], {"rollout/success_rate": 0.0, "rollout/steps": 2.0})
    logged.log.write_batch(1, [], {"rollout/success_rate": 1.0, "rollout/steps": 5.0})
    logged.step(2, {"loss": 0.0})
    assert logged.folder.metrics().rows == [{"step": 2, "loss": 0.0, "rollout/success_rate": 0.5, "rollout/steps": 3.5}]


def test_a_step_on_earlier_episodes_is_logged_too(logged: Logged) -> None:
    logged.begin()
    logged.log.write_batch(0, [], ROLLOUT)
    logged.step(1, {"loss": 0.5})
    logged.step(2, {"loss": 0.4})
    assert [row["loss"] for row in logged.folder.metrics().rows] == [0.5, 0.4]
    assert "rollout/steps" not in logged.folder.metrics().rows[1]
    assert "success  nan%" in logged.said.getvalue()


def test_the_trainers_closing_words_are_no_step(logged: Logged) -> None:
    logged.begin()
    logged.step(10, {"train_runtime": 3.0, "train_loss": 0.1})
    assert logged.folder.metrics().rows == []
    assert logged.said.getvalue() == ""


def test_one_line_is_said_about_a_step_whatever_the_width(logged: Logged, clock: Clock) -> None:
    logged.begin()
    logged.log.write_batch(0, [], ROLLOUT)
    clock.now += 90
    logged.step(4, {"loss": 0.5, "reward": 0.125, "sampling/sampling_logp_difference/max": 2e-6})
    assert logged.said.getvalue() == (
        "step    4/10  success 25.0%  reward +0.125  steps  3.0  loss +0.5000  |logprob gap| 2.0e-06  "
        "1:30 gone, 2:15 left\n"
    )


def test_the_time_left_counts_the_steps_of_this_run_alone(logged: Logged, clock: Clock) -> None:
    logged.begin(step=6)
    clock.now += 30
    logged.step(7, {"loss": 0.5})
    assert "0:30 gone, 1:30 left" in logged.said.getvalue()
