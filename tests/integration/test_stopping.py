"""SIGTERM, SIGINT and `sqlenv train` on the tiny policy: a run is told where the test says, and goes on from there.

That of a process of its own is in `test_training`, that of two ranks in `test_ranks`; each rule is in
`tests/trainer/test_signals.py`.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

import trainer.signals
from sqlenv import cli
from tests.integration.test_training import FLAGS, NO_CHECKPOINTS, STOPPING
from tests.integration.training import save_policy, surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.rollout.client import RolloutClient
from trainer.rollout.episodes import Episode
from trainer.signals import StopSignals

Tell = Callable[..., None]
PRESSED = "sqlenv train: stopping after this step; Ctrl-C again stops at once"


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with surroundings_in(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def policy(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(random_policy, ["How many are there"], tmp_path_factory.mktemp("policy"))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def train(policy: Path, folder: RunFolder) -> Callable[..., int]:
    """Run `sqlenv train` into the folder, and return its exit status."""

    def run(*flags: str) -> int:
        command = ["train", "--model_name_or_path", str(policy), "--output_dir", str(folder.path)]
        return cli.main([*command, *FLAGS, *NO_CHECKPOINTS, *flags])

    return run


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tell]:
    """Send the signals in a run's rollout of this number, which never ends by itself; evaluations are rollouts, too."""
    # A shell starts its background jobs with the one ignored; of the other, a late one must not end the tests.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}  # type: ignore[arg-type]

    def tell(rollout: int, *signals: int) -> None:
        play, numbers = RolloutClient.play, count(1)

        heard = threading.Event()
        on_signal = StopSignals._on_signal

        def hear(self: StopSignals, number: int, frame: FrameType | None) -> None:
            try:
                on_signal(self, number, frame)
            finally:
                heard.set()

        async def told(self: RolloutClient, *args: Any, **kwargs: Any) -> list[Episode]:
            if next(numbers) == rollout:
                for number in signals:
                    heard.clear()
                    os.kill(os.getpid(), number)
                    # The next one comes when this one has had its effect.
                    assert await asyncio.to_thread(heard.wait, 30)
                await asyncio.Event().wait()
            return await play(self, *args, **kwargs)

        monkeypatch.setattr(StopSignals, "_on_signal", hear)
        monkeypatch.setattr(RolloutClient, "play", told)

    yield tell
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_that_is_stopped_in_an_evaluation_before_or_after_training_ends_at_once_and_says_what_there_is(
    train: Callable[..., int], policy: Path, folder: RunFolder, tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max_steps", "1")
    tell(1, signal.SIGINT)
    assert train(*flags) == 130
    *_, stopped, again = capsys.readouterr().out.splitlines()
    assert stopped == "stopped before training began; to start again:"
    assert shlex.split(again)[:4] == ["sqlenv", "train", "--model_name_or_path", str(policy)]
    assert not folder.path.exists(), "the same command starts again"

    tell(3, signal.SIGTERM)
    assert train(*flags) == 0
    model = folder.path / "model"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"the policy is trained and saved in {model}, but not evaluated; to do so:",
        f"  sqlenv evaluate --policy {model} --data synthetic",
    ]
    assert [e.label for e in folder.evaluations()] == ["random", "before", "oracle"]
    assert Qwen3ForCausalLM.from_pretrained(model).num_parameters() > 0


def test_a_run_that_is_stopped_in_an_evaluation_on_the_way_saves_its_step_and_begins_with_it_again(
    train: Callable[..., int], folder: RunFolder, tell: Tell, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max_steps", "2", "--eval_episodes", "4", "--eval_strategy", "steps", "--eval_steps", "1"]
    flags += ["--save_strategy", "best"]  # which has saved nothing when the run is told to stop
    tell(3, signal.SIGINT)
    assert train(*flags) == 130
    *_, stopped, go_on = capsys.readouterr().out.splitlines()
    assert stopped.startswith("stopped after step 1 of 2, which is saved in ")
    assert (folder.path / "checkpoint-1" / "trainer_state.json").exists()
    assert folder.evaluations_during() == []

    assert cli.main(shlex.split(go_on)[1:]) == 0
    assert [step for step, _ in folder.evaluations_during()] == [1, 2]
    assert [row["step"] for row in folder.metrics() if "eval/success_rate" in row and "loss" in row] == [1, 2]
    assert folder.evaluation_episodes("after") == folder.evaluation_episodes("step-000002")


@pytest.mark.parametrize(
    ("signals", "status", "said"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 143, [STOPPING, "sqlenv train: ended at once by a second SIGTERM"]),
        ((signal.SIGINT, signal.SIGINT), 130, [PRESSED, "sqlenv train: ended at once by a second Ctrl-C"]),
    ],
)
def test_a_second_signal_ends_a_step_at_once_and_leaves_whole_files(
    train: Callable[..., int],
    folder: RunFolder,
    tell: Tell,
    signals: tuple[int, ...],
    status: int,
    said: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer.signals, "ECHO_S", 0.0)
    tell(2, *signals)
    assert train("--eval_episodes", "0") == status
    assert capfd.readouterr().err.splitlines()[-len(said) :] == said
    assert {row.step for row in folder.episodes()} == {1}
    assert not (folder.path / "model").exists()
