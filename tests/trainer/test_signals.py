"""What a run does about SIGTERM and Ctrl-C: the rules, and the handlers in this process.

Real ranks agree in `test_ranks`.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

import trainer.signals
from tests.clock import Clock
from trainer.next_command import NextCommand
from trainer.ranks import Ranks
from trainer.signals import ECHO_S, NAMES, Stage, StopAfterStep, StopSignals

LATER = 2 * ECHO_S
NEXT = NextCommand(resume_command="knock twice", restart_command="knock once")
PATIENT = (Stage.STARTING, Stage.TRAINING, Stage.CONCLUDING)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer.signals, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def before() -> Iterator[list[int]]:
    """Handlers of the signals that were there before, and what they got."""
    got: list[int] = []
    earlier = {number: signal.signal(number, lambda number, _: got.append(number)) for number in NAMES}
    yield got
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.fixture
def no_task_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    gc.collect()  # asyncio complains of a task when it is freed
    assert not caplog.messages


def terminate(number: int = signal.SIGTERM) -> None:
    signal.raise_signal(number)


def end_of_step(stopping: StopSignals, step: int, steps: int = 10) -> TrainerControl:
    control = TrainerControl()
    arguments = TrainingArguments(output_dir="runs/x", use_cpu=True, bf16=False)
    StopAfterStep(stopping).on_step_end(arguments, TrainerState(global_step=step, max_steps=steps), control)
    return control


def wishes(control: TrainerControl) -> set[bool]:
    return {control.should_save, control.should_training_stop, control.should_log}


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("stage", Stage)
def test_a_first_signal_lets_work_be_finished_where_it_can_be_left_and_ends_all_elsewhere(
    clock: Clock, stage: Stage, first: int
) -> None:
    finished = False
    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping._stage = stage
        terminate(first)
        clock.now += 0.9 * ECHO_S
        terminate(signal.SIGTERM)  # an echo
        finished = True
    assert finished is (stage in PATIENT)
    cut_short = stage is not Stage.CONCLUDING
    assert (stopping.status, stopping.cut_short) == (130 if cut_short and first == signal.SIGINT else 0, cut_short)


@pytest.mark.parametrize(("second", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("stage", PATIENT)
def test_a_second_signal_ends_the_run_anywhere(
    clock: Clock, stage: Stage, second: int, status: int, known: bool
) -> None:
    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping._stage = stage
        if known:
            stopping._requested = signal.SIGTERM  # as another rank says: this one's own first signal is the same
        terminate(signal.SIGTERM)
        clock.now += LATER
        terminate(second)
        pytest.fail("the run went on")
    assert stopping.status == status


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("alone", [True, False])
def test_a_failure_is_explained_by_peers_that_ended_but_never_in_a_step(stage: Stage, alone: bool) -> None:
    stopping = StopSignals("sqlenv train", NEXT)
    stopping._stage, stopping._alone = stage, alone
    lost = RuntimeError("connection closed by peer")
    assert not stopping._explains(lost), "there was no signal"
    stopping._heard_at = 5.0
    assert stopping._explains(lost) == (not alone and stage not in (Stage.TRAINING, Stage.CONCLUDING))
    assert not stopping._explains(KeyboardInterrupt()), "it did not end the run"


def test_a_run_that_is_not_stopped_says_nothing(before: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping.begin_training(Ranks())
        assert wishes(end_of_step(stopping, 1)) == {False}
        assert not stopping.end_training(Path("model"), "synthetic")
        stopping.conclude()
    terminate()
    assert before == [signal.SIGTERM], "the handler is the one that was there"
    assert (stopping.status, stopping.stopped_after) == (0, None)
    assert not stopping.cut_short
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("concluding", "cut_short"), [(False, True), (True, False)])
def test_what_was_cut_short_says_how_to_start_again(
    concluding: bool, cut_short: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignals("sqlenv train", NEXT, "the second part") as stopping:
        if concluding:
            stopping.conclude()
        terminate()
    assert stopping.cut_short is cut_short
    said = "the second part: stopped before training began; to start again:\n  knock once\n"
    assert capfd.readouterr().out == (said if cut_short else "")


def test_a_step_is_finished_and_saved(clock: Clock, before: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping.begin_training(Ranks())
        terminate()
        terminate()
        assert capfd.readouterr().err == "sqlenv train: stopping after this step; a second signal stops at once\n"
        assert wishes(end_of_step(stopping, 3)) == {True}
    assert (stopping.status, stopping.stopped_after) == (0, 3)
    assert capfd.readouterr().out == (
        "stopped after step 3 of 10, which is saved in runs/x/checkpoint-3; to resume:\n  knock twice\n"
    )
    terminate()
    assert not before, "an echo is nobody's"
    clock.now += LATER
    terminate()
    assert before == [signal.SIGTERM]


def test_after_the_last_step_the_model_is_saved_instead(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping.begin_training(Ranks())
        terminate()
        assert wishes(end_of_step(stopping, 10)) == {False}
        assert stopping.stopped_after is None
        assert stopping.end_training(Path("runs/x/model"), "spider:here")
    assert stopping.status == 0
    assert capfd.readouterr().out == (
        "the policy is trained and saved in runs/x/model, but not evaluated; to do so:\n"
        "  sqlenv evaluate --policy runs/x/model --data spider:here\n"
    )


def prepared(stopping: StopSignals) -> None:
    pass


def trained(stopping: StopSignals) -> None:
    stopping.begin_training(Ranks())
    stopping.end_training(Path("m"), "d")


async def wait_forever(begun: Callable[[], None], closed: list[str]) -> None:
    async def wait() -> None:
        begun()
        await asyncio.Event().wait()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait())
    finally:
        closed.append("task")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (prepared, "stopped before training began; to start again:\n  knock once\n"),
        (trained, "the policy is trained and saved in m, but not evaluated; to do so:\n"
         "  sqlenv evaluate --policy m --data d\n"),
    ],
)  # fmt: skip
def test_elsewhere_all_is_closed_at_once(
    no_task_is_left: None, prepare: Callable[[StopSignals], None], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    with StopSignals("sqlenv train", NEXT) as stopping:
        prepare(stopping)
        with asyncio.Runner() as runner:
            runner.run(wait_forever(terminate, closed))
        pytest.fail("the run went on")
    assert closed == ["task"]
    assert stopping.status == 0
    assert capfd.readouterr().out == words


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_closes_all_in_a_step_too(
    no_task_is_left: None, clock: Clock, capfd: pytest.CaptureFixture[str], number: signal.Signals, status: int
) -> None:
    closed: list[str] = []

    def twice() -> None:
        terminate(number)
        clock.now += LATER
        terminate(number)

    with StopSignals("sqlenv train", NEXT) as stopping:
        stopping.begin_training(Ranks())
        with asyncio.Runner() as runner:
            runner.run(wait_forever(twice, closed))
        pytest.fail("the run went on")
    assert closed == ["task"]
    assert stopping.status == status
    said = capfd.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", f"sqlenv train: ended at once by a second {NAMES[number]}")


def test_a_background_job_of_a_shell_is_not_stopped_by_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals("sqlenv train", NEXT) as stopping:
        terminate(signal.SIGINT)
    assert (stopping.status, stopping.cut_short) == (0, False)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_outside_the_main_thread_nothing_is_changed(before: list[int]) -> None:
    handlers: list[Any] = []

    def run() -> None:
        with StopSignals("sqlenv train", NEXT):
            handlers.append(signal.getsignal(signal.SIGTERM))

    mine = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [mine]
