"""`sqlenv train` on two ranks: real processes, started by accelerate or forked, that meet over gloo.

TRL's own metrics judge the token rows, as they do for one process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

from benchmarks.server_process import ROOT
from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from env_server.settings import EnvSettings
from tests.fork_server import ForkServer
from tests.integration.test_training import FLAGS, NO_CHECKPOINTS, token_exact, weights_of
from tests.integration.training import save_policy
from trainer.chat.format import ChatFormat
from trainer.engines import in_process_engine
from trainer.eval.run_files import RunFolder
from trainer.evaluate import choose_questions, play_on
from trainer.models import load_policy
from trainer.rollout.client import RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import record
from trainer.rollout.timing import Phase
from trainer.rollout.transcript import TokenBudget

ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]
"""`--multi_gpu` is accelerate's word for several processes; without it, and without GPUs, it starts one."""
FORKED = [sys.executable, "-m", "tests.forked_ranks"]
COMMAND = str(ROOT / "sqlenv" / "__main__.py")
WORKER = str(Path(__file__).with_name("rank_worker.py"))
DEADLINE_S = 240.0
"""Far beyond what a run takes, also on a crowded machine, and far below the half hour of a collective."""


@dataclass(frozen=True)
class Ended:
    """How a launched run ended."""

    status: int
    said: str
    errors: str


Launch = Callable[..., Ended]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(random_policy, ["How many are there"], tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def launch(policy: Path, cache: Path, forks: ForkServer) -> Launch:
    """Launch `sqlenv train` on two ranks with the flags above and some more, from `script`."""

    def run(folder: Path, *flags: str, script: tuple[str, ...], launcher: Sequence[str] = FORKED) -> Ended:
        command = [*launcher, *script, "train", "--model_name_or_path", str(policy), "--output_dir", str(folder)]
        command += [*FLAGS, *flags]
        surroundings = {**os.environ, CACHE_VARIABLE: str(cache), "PYTHONPATH": str(ROOT)}
        if launcher is FORKED:
            ended = forks.run(command, environment=surroundings, folder=folder.parent, timeout=DEADLINE_S)
            return Ended(ended.returncode, ended.stdout, ended.stderr)
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder.parent,
            env=surroundings,
        ) as launched:
            try:
                said, errors = launched.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                launched.send_signal(signal.SIGTERM)  # it ends its ranks
                said, errors = launched.communicate(timeout=DEADLINE_S)
                pytest.fail(f"the run did not end:\n{said}\n{errors}")
        return Ended(launched.returncode, said, errors)

    return run


@pytest.fixture(scope="module")
def whole(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Ended]:
    """Three steps in one go, on a cache that holds nothing yet; each rank leaves the digest of its weights."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    ended = launch(folder, *NO_CHECKPOINTS, script=(WORKER, "watched", "all"))
    assert ended.status == 0, ended.errors
    return RunFolder.open(folder), ended


@pytest.fixture(scope="module")
def dataset(whole: object, cache: Path) -> Dataset:
    return load_dataset("synthetic", cache_dir=cache)


def test_every_row_has_a_completion_of_its_own_and_groups_are_whole(whole: tuple[RunFolder, Ended]) -> None:
    rows = whole[0].episodes()
    assert Counter(row.step for row in rows) == {1: 16, 2: 16, 3: 16}, "eight of each rank in each step"
    assert len({row.record.episode_id for row in rows}) == 48
    for start in range(0, 48, 4):
        assert len({row.record.question_id for row in rows[start : start + 4]}) == 1, "a group is one question"
    for start in range(0, 48, 16):
        assert len({row.record.question_id for row in rows[start : start + 16]}) == 4, "ranks play different ones"


def test_every_step_is_token_exact_on_both_ranks(whole: tuple[RunFolder, Ended]) -> None:
    steps = whole[0].metrics()
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(token_exact(row) and row["grad_norm"] > 0 for row in steps)


def test_the_metrics_are_those_of_all_ranks_episodes(whole: tuple[RunFolder, Ended]) -> None:
    folder, _ = whole
    for metrics in folder.metrics():
        played = [row.record for row in folder.episodes() if row.step == metrics["step"]]
        assert metrics["rollout/reward"] == pytest.approx(sum(r.reward for r in played) / 16, abs=1e-5)
        assert metrics["rollout/trained_tokens"] == sum(r.tokens for r in played)
        assert metrics["rewards/reward_correctness/mean"] == pytest.approx(metrics["rollout/success_rate"])


def test_the_times_of_a_step_add_up_also_where_ranks_wait_for_each_other(whole: tuple[RunFolder, Ended]) -> None:
    for row in whole[0].metrics():
        assert sum(row[f"time/{part}"] for part in Phase) == pytest.approx(row["time/rollout"])
        assert row["time/rollout"] >= row["rollout/seconds"] * 0.99, "the slowest rank is waited for"


def test_both_ranks_end_with_the_same_weights(whole: tuple[RunFolder, Ended]) -> None:
    digests = [path.read_text() for path in sorted(whole[0].path.parent.glob("rank-*"))]
    assert len(digests) == 2, "every rank takes part in saving"
    assert digests[0] == digests[1]


def test_the_evaluation_of_two_ranks_is_that_of_one(whole: tuple[RunFolder, Ended], dataset: Dataset) -> None:
    folder, _ = whole
    assert [e.label for e in folder.evaluations()] == ["random", "before", "after", "oracle"]
    questions = choose_questions(dataset, Split.EVAL, 8)
    model, tokenizer = load_policy(str(folder.path / "model"))
    settings = RolloutSettings(TokenBudget(192, model.config.max_position_embeddings, 16), temperature=0.0)
    environments = LocalEnvironments(dataset, EnvSettings(step_budget=6))
    chat = ChatFormat(tokenizer)
    engine = in_process_engine(model, tokenizer, chat, settings)
    episodes = play_on(engine, chat, environments, questions, settings, 3, lambda _: None)
    environments.close()
    assert folder.evaluation_episodes("after") == [record(e) for e in episodes]


def test_only_the_main_rank_speaks(whole: tuple[RunFolder, Ended]) -> None:
    said = whole[1].said.splitlines()
    assert len([line for line in said if line.startswith("step ")]) == 3
    assert len([line for line in said if line.startswith("evaluated ")]) == 4
    assert len([line for line in said if line.startswith("report ")]) == 1
    assert "Traceback" not in whole[1].errors
    assert whole[1].errors.count("Loading weights: 100%") == 1


def test_ranks_that_are_told_to_stop_in_a_step_save_it_and_go_on_as_if_they_had_not_been(
    launch: Launch, whole: tuple[RunFolder, Ended], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    flags = (*NO_CHECKPOINTS, "--eval_strategy", "steps", "--eval_steps", "2")
    stopped = launch(folder.path, *flags, script=(WORKER, "told", "0"), launcher=ACCELERATE)
    assert [(tmp_path / f"status-{rank}").read_text() for rank in (0, 1)] == ["0", "0"], stopped.errors
    assert stopped.said.count("stopped after step 2 of 3") == 1
    assert "sqlenv train: rank" not in stopped.errors
    assert folder.evaluations_during() == []
    for rank in (0, 1):
        assert (folder.path / "checkpoint-2" / f"rng_state_{rank}.pth").exists()

    resumed = launch(folder.path, *flags, "--resume_from_checkpoint", "true", script=(COMMAND,))
    assert resumed.status == 0, resumed.errors
    assert folder.episodes_path.read_bytes() == whole[0].episodes_path.read_bytes()
    assert weights_of(folder) == weights_of(whole[0])
    for label in ("before", "after"):
        assert folder.evaluation_episodes(label) == whole[0].evaluation_episodes(label)
    assert [step for step, _ in folder.evaluations_during()] == [2, 3]


def test_one_failed_episode_ends_no_run_and_a_rank_that_fails_ends_all_and_says_why_once(
    launch: Launch, tmp_path: Path
) -> None:
    ended = launch(tmp_path / "run", *NO_CHECKPOINTS, "--eval_episodes", "2", script=(WORKER, "bug", "0"))
    assert ended.status != 0
    assert ended.errors.count("ZeroDivisionError: this is a bug\nsqlenv train: rank 0 failed") == 1
    assert ended.errors.count("sqlenv train: rank") == 1, "the rank that this one takes down is silent"
    folder = RunFolder.open(tmp_path / "run")
    assert [row["rollout/failed"] for row in folder.metrics()] == [1.0]
    assert Counter(row.step for row in folder.episodes()) == {1: 16}
    assert {e.label: e.summary.failed for e in folder.evaluations()}["before"] == 1


def test_the_share_of_failed_episodes_is_that_of_all_ranks(launch: Launch, tmp_path: Path) -> None:
    ended = launch(tmp_path / "run", *NO_CHECKPOINTS, "--eval_episodes", "0", script=(WORKER, "flaky", "all"))
    assert ended.status != 0
    said = "2 of 16 episodes failed, more than the 10% that a run may lose"
    assert ended.errors.count(said) == 1, "what is wrong on every rank is said once"
    assert not (tmp_path / "run").exists(), "a run without a step is taken back"
