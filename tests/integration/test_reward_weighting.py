"""`sqlenv train --reward_weighting adaptive`, a few steps of the tiny policy long: logged, drawn, resumed exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from sqlenv import cli
from tests.integration.training import surroundings_in
from trainer.report.report import write_report
from trainer.results.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

FLAGS = [
    *("--model_name_or_path", str(BASE_CHECKPOINT), "--data", "synthetic", "--eval_episodes", "0"),
    *("--max_turn_length", "32", "--max_completion_length", "256", "--step_budget", "6", "--max_steps", "4"),
    *("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--num_generations", "4"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--torch_threads", "1"),
    *("--seed", "3", "--save_strategy", "steps", "--save_steps", "2", "--reward_weighting", "adaptive"),
]
NAMES = [f"reward_weights/{name}" for name in ("correctness", "progress", "operational", "format")]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


def weights_of(folder: RunFolder) -> list[list[float]]:
    """The weights of each step."""
    return [[row[name] for name in NAMES] for row in folder.metrics()]


def test_a_run_that_resumes_weighs_as_the_run_that_was_left_alone(tmp_path: Path) -> None:
    assert cli.main(["train", "--output_dir", str(tmp_path / "whole"), *FLAGS]) == 0
    whole = RunFolder.open(tmp_path / "whole")
    used = weights_of(whole)
    assert used[0] == [1.0, 0.2, 0.2, 0.1]
    assert len({tuple(weights) for weights in used}) == 4, "they follow the episodes"
    assert [weights[0] for weights in used] == [1.0] * 4
    for row, weights in zip(whole.metrics(), used, strict=True):
        names = (f"rewards/reward_{name.partition('/')[2]}/mean" for name in NAMES)
        total = sum(weight * row[name] for weight, name in zip(weights, names, strict=True))
        assert row["reward"] == pytest.approx(total, abs=1e-6), "TRL adds up with them"
    assert "weights of the rewards" in write_report(whole.path).read_text(encoding="utf-8")

    killed = shutil.copytree(whole.path, tmp_path / "killed")
    for left in ("checkpoint-4", "model"):
        shutil.rmtree(killed / left)
    resumed = ["train", "--output_dir", str(killed), *FLAGS, "--resume_from_checkpoint", "true"]
    assert cli.main(resumed) == 0
    again = RunFolder.open(killed)
    assert weights_of(again) == used
    assert again.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    digests = {sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest() for run in (whole.path, killed)}
    assert len(digests) == 1
    states = [json.loads((run / "checkpoint-4" / "reward_weights.json").read_text()) for run in (whole.path, killed)]
    assert states[0] == states[1]
