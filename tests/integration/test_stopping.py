"""SIGTERM and `sqlenv train`: real processes on the tiny policy, stopped in a step, around it, and on two ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from transformers import Qwen3ForCausalLM

import sqlenv
from benchmarks.server_process import ROOT
from env_server.data.loading import load_dataset
from tests.integration.service import until
from tests.integration.test_ranks import LAUNCHER
from tests.integration.test_training import FLAGS, NO_CHECKPOINTS, weights_of
from tests.integration.training import save_policy, surroundings_in
from trainer.results.run_files import RunFolder
from trainer.stopping import ECHO_S

END_S = 240.0
"""Far beyond what the end of a run takes, also on a crowded machine."""
STOPPING = "sqlenv train: stopping after this step; a second signal stops at once"
ALONE = (sys.executable, str(ROOT / "sqlenv.py"))

HANGS = """
import asyncio, sys
import sqlenv
from trainer.rollout.client import RolloutClient

async def play(self, requests, on_episode=None, **kwargs):
    print("waits", flush=True)
    await asyncio.Event().wait()

RolloutClient.play = play
sys.exit(sqlenv.main(sys.argv[1:]))
"""
"""A run whose first rollout never ends."""

EVALUATION_HANGS = """
import asyncio, itertools, sys
import sqlenv
from trainer.rollout.client import RolloutClient

play, evaluations = RolloutClient.play, itertools.count(1)

async def hanging(self, requests, on_episode=None, **more):
    if on_episode is not None and next(evaluations) == 2:
        print("waits", flush=True)
        await asyncio.Event().wait()
    return await play(self, requests, on_episode, **more)

RolloutClient.play = hanging
sys.exit(sqlenv.main(sys.argv[1:]))
"""
"""A run whose second evaluation never ends; the first one is that before training."""

LEAVES_STATUS = """
import os, sys
from pathlib import Path
import sqlenv

status = sqlenv.main(sys.argv[2:])
Path(sys.argv[1], "status-" + os.environ["RANK"]).write_text(str(status))
sys.exit(status)
"""


class Process:
    """A run in a process group of its own; `said` is all of its standard output, once it has ended."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._logs = [folder / "stdout", folder / "stderr"]
        with self._logs[0].open("w") as out, self._logs[1].open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._logs[0].read_text()

    @property
    def errors(self) -> str:
        return self._logs[1].read_text()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that the run brings about."""
        until(lambda: self.process.poll() is not None or holds())
        assert self.process.poll() is None, f"the run has ended:\n{self.said}\n{self.errors}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> int:
        """Wait for its end, and return its exit status."""
        return self.process.wait(END_S)


Start = Callable[..., AbstractContextManager[Process]]


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with surroundings_in(tmp_path_factory.mktemp("cache")):
        load_dataset("synthetic")  # into the cache, so that no wait is for it
        yield


@pytest.fixture(scope="module")
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(random_policy, ["How many are there"], tmp_path_factory.mktemp("policy"))


@pytest.fixture
def arguments(policy: Path, tmp_path: Path) -> list[str]:
    """`train`, into a folder named run."""
    return [
        "train",
        "--model_name_or_path",
        str(policy),
        "--output_dir",
        str(tmp_path / "run"),
        *FLAGS,
        *NO_CHECKPOINTS,
    ]


@pytest.fixture
def started(tmp_path: Path) -> Start:
    """Runs a command for a `with` block, after which nothing is left of it."""

    @contextmanager
    def start(*command: str) -> Iterator[Process]:
        folder = tmp_path / f"process-{len(list(tmp_path.glob('process-*')))}"
        folder.mkdir()
        run = Process(list(command), folder)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait()

    return start


def has_steps(folder: RunFolder) -> bool:
    return folder.metrics_path.exists() and folder.metrics_path.stat().st_size > 0


def test_a_run_that_is_stopped_in_a_step_saves_it_and_goes_on_as_if_it_had_not_been(
    started: Start, arguments: list[str], tmp_path: Path
) -> None:
    arguments += ["--max_steps", "6", "--eval_episodes", "4"]
    folder = RunFolder(tmp_path / "run")
    with started(*ALONE, *arguments) as run:
        run.wait_until(lambda: has_steps(folder))
        run.terminate()
        assert run.end() == 0, run.errors
    last = int(folder.metrics()[-1]["step"])
    assert 1 <= last < 6
    checkpoint = folder.path / f"checkpoint-{last}"
    assert list(folder.path.glob("checkpoint-*")) == [checkpoint]
    assert run.said.splitlines()[-1] == (
        f"stopped after step {last} of 6, which is saved in {checkpoint}; to go on, give the same command and "
        "output_dir with --resume_from_checkpoint true"
    )
    assert run.errors.splitlines().count(STOPPING) == 1
    assert [e.label for e in folder.evaluations()] == ["random", "before", "oracle"]
    assert not (folder.path / "model").exists()
    assert not folder.report_path.exists()

    assert sqlenv.main([*arguments, "--resume_from_checkpoint", "true"]) == 0
    assert sqlenv.main([*arguments, "--output_dir", str(tmp_path / "whole")]) == 0
    whole = RunFolder.open(tmp_path / "whole")
    assert [row["step"] for row in folder.metrics()] == [1, 2, 3, 4, 5, 6]
    assert folder.episodes_path.read_bytes() == whole.episodes_path.read_bytes()
    assert weights_of(folder) == weights_of(whole)
    for label in ("before", "after"):
        assert folder.evaluation_episodes(label) == whole.evaluation_episodes(label)
    assert folder.report_path.exists()


def test_a_run_that_is_stopped_in_an_evaluation_ends_at_once_and_says_what_there_is(
    started: Start, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments += ["--max_steps", "1", "--eval_episodes", "32"]
    folder = RunFolder(tmp_path / "run")
    with started(*ALONE, *arguments) as run:
        run.wait_until((folder.evaluations_path / "oracle.json").exists)
        run.terminate()
        assert run.end() == 0, run.errors
    assert run.said.splitlines()[-1] == "stopped before training began; start again with the same command"
    assert not folder.episodes()

    model = folder.path / "model"

    def stop_in_the_last_evaluation() -> None:
        until((model / "tokenizer_config.json").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that comes late must not end the tests
    with ThreadPoolExecutor(1) as stopper:
        stopped = stopper.submit(stop_in_the_last_evaluation)
        assert sqlenv.main(arguments) == 0
        stopped.result()
    signal.signal(signal.SIGTERM, earlier)
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"the policy is trained and saved in {model}, but not evaluated; to do so, run "
        f"sqlenv evaluate --policy {model} --data synthetic"
    )
    assert [e.label for e in folder.evaluations()] == ["random", "before", "oracle"]
    assert Qwen3ForCausalLM.from_pretrained(model).num_parameters() > 0


def test_a_run_that_is_stopped_in_an_evaluation_on_the_way_saves_its_step_and_begins_with_it_again(
    started: Start, arguments: list[str], tmp_path: Path
) -> None:
    arguments += ["--max_steps", "2", "--eval_episodes", "4", "--eval_strategy", "steps", "--eval_steps", "1"]
    arguments += ["--save_strategy", "best"]  # which has saved nothing when the run is told to stop
    folder = RunFolder(tmp_path / "run")
    with started(sys.executable, "-c", EVALUATION_HANGS, *arguments) as run:
        run.wait_until((folder.evaluations_path / "before.json").exists)
        run.wait_until(lambda: has_steps(folder))
        run.wait_until(lambda: "waits" in run.said)
        run.terminate()
        assert run.end() == 0, run.errors
    assert run.said.splitlines()[-1].startswith("stopped after step 1 of 2, which is saved in ")
    assert (folder.path / "checkpoint-1" / "trainer_state.json").exists()
    assert folder.evaluations_during() == []

    assert sqlenv.main([*arguments, "--resume_from_checkpoint", "true"]) == 0
    assert [step for step, _ in folder.evaluations_during()] == [1, 2]
    assert [row["step"] for row in folder.metrics() if "eval/success_rate" in row and "loss" in row] == [1, 2]
    assert folder.evaluation_episodes("after") == folder.evaluation_episodes("step-000002")


def test_a_second_signal_ends_a_step_at_once(started: Start, arguments: list[str]) -> None:
    with started(sys.executable, "-c", HANGS, *arguments, "--eval_episodes", "0") as run:
        run.wait_until(lambda: "waits" in run.said)
        run.terminate()
        run.wait_until(lambda: STOPPING in run.errors)
        second_at = time.monotonic() + ECHO_S
        run.wait_until(lambda: time.monotonic() > second_at)
        run.terminate()
        assert run.end() == 143
    assert run.errors.splitlines()[-2:] == [STOPPING, "sqlenv train: ended at once by a second SIGTERM"]


def test_ranks_stop_after_the_same_step(started: Start, arguments: list[str], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    program = tmp_path / "program.py"
    program.write_text(LEAVES_STATUS)
    arguments += ["--max_steps", "1000", "--eval_episodes", "0"]
    with started(*LAUNCHER, str(program), str(tmp_path), *arguments) as run:
        run.wait_until(lambda: has_steps(folder))
        run.terminate()
        run.end()
    assert [(tmp_path / f"status-{rank}").read_text() for rank in (0, 1)] == ["0", "0"], run.errors
    last = int(folder.metrics()[-1]["step"])
    assert run.said.count(f"stopped after step {last} of 1000") == 1
    assert (folder.path / f"checkpoint-{last}" / "trainer_state.json").exists()
    for rank in (0, 1):
        assert (folder.path / f"checkpoint-{last}" / f"rng_state_{rank}.pth").exists()
    assert "sqlenv train: rank" not in run.errors
