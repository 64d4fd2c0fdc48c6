"""Checkpoints: schedules, states that resume, and a disk that is full, for real: files of the process may not grow.

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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments

from benchmarks.server_process import ROOT
from env_server.data.loading import load_dataset
from sqlenv import cli
from tests.integration.training import save_policy, surroundings_in
from trainer.config import ConfigError
from trainer.policy import SETTINGS_FILE, PlaySettings, read_play
from trainer.training import checkpointing
from trainer.training.adaptive import AdaptiveWeights
from trainer.training.checkpointing import (
    CheckpointingTrainer,
    Saved,
    SaveError,
    SaveStates,
    checkpoints_at_once,
    policy_kept,
    require_room,
    save_patiently,
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
        save_patiently(fail, tmp_path)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Callable[[], object]]:
    """What is done in each pause between two tries."""
    pauses: list[Callable[[], object]] = []
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(checkpointing, "time", SimpleNamespace(sleep=lambda _: pauses.pop(0)()))
    return pauses


def test_the_policy_is_kept_until_there_is_room(
    slept: list[Callable[[], object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "model"
    with no_file_beyond(SMALL) as lift:
        slept += [lambda: None, lift]
        save_patiently(write_weights, folder)
    assert (folder / "model.safetensors").stat().st_size > 4 * SMALL
    assert [str(folder) in line for line in capsys.readouterr().err.splitlines()] == [True] * 2


def test_what_cannot_be_written_at_last_is_put_elsewhere_or_refused(
    slept: list[Callable[[], object]], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    slept += [lambda: None] * 40
    with pytest.raises(SaveError, match=str(file)) as saved:
        save_patiently(write_weights, file / "model")
    (other,) = (tmp_path / "tmp").iterdir()
    assert str(other) in str(saved.value)
    assert (other / "model.safetensors").is_file()
    with pytest.raises(SaveError, match=str(file)):
        save_patiently(write_weights, file / "model", movable=False)
    assert list((tmp_path / "tmp").iterdir()) == [other]


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
        load_dataset("synthetic")  # made before files are too large for the disk
        yield


@pytest.fixture
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path: Path) -> Path:
    """A policy whose generation settings transformers does not save."""
    folder = save_policy(random_policy, ["How many pets are there"], tmp_path / "policy")
    settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 3, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


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


def test_a_disk_that_is_full_costs_a_checkpoint_and_then_the_run_but_not_the_policy(
    policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = [*FLAGS["train"], *("--max_steps", "50", "--save_strategy", "steps", "--save_steps", "2")]
    words = [sys.executable, "-m", "sqlenv", "train", "--model_name_or_path", str(policy), "--output_dir", str(run)]
    with subprocess.Popen(
        [*words, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as train:
        assert train.stdout is not None
        assert train.stderr is not None
        for line in train.stdout:
            if " 1/50" in line:
                break
        limit(train.pid, 60_000)
        for line in train.stderr:
            if "is not saved" in line:
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
    assert (run / "model" / SETTINGS_FILE).is_file()
    assert not [*run.glob("checkpoint-*")]


def test_a_checkpoint_keeps_states_and_the_absence_of_one_is_an_error(tmp_path: Path) -> None:
    weights, folder = AdaptiveWeights((1.0, 0.3)), tmp_path / "checkpoint-1"
    weights.observe(0, [[(0.0, 0.0), (1.0, 0.3), (0.0, 0.2), (1.0, 0.3)]])
    folder.mkdir()
    args: Any = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=str(folder))
    control: Any = None

    def saved(stateful: Any, flags: str | None = "--reward_weighting adaptive") -> SaveStates:
        return SaveStates(PlaySettings(step_budget=6), [Saved(stateful, "state.json", flags)])

    for main in (False, True):
        assert not list(folder.iterdir())
        state: Any = SimpleNamespace(global_step=1, is_world_process_zero=main)
        saved(weights).on_save(args, state, control)
    assert read_play(folder / SETTINGS_FILE).settings.step_budget == 6
    resumed = AdaptiveWeights((1.0, 0.3))
    saved(resumed).on_train_begin(args, state, control)
    assert resumed.of(1) == weights.of(1) != (1.0, 0.3)
    assert resumed.state_dict() == weights.state_dict()
    (folder / "state.json").unlink()
    saved(resumed, None).on_train_begin(args, state, control)
    with pytest.raises(ConfigError, match=r"state.json is missing: .* without --reward_weighting adaptive"):
        saved(resumed).on_train_begin(args, state, control)


class Plain(CheckpointingTrainer, Trainer):  # type: ignore[misc]  # transformers carries no types
    """transformers' trainer, with what ours changes in the schedule."""


@pytest.mark.parametrize("name", ["constant_with_warmup", "linear", "cosine", "constant", "inverse_sqrt", "polynomial"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_schedules_first_step_has_a_rate_and_its_decay_is_transformers_own(name: str, warmup: int) -> None:
    """A ramp of n steps has the rates 1/n to n/n of the full one, where transformers' has 0/n to (n - 1)/n."""

    def rates(kind: type[Trainer]) -> list[float]:
        arguments = TrainingArguments("unused", use_cpu=True, bf16=False, lr_scheduler_type=name, warmup_steps=warmup)
        arguments.learning_rate = 1.0
        trainer = kind(nn.Linear(6, 3), arguments)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        scheduler, used = trainer.create_scheduler(10, optimizer), []
        for _ in range(10):
            used.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return used

    ours, theirs = rates(Plain), rates(Trainer)
    ramp = [1.0] * warmup if name == "constant" else [(step + 1) / warmup for step in range(warmup)]
    assert ours == pytest.approx([*ramp, *theirs[warmup:]])
    assert ours[0] > 0
