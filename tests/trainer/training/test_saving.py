"""A disk that is full, for real: files of the process may not grow beyond a limit. What was trained is not lost.

The limit (RLIMIT_FSIZE) is the one way to a failing write that takes no privilege; what libraries make of it is what
they make of a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM, TrainingArguments

from benchmarks.server_process import ROOT
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from tests.terminal import ENTER, Terminal
from trainer.policy import SETTINGS_FILE
from trainer.training.saving import (
    SaveError,
    Saving,
    checkpoints_at_once,
    policy_kept,
    require_room,
    write_failure,
    writes_in_one_line,
)

SMALL = 20_000
"""Bytes that a file may have: those of weights have more, those of settings fewer."""
BOTH = [
    *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--step_budget", "4"),
    *("--logging_steps", "1", "--report_to", "none", "--use_cpu", "true", "--bf16", "false"),
    *("--gradient_checkpointing", "false", "--save_strategy", "no"),
]
FLAGS = {
    "train": [
        *(*BOTH, "--eval_episodes", "0", "--max_turn_length", "8", "--max_completion_length", "96"),
        *("--num_generations", "2"),
    ],
    "warmup": [*BOTH, "--max_episodes", "8"],
}


@contextmanager
def no_file_beyond(size: int) -> Iterator[Callable[[], None]]:
    """Limit the files of this process; what it yields lifts the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_weights(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    save_file({"weight": torch.zeros(SMALL)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "write",
    [
        write_weights,
        lambda folder: torch.save({"state": torch.zeros(SMALL)}, folder / "optimizer.pt"),
        lambda folder: (folder / "episodes.jsonl").write_text("a" * 2 * SMALL, encoding="utf-8"),
    ],
    ids=["safetensors", "torch", "python"],
)
def test_a_write_that_fails_is_known_whatever_library_it_is_of(write: Callable[[Path], object], tmp_path: Path) -> None:
    with no_file_beyond(SMALL), pytest.raises(SaveError) as refused, writes_in_one_line(str(tmp_path)):
        write(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert refused.value.__cause__ is not None
    assert write_failure(refused.value.__cause__) is not None


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), RuntimeError("shapes"), ConnectionRefusedError(errno.ECONNREFUSED, "no"), TimeoutError()],
)
def test_another_failure_stays_what_it_is(error: Exception, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise error

    assert write_failure(error) is None
    with pytest.raises(type(error)), writes_in_one_line("here"):
        Saving(print).keep_trying(fail, tmp_path, 1.0)


class Person:
    """Answers questions at a terminal in turn; `first` is done before the first answer."""

    def __init__(self, *answers: str, first: Callable[[], None] = lambda: None) -> None:
        self._answers = iter(answers)
        self._first = first
        self.asked: list[str] = []

    def __call__(self, question: str) -> str:
        if not self.asked:
            self._first()
        self.asked.append(question)
        return next(self._answers)


def test_the_policy_is_kept_until_there_is_room(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "model"
    with no_file_beyond(SMALL) as lift:
        person = Person("", first=lift)
        assert Saving(print, person).keep_trying(write_weights, folder, 4 * SMALL) == folder
    assert (folder / "model.safetensors").stat().st_size > 4 * SMALL
    assert str(folder) in person.asked[0]


def test_the_policy_goes_where_it_is_told_and_over_nothing(tmp_path: Path) -> None:
    folder, used, other = tmp_path / "run" / "model", tmp_path / "used", tmp_path / "other"
    used.mkdir()
    (used / "model.safetensors").write_text("somebody's", encoding="utf-8")
    with no_file_beyond(SMALL) as lift:
        person = Person(str(used), str(other), first=lift)
        assert Saving(print, person).keep_trying(write_weights, folder, 4 * SMALL) == other
    assert (used / "model.safetensors").read_text(encoding="utf-8") == "somebody's"
    assert not folder.exists()
    assert len(person.asked) == 2


def test_without_a_terminal_it_is_tried_again_with_a_line_each(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    lines: list[str] = []
    slept: list[float] = []
    with no_file_beyond(SMALL) as lift:

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                lift()

        saving = Saving(lines.append, None, sleep, retry_s=7.0, patience_s=70.0)
        assert saving.keep_trying(write_weights, folder, 4 * SMALL) == folder
    assert slept == [7.0] * 3
    assert [str(folder) in line and "\n" not in line for line in lines] == [True] * 3


def test_what_cannot_be_written_at_last_is_put_elsewhere_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    file = tmp_path / "file"
    file.touch()
    saving = Saving(lambda _: None, None, lambda _: None, retry_s=1.0, patience_s=2.0)
    saved = saving.keep_trying(write_weights, file / "model", 4 * SMALL)
    assert saved.parent == temporary
    assert (saved / "model.safetensors").is_file()
    with pytest.raises(SaveError, match=str(file)):
        saving.keep_trying(write_weights, file / "model", 4 * SMALL, movable=False)
    with pytest.raises(SaveError, match=str(file)):
        saving.keep_trying(write_weights, file / "model", 1e18)


def test_a_log_that_cannot_be_written_costs_no_policy(tmp_path: Path) -> None:
    saved = []

    def save() -> Path:
        saved.append(1)
        return tmp_path / "model"

    def fail(steps: int) -> None:
        with policy_kept(save, lambda: steps):
            raise OSError(errno.ENOSPC, "full", "metrics.jsonl")

    with pytest.raises(SaveError, match=str(tmp_path / "model")):
        fail(3)
    assert saved == [1]
    with pytest.raises(OSError, match="full"):
        fail(0)
    assert saved == [1]


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ({"save_strategy": "no"}, 0),
        ({"max_steps": 200, "save_steps": 50, "save_total_limit": 2}, 3),
        ({"max_steps": 200, "save_steps": 50}, 4),
        ({"max_steps": 200, "save_steps": 0.1}, 10),
        ({"max_steps": 60, "save_steps": 50, "save_total_limit": 2}, 2),
        ({"max_steps": 200, "save_steps": 50, "save_total_limit": 1}, 2),
        ({"num_train_epochs": 3, "save_strategy": "epoch"}, 3),
        ({"num_train_epochs": 3, "save_total_limit": 2}, 3),
    ],
    ids=str,
)
def test_checkpoints_that_lie_side_by_side(flags: dict[str, Any], count: int, tmp_path: Path) -> None:
    assert checkpoints_at_once(TrainingArguments(str(tmp_path), use_cpu=True, **flags)) == count


def test_a_run_that_does_not_fit_on_the_disk_is_refused(tmp_path: Path) -> None:
    config = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=10, save_steps=5)
    free = os.statvfs(tmp_path)
    room = free.f_bavail * free.f_frsize
    require_room(config, room * 0.1, room * 0.1)
    with pytest.raises(SaveError, match="--save_total_limit"):
        require_room(config, room * 0.2, room * 0.4)
    (tmp_path / "checkpoint-5").mkdir()
    with (tmp_path / "checkpoint-5" / "optimizer.pt").open("wb") as sparse:
        sparse.truncate(room)  # a run that goes on has that already
    require_room(config, room * 0.2, room * 0.4)


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path) -> Path:
    """A policy whose generation settings transformers does not save."""
    folder = save_policy(random_policy, ["How many pets are there"], tmp_path / "policy")
    settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 3, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["full", "adapter"])
@pytest.mark.parametrize("command", ["train", "warmup"])
def test_what_was_trained_is_saved_whatever_the_generation_settings(
    command: str, kind: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    flags = [*FLAGS[command], *("--save_strategy", "steps", "--save_steps", "1")]
    if kind == "adapter":
        flags = [*flags, "--use_peft", "true", "--lora_r", "4"]
    base = ["--model_name_or_path", str(policy), "--output_dir", str(run), "--max_steps", "1"]
    assert cli.main([command, *base, *flags]) == 0
    saved = run / "model"
    for folder in (saved, run / "checkpoint-1"):
        assert any(folder.glob("*.safetensors"))
        assert (folder / SETTINGS_FILE).is_file()
    assert capsys.readouterr().err.count("generation_config.json") == 1
    assert cli.main(["export", str(saved), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("command", ["train", "warmup"])
def test_a_policy_that_cannot_be_saved_is_not_trained(
    command: str, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with no_file_beyond(SMALL):
        status = cli.main(
            [
                command,
                "--model_name_or_path",
                str(policy),
                "--output_dir",
                str(run),
                "--max_steps",
                "1",
                *FLAGS[command],
            ]
        )
    said = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert str(run) in said[-1]
    assert not run.exists()


def limit(pid: int, size: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_disk_that_fills_up_in_training_costs_neither_the_run_nor_the_policy(policy: Path, tmp_path: Path) -> None:
    """At a terminal: the checkpoint is left out, and the policy saved where its owner says."""
    run, other = tmp_path / "run", tmp_path / "other"
    flags = [*FLAGS["train"], "--save_strategy", "steps", "--save_steps", "1", "--max_steps", "3"]
    with Terminal("train", "--model_name_or_path", str(policy), "--output_dir", str(run), *flags) as terminal:
        terminal.read_until(" 1/3")
        limit(terminal.pid, 60_000)
        terminal.read_until("is not saved")
        terminal.read_until("type another folder")
        limit(terminal.pid, resource.RLIM_INFINITY)
        terminal.press(f"{other}{ENTER}")
        terminal.read_to_end()
        assert terminal.status() == 2
    assert (other / "model.safetensors").is_file()
    assert (other / SETTINGS_FILE).is_file()
    assert not (run / "model").exists()


def test_a_disk_that_is_full_for_a_log_ends_the_run_with_the_policy_saved(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*FLAGS["train"], "--max_steps", "50"]
    words = [sys.executable, "-m", "sqlenv", "train", "--model_name_or_path", str(policy), "--output_dir", str(run)]
    with subprocess.Popen(
        [*words, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as train:
        assert train.stdout is not None
        assert train.stderr is not None
        for line in train.stdout:
            if " 1/50" in line:
                break
        limit(train.pid, (run / "episodes.jsonl").stat().st_size)
        for line in train.stderr:
            if "next try in" in line:
                break
        limit(train.pid, resource.RLIM_INFINITY)
        _, said = train.communicate()
    assert train.returncode == 2
    assert "Traceback" not in said
    assert str(run / "model") in said.strip().splitlines()[-1]
    assert (run / "model" / "model.safetensors").is_file()
