"""GRPO for real: `sqlenv train` on a random policy and generated data, in one process, a few steps long.

TRL itself measures how far the sampled logprobs are from its own, so its metrics judge the whole chain: prompts,
engine, token rows, masks.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Qwen3ForCausalLM

from benchmarks.server_process import ROOT
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from sqlenv import cli
from tests.integration.service import metric, serving, until
from tests.integration.training import save_policy, surroundings_in
from trainer.eval.metrics import meaning
from trainer.eval.run_files import RunFolder
from trainer.rollout.timing import Phase
from trainer.tiny import BASE_CHECKPOINT

FLAGS = [
    *("--data", "synthetic", "--eval_episodes", "8", "--step_budget", "6", "--max_turn_length", "16"),
    *("--max_completion_length", "192", "--max_steps", "3", "--per_device_train_batch_size", "8"),
    *("--gradient_accumulation_steps", "1"),
    *("--num_generations", "4", "--learning_rate", "1e-3", "--lr_scheduler_type", "constant"),
    *("--vllm_importance_sampling_mode", "token_truncate", "--logging_steps", "1", "--report_to", "none"),
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false"),
    *("--seed", "3"),
]
NO_CHECKPOINTS = ("--save_strategy", "no")
STOPPING = "sqlenv train: stopping after this step; a second signal stops at once"
END_S = 240.0
"""Far beyond what the end of a run takes, also on a crowded machine."""

Run = Callable[..., RunFolder]


@pytest.fixture(scope="module", autouse=True)
def surroundings(generated_cache: Path) -> Iterator[None]:
    with surroundings_in(generated_cache):
        yield


@pytest.fixture(scope="module")
def dataset(surroundings: None) -> Dataset:
    return load_dataset("synthetic")


@pytest.fixture(scope="module")
def policy(
    dataset: Dataset, random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    texts = [question.text for question in dataset.questions]
    return save_policy(random_policy, texts, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def train(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run `sqlenv train` with the flags above and some more, in a new folder or the given one."""

    def run(*flags: str, folder: Path | None = None) -> RunFolder:
        target = folder or tmp_path_factory.mktemp("runs") / "run"
        command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(target), *FLAGS, *flags]
        assert cli.main(command) == 0
        return RunFolder.open(target)

    return run


@pytest.fixture(scope="module")
def whole(train: Run) -> RunFolder:
    """Three steps in one go."""
    return train(*NO_CHECKPOINTS, "--report_to", "tensorboard")


def token_exact(metrics: dict[str, float]) -> bool:
    return (
        metrics["sampling/sampling_logp_difference/max"] < 1e-4
        and metrics["sampling/importance_sampling_ratio/min"] > 1 - 1e-4
        and metrics["sampling/importance_sampling_ratio/max"] < 1 + 1e-4
    )


def weights_of(folder: RunFolder, name: str = "model.safetensors") -> str:
    return sha256((folder.path / "model" / name).read_bytes()).hexdigest()


def assert_the_same(folder: RunFolder, whole: RunFolder) -> None:
    """A run is the one that was left alone: its episodes, its weights and its evaluations, to the byte."""
    assert folder.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    assert weights_of(folder) == weights_of(whole)
    for evaluation in whole.evaluations():
        assert folder.evaluation_episodes(evaluation.label) == whole.evaluation_episodes(evaluation.label)


def comparable(folder: RunFolder) -> list[dict[str, Any]]:
    """What was measured in each step, times apart."""
    volatile = ("seconds", "time", "per_second", "runtime")
    rows = folder.metrics()
    return [{k: v for k, v in row.items() if not k.startswith("time/") and not k.endswith(volatile)} for row in rows]


def test_every_step_is_token_exact(whole: RunFolder) -> None:
    steps = whole.metrics()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(token_exact(row) for row in steps)
    assert max(row["rollout/truncated"] for row in steps) > 0, "rows that lost their oldest turns are among them"
    assert all(row["rollout/failed"] == 0 for row in steps)


def test_the_first_step_trains_under_a_rate_above_zero_while_the_rate_warms_up(train: Run, policy: Path) -> None:
    ramp = ("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "4")
    folder = train(*NO_CHECKPOINTS, *ramp, "--max_steps", "1", "--eval_episodes", "0")
    (row,) = folder.metrics()
    assert row["learning_rate"] == pytest.approx(1e-3 / 4)
    assert weights_of(folder) != sha256((policy / "model.safetensors").read_bytes()).hexdigest()


def test_every_step_says_where_its_time_went(whole: RunFolder) -> None:
    for row in whole.metrics():
        rollout, push, training, other = (row[f"time/{name}"] for name in ("rollout", "push", "training", "other"))
        assert min(rollout, training) > 0 <= min(push, other)
        assert sum(row[f"time/{part}"] for part in Phase) == pytest.approx(rollout)
        assert rollout + push + training >= row["step_time"], "TRL leaves the optimizer out"


def test_the_policy_learns_from_rewards_that_differ(whole: RunFolder, policy: Path) -> None:
    steps = whole.metrics()
    assert all(row["reward_std"] > 0 and row["grad_norm"] > 0 for row in steps)
    assert weights_of(whole) != sha256((policy / "model.safetensors").read_bytes()).hexdigest()
    assert Qwen3ForCausalLM.from_pretrained(whole.path / "model").num_parameters() > 0


def test_every_training_episode_is_kept(whole: RunFolder, dataset: Dataset) -> None:
    episodes = whole.episodes()
    assert Counter(row.step for row in episodes) == {1: 8, 2: 8, 3: 8}
    for start in range(0, 24, 4):
        assert len({row.record.question_id for row in episodes[start : start + 4]}) == 1, "a group is one question"
    assert len({row.record.episode_id for row in episodes}) == 24
    assert {row.record.db_id for row in episodes} <= {q.db_id for q in dataset.select(Split.TRAIN)}
    assert all(row.record.turns and row.record.outcome != "failed" for row in episodes)


def test_the_metrics_are_those_of_the_episodes(whole: RunFolder) -> None:
    for metrics in whole.metrics():
        played = [row.record for row in whole.episodes() if row.step == metrics["step"]]
        assert metrics["rollout/reward"] == pytest.approx(sum(r.reward for r in played) / 8, abs=1e-5)
        assert metrics["rollout/trained_tokens"] == sum(r.tokens for r in played)
        assert metrics["rewards/reward_correctness/mean"] == metrics["rollout/success_rate"]


def test_the_evaluations_before_and_after_and_of_the_scripted_players(whole: RunFolder, dataset: Dataset) -> None:
    evaluations = whole.evaluations()
    assert [e.label for e in evaluations] == ["random", "before", "after", "oracle"]
    assert all(e.summary.episodes == 8 and e.summary.databases == 8 for e in evaluations)
    assert evaluations[-1].summary.success_rate == 1.0
    unseen = {q.db_id for q in dataset.select(Split.EVAL)}
    played = [[r.question_id for r in whole.evaluation_episodes(e.label)] for e in evaluations]
    assert {r.db_id for e in evaluations for r in whole.evaluation_episodes(e.label)} <= unseen
    assert all(questions == played[0] for questions in played), "they can be compared in pairs"


def scalars(folder: RunFolder) -> dict[str, dict[int, float]]:
    """What TensorBoard would show: values by step and name."""
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_without_evaluations_on_the_way_trackers_see_both_ends(whole: RunFolder) -> None:
    before, after = (e.summary.success_rate for e in whole.evaluations() if e.label in ("before", "after"))
    assert scalars(whole)["eval/success_rate"] == pytest.approx({0: before, 3: after})


def test_the_run_explains_itself(whole: RunFolder, policy: Path) -> None:
    config = whole.config()
    assert config["sqlenv"]["eval_episodes"] == 8
    assert config["grpo"]["num_generations"] == 4
    assert config["model"]["model_name_or_path"] == str(policy)
    assert "<html" in whole.report_path.read_text(encoding="utf-8")


WAITS = """
import itertools, sys
from sqlenv import cli
from trainer.rollout.client import RolloutClient

play, rollouts = RolloutClient.play, itertools.count(1)

async def waiting(self, *args, **kwargs):
    if next(rollouts) == 3:
        sys.stdout.write("waits\\n")
        sys.stdout.flush()
        sys.stdin.readline()
    return await play(self, *args, **kwargs)

RolloutClient.play = waiting
sys.exit(cli.main(sys.argv[1:]))
"""
"""A run that waits for a line in its second step; its first rollout is the evaluation before training."""


def test_a_process_that_is_stopped_in_a_step_saves_it_and_goes_on_as_if_it_had_not_been(
    train: Run, whole: RunFolder, policy: Path, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-c", WAITS, "train", "--model_name_or_path", str(policy)]
    command += ["--output_dir", str(folder.path), *FLAGS, *NO_CHECKPOINTS]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert "waits\n" in iter(run.stdout.readline, "")
        run.send_signal(signal.SIGTERM)
        assert f"{STOPPING}\n" in iter(run.stderr.readline, "")
        said, errors = run.communicate("go on\n", timeout=END_S)
    assert run.returncode == 0, errors
    checkpoint = folder.path / "checkpoint-2"
    assert list(folder.path.glob("checkpoint-*")) == [checkpoint]
    stopped, go_on = said.splitlines()[-2:]
    assert stopped == f"stopped after step 2 of 3, which is saved in {checkpoint}; to resume:"
    assert shlex.split(go_on) == ["sqlenv", *command[3:], "--resume_from_checkpoint", "true"]
    assert [row["step"] for row in folder.metrics()] == [1, 2]
    assert [e.label for e in folder.evaluations()] == ["random", "before", "oracle"]
    assert not (folder.path / "model").exists()
    assert not folder.report_path.exists()

    train(*NO_CHECKPOINTS, "--resume_from_checkpoint", "true", folder=folder.path)
    assert_the_same(folder, whole)
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3]
    assert folder.report_path.exists()


def test_evaluations_on_the_way_are_kept_and_tracked_and_leave_training_alone(train: Run, whole: RunFolder) -> None:
    every_two = ("--eval_strategy", "steps", "--eval_steps", "2")
    best = ("--save_strategy", "best", "--load_best_model_at_end", "true")
    folder = train(*every_two, *best, "--report_to", "tensorboard")
    during = dict(folder.evaluations_during())
    assert list(during) == [2, 3], "every second step, and the last one"
    assert folder.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    assert folder.evaluation_episodes("before") == whole.evaluation_episodes("before")
    assert folder.evaluation_episodes("step-000003") == whole.evaluation_episodes("after"), "the weights are the same"
    rates = {step: evaluation.summary.success_rate for step, evaluation in during.items()}
    kept = max(rates, key=lambda step: (rates[step], -step))
    assert folder.evaluation_episodes("after") == folder.evaluation_episodes(f"step-{kept:06d}")
    checkpoint = folder.path / f"checkpoint-{kept}" / "model.safetensors"
    assert weights_of(folder) == sha256(checkpoint.read_bytes()).hexdigest()
    shown, rows = scalars(folder), {row["step"]: row for row in folder.metrics()}
    before = whole.evaluations()[1].summary.success_rate
    assert shown["eval/success_rate"] == pytest.approx({0: before, **rates})
    assert rates == {step: row["eval/success_rate"] for step, row in rows.items() if "eval/success_rate" in row}
    assert [name for row in rows.values() for name in row if name != "step" and not meaning(name)] == []
    for name in ("rollout/success_rate", "reward_std", "entropy", "completions/mean_length"):
        assert shown[f"train/{name}"] == pytest.approx({step: row[name] for step, row in rows.items()})


def test_an_adapter_trains_token_exactly(train: Run) -> None:
    lora = ("--use_peft", "true", "--lora_r", "4", "--lora_dropout", "0", "--lora_target_modules", "q_proj", "v_proj")
    folder = train(*NO_CHECKPOINTS, *lora, "--max_steps", "2")
    assert all(token_exact(row) and row["grad_norm"] > 0 for row in folder.metrics())
    adapter = json.loads((folder.path / "model" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (adapter["r"], sorted(adapter["target_modules"])) == (4, ["q_proj", "v_proj"])
    assert not (folder.path / "model" / "model.safetensors").exists()


def test_guided_starts_are_not_trained_and_a_run_that_resumes_gives_the_same_steps(train: Run, tmp_path: Path) -> None:
    flags = ("--model_name_or_path", str(BASE_CHECKPOINT), "--max_turn_length", "48", "--max_completion_length", "640")
    guided = ("--guided_starts", "true", "--difficulty", "medium", "--eval_episodes", "0", "--save_steps", "1")
    every_step = ("--save_strategy", "steps", "--save_total_limit", "9", "--num_generations", "8")
    # The last bits of the engine's logprobs depend on which episodes it decodes together, and so on the clock.
    uncorrected = ("--vllm_importance_sampling_correction", "false")
    rows = ("--per_device_train_batch_size", "32", "--learning_rate", "2e-4", *uncorrected, *every_step)
    whole = train(*flags, *guided, *rows)
    steps, episodes = whole.metrics(), [row.record for row in whole.episodes()]
    assert max(row["rollout/guided_share"] for row in steps) > 0
    for row in steps:
        unguided = [r for r in whole.episodes() if r.step == row["step"] and not r.record.given_steps]
        assert row["rollout/success_rate"] == sum(r.record.outcome == "correct" for r in unguided) / 32
    for record in episodes:
        assert all(turn["tokens"] == 0 for turn in record.turns[: record.given_steps]), "the policy did not write them"
        assert record.steps > record.given_steps

    folder = RunFolder(tmp_path / "run")
    shutil.copytree(whole.path, folder.path)
    for later in ("checkpoint-2", "checkpoint-3", "model"):
        shutil.rmtree(folder.path / later)
    train(*flags, *guided, *rows, "--resume_from_checkpoint", "true", folder=folder.path)
    assert_the_same(folder, whole)
    kept = "checkpoint-3/guided_starts.json"
    assert (folder.path / kept).read_bytes() == (whole.path / kept).read_bytes()


def test_a_run_on_servers_is_the_local_run_also_when_one_is_killed(
    train: Run, whole: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = RunFolder(tmp_path / "run")
    flags = (tmp_path, Path("synthetic"), "--step_budget", "6")
    with serving(*flags) as stays, serving(*flags) as dies:

        def kill_in_the_second_step() -> None:
            for path in (folder.config_path, folder.evaluations_path / "before.json", folder.episodes_path):
                until(path.exists)
            until(lambda: folder.episodes_path.stat().st_size > 0)
            taken = metric(dies, "sqlenv_steps_total")
            until(lambda: metric(dies, "sqlenv_steps_total") > taken)
            dies.stop(signal.SIGKILL)

        with ThreadPoolExecutor(1) as killer:
            killed = killer.submit(kill_in_the_second_step)
            env = ("--env", f"{stays.url},{dies.url}", "--env_token", "geheim")
            train(*NO_CHECKPOINTS, *env, folder=folder.path)
            killed.result()
    assert_the_same(folder, whole)
    assert comparable(folder) == comparable(whole)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "trainer.rollout.remote_environments"]
    assert f"127.0.0.1:{dies.port}" in said
    for file in filter(Path.is_file, folder.path.rglob("*")):
        assert b"geheim" not in file.read_bytes(), f"the token is in {file}"


def test_a_folder_that_holds_a_run_is_not_overwritten(
    whole: RunFolder, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(whole.path), *FLAGS]
    assert cli.main(command) == 2
    assert f"{whole.path} holds a policy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--model_name_or_path"),
        (("--model_name_or_path", "x", "--use_vllm", "true", "--vllm_mode", "colocate"), "--vllm_mode"),
        (("--model_name_or_path", "/no/such/policy"), "/no/such/policy"),
        (("--model_name_or_path", "x", "--max_completion_length", "0"), "--max_completion_length"),
        (("--model_name_or_path", "x", "--num_generations", "1"), "generations"),
        (("--config", "/no/such/config.yaml"), "/no/such/config.yaml"),
        (("--model_name_or_path", "x", "--resume_from_checkpoint", "true"), "no checkpoint to resume from"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(
    flags: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--output_dir", str(tmp_path / "run"), "--use_cpu", "true", "--bf16", "false", *flags)
    assert cli.main(["train", *flags]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_data_set_that_does_not_fill_one_step_is_refused(
    pets_file: Path, policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop").mkdir()
    shutil.copyfile(pets_file, tmp_path / "shop" / "pets.sqlite")
    question = {"question": "How many pets are there?", "sql": "SELECT COUNT(*) FROM pets", "database": "pets"}
    (tmp_path / "shop" / "questions.json").write_text(json.dumps([question]))
    command = ["train", *FLAGS, "--model_name_or_path", str(policy), "--data", str(tmp_path / "shop")]
    assert cli.main([*command, "--output_dir", str(tmp_path / "run")]) == 2
    assert "one step plays 2 questions, and the data set has 1 for training" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_named(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(tmp_path / "file" / "run"), *FLAGS]
    assert cli.main(command) == 2
    assert f"--output_dir {tmp_path / 'file' / 'run'}: Not a directory" in capsys.readouterr().err
