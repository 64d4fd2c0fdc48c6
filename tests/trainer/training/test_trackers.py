"""Where trackers write: into the run's folder, unless someone has said where."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trainer.training.arguments import parse_train
from trainer.training.trackers import closing_runs, writing_into

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


def test_what_was_said_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DIR", "/elsewhere")
    named = ("--report_to", "tensorboard", "--run_name", "mine")
    grpo, _ = parse_train([*CPU, "--output_dir", str(tmp_path / "first"), *named])
    with writing_into(grpo):
        assert os.environ["WANDB_DIR"] == "/elsewhere"
    assert os.environ["WANDB_DIR"] == "/elsewhere"
    assert grpo.run_name == "mine"


def test_a_run_that_no_tracker_sees_gets_no_name(tmp_path: Path) -> None:
    grpo, _ = parse_train([*CPU, "--output_dir", str(tmp_path / "first"), "--report_to", "none"])
    with writing_into(grpo):
        assert grpo.run_name is None


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
