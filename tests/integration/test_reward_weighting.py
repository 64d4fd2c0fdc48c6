"""What rewards weigh in a few steps of `sqlenv train`: adaptive weights, and what correctness decides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from statistics import fmean

import pytest

from env_server.settings import RewardSettings
from sqlenv import cli
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.report.report import write_report
from trainer.rollout.episodes import EpisodeRecord
from trainer.tiny import BASE_CHECKPOINT

FLAGS = [
    *("--model_name_or_path", str(BASE_CHECKPOINT), "--data", "synthetic", "--eval_episodes", "0"),
    *("--max_turn_length", "32", "--max_completion_length", "256", "--step_budget", "6", "--max_steps", "4"),
    *("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--num_generations", "4"),
    *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--logging_steps", "1", "--report_to", "none"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--seed", "3", "--save_strategy", "steps", "--save_steps", "2", "--reward_weighting", "adaptive"),
]
NAMES = [f"reward_weights/{name}" for name in ("correctness", "progress", "operational", "format", "brevity")]
BREVITY = "def brevity(episode):\n    return [1 / 6 - 0.01 * turn for turn, _ in enumerate(episode.turns)]\n"


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


def weights_of(folder: RunFolder) -> list[list[float]]:
    """The weights of each step."""
    return [[row[name] for name in NAMES] for row in folder.metrics()]


def test_a_run_that_resumes_weighs_as_the_run_that_was_left_alone(tmp_path: Path) -> None:
    """With a function of one's own among the rewards."""
    (tmp_path / "my.py").write_text(BREVITY, encoding="utf-8")
    flags = [*FLAGS, "--reward_functions", f"{tmp_path}/my.py:brevity", "--advantages", "turn"]
    assert cli.main(["train", "--output_dir", str(tmp_path / "whole"), *flags]) == 0
    whole = RunFolder.open(tmp_path / "whole")
    used = weights_of(whole)
    assert used[0] == [1.0, 0.2, 0.2, 0.1, 0.1]
    assert len({tuple(weights) for weights in used}) == 4, "they follow the episodes"
    assert [weights[0] for weights in used] == [1.0] * 4
    for row, weights in zip(whole.metrics(), used, strict=True):
        names = (f"rewards/reward_{name.partition('/')[2]}/mean" for name in NAMES)
        total = sum(weight * row[name] for weight, name in zip(weights, names, strict=True))
        assert row["reward"] == pytest.approx(total, abs=1e-6), "TRL adds up with them"
    report = write_report(whole.path).read_text(encoding="utf-8")
    assert "reward_weights/brevity" in report
    assert "reward_brevity" in report

    killed = shutil.copytree(whole.path, tmp_path / "killed")
    for left in ("checkpoint-4", "model"):
        shutil.rmtree(killed / left)
    resumed = ["train", "--output_dir", str(killed), *flags, "--resume_from_checkpoint", "true"]
    assert cli.main(resumed) == 0
    again = RunFolder.open(killed)
    assert weights_of(again) == used
    assert again.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    digests = {sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest() for run in (whole.path, killed)}
    assert len(digests) == 1
    states = [json.loads((run / "checkpoint-4" / "reward_weights.json").read_text()) for run in (whole.path, killed)]
    assert states[0] == states[1]


def trained_reward(record: EpisodeRecord) -> float:
    """An episode's reward under the default weights, from what a run keeps of it."""
    progress = sum(turn["reward"]["progress"] for turn in record.turns) / RewardSettings().progress_scale
    operational = sum(turn["reward"]["operational"] for turn in record.turns)
    return float((record.outcome == "correct") + 0.2 * progress + 0.2 * operational + 0.1 * record.parse_rate)


def test_the_share_of_the_gradient_that_correctness_decides_is_logged_and_larger_without_group_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS[: FLAGS.index("--save_strategy")], "--save_strategy", "no", "--max_steps", "1"]
    flags += ["--per_device_train_batch_size", "48", "--reward_weights", "1", "0.2", "0.2", "0.1"]

    def share(name: str, *more: str) -> float:
        assert cli.main(["train", "--output_dir", str(tmp_path / name), *flags, *more]) == 0
        (row,) = RunFolder.open(tmp_path / name).metrics()
        return float(row["gradient_share/correctness"])

    by_default = share("default")
    assert f"({by_default:.0%} correctness)" in capsys.readouterr().out
    scaled = share("group", "--scale_rewards", "group")
    assert share("alone", "--reward_weights", "1", "0", "0", "0") == pytest.approx(1), "where all else weighs nothing"

    decided = total = 0.0
    run = RunFolder.open(tmp_path / "default")
    records = [each.record for each in run.episodes()]
    for group in (records[first : first + 4] for first in range(0, len(records), 4)):
        rewards = [trained_reward(record) for record in group]
        weight = sum(
            abs(reward - fmean(rewards)) * record.tokens for reward, record in zip(rewards, group, strict=True)
        )
        total += weight
        decided += weight * (len({record.outcome == "correct" for record in group}) == 2)
    assert by_default == pytest.approx(decided / total, abs=1e-4), "a batch's scale is the same for all of its groups"
    assert 0 < scaled < by_default < 1
    assert "gradient_share/correctness" in write_report(run.path).read_text(encoding="utf-8")
