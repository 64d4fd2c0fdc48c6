"""What a run does about SIGTERM: the rules, the handler in this process, and two real ranks that agree."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState, TrainingArguments

import trainer.stopping
from tests.clock import Clock
from tests.trainer.test_ranks import run_on_two
from trainer.ranks import Ranks
from trainer.stopping import ECHO_S, TERMINATED, Reaction, Stage, StopAfterStep, Stopping, StopRequest

PATIENT = (Stage.STARTING, Stage.TRAINING, Stage.CONCLUDING)
AT_ONCE = (Stage.BEFORE, Stage.TRAINED)
LATER = 2 * ECHO_S

STEPS = """
import signal, sys
from pathlib import Path
from transformers import TrainerControl, TrainerState, TrainingArguments
from trainer.ranks import Ranks
from trainer.stopping import StopAfterStep, Stopping

folder = Path(sys.argv[1])
arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, bf16=False)
ranks = Ranks.of(arguments)
for told_at in (3, 5):
    with Stopping("steps") as stopping:
        stopping.begin_training(ranks)
        callback, control = StopAfterStep(stopping), TrainerControl()
        for step in range(1, 6):
            if ranks.index == 1 and step == told_at:
                signal.raise_signal(signal.SIGTERM)
            callback.on_step_end(arguments, TrainerState(global_step=step, max_steps=5), control)
            if control.should_training_stop:
                break
        stopped = stopping.stopped_after or stopping.end_training(folder / "model", "synthetic")
        with (folder / f"rank-{ranks.index}").open("a") as file:
            file.write(f"{step} {stopped} {stopping.status} ")
ranks.part()
"""
"""Two runs of five steps; the second rank alone is told to stop, in the third step and in the last."""


@pytest.mark.parametrize("stage", PATIENT)
def test_where_work_can_be_left_a_first_signal_lets_it_be_finished(stage: Stage) -> None:
    request = StopRequest(stage)
    assert request.signalled(5.0) is Reaction.FINISH
    assert (request.asked, request.ending, request.status) == (True, False, 0)


@pytest.mark.parametrize("stage", AT_ONCE)
def test_elsewhere_a_first_signal_ends_the_run_with_success(stage: Stage) -> None:
    request = StopRequest(stage)
    assert request.signalled(5.0) is Reaction.END
    assert (request.asked, request.ending, request.status) == (True, True, 0)


@pytest.mark.parametrize("stage", Stage)
def test_a_second_signal_ends_the_run_anywhere(stage: Stage) -> None:
    request = StopRequest(stage)
    request.signalled(5.0)
    assert request.signalled(5.0 + ECHO_S) is Reaction.END
    assert (request.ending, request.status) == (True, TERMINATED)


@given(st.sampled_from(Stage), st.lists(st.floats(0, 0.999 * ECHO_S)))
def test_echoes_change_nothing(stage: Stage, after: list[float]) -> None:
    request, once = StopRequest(stage), StopRequest(stage)
    request.signalled(5.0)
    once.signalled(5.0)
    assert {request.signalled(5.0 + delay) for delay in after} <= {Reaction.NONE}
    assert request == once
    assert request.signalled(5.0 + LATER) is once.signalled(5.0 + LATER) is Reaction.END
    assert request.signalled(5.0 + LATER) is Reaction.NONE, "a second signal has echoes, too"


def test_a_rank_that_knows_from_another_takes_its_own_first_signal_as_the_same() -> None:
    request = StopRequest(Stage.TRAINING, asked=True)
    assert request.signalled(5.0) is Reaction.NONE
    assert request.signalled(5.0 + LATER) is Reaction.END
    assert request.status == TERMINATED


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("alone", [True, False])
def test_only_an_end_at_once_explains_an_interrupt(stage: Stage, alone: bool) -> None:
    asked = StopRequest(stage, asked=True)
    assert not asked.explains(KeyboardInterrupt(), alone)
    assert not asked.explains(None, alone)
    asked.ending = True
    assert asked.explains(KeyboardInterrupt(), alone)
    assert not asked.explains(RuntimeError("a bug"), alone), "this rank had no signal, or is alone"


@pytest.mark.parametrize("stage", Stage)
def test_a_failure_is_explained_by_peers_that_ended_but_never_in_a_step(stage: Stage) -> None:
    request = StopRequest(stage)
    request.signalled(5.0)
    lost = RuntimeError("connection closed by peer")
    assert not request.explains(lost, alone=True)
    assert request.explains(lost, alone=False) == (stage not in (Stage.TRAINING, Stage.CONCLUDING))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer.stopping, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def before() -> Iterator[list[int]]:
    """A handler of SIGTERM that was there before, and what it got."""
    got: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, earlier)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["", "SIGINT is ignored"])
def interrupts(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """With and without a handler of SIGINT, which a shell's background processes lack; no task is left undone."""
    earlier = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, earlier)
    gc.collect()  # asyncio complains of a task when it is freed
    assert not caplog.messages


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def end_of_step(stopping: Stopping, step: int, steps: int = 10) -> TrainerControl:
    control = TrainerControl()
    arguments = TrainingArguments(output_dir="runs/x", use_cpu=True, bf16=False)
    StopAfterStep(stopping).on_step_end(arguments, TrainerState(global_step=step, max_steps=steps), control)
    return control


def wishes(control: TrainerControl) -> set[bool]:
    return {control.should_save, control.should_training_stop, control.should_log}


def test_a_run_that_is_not_stopped_says_nothing(before: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping("sqlenv train") as stopping:
        stopping.begin_training(Ranks())
        assert wishes(end_of_step(stopping, 1)) == {False}
        assert not stopping.end_training(Path("model"), "synthetic")
        stopping.conclude()
    terminate()
    assert before == [signal.SIGTERM], "the handler is the one that was there"
    assert (stopping.status, stopping.in_vain, stopping.stopped_after) == (0, False, None)
    assert capfd.readouterr() == ("", "")


def test_a_step_is_finished_and_saved(clock: Clock, before: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping("sqlenv train") as stopping:
        stopping.begin_training(Ranks())
        terminate()
        terminate()
        assert capfd.readouterr().err == "sqlenv train: stopping after this step; a second signal stops at once\n"
        assert wishes(end_of_step(stopping, 3)) == {True}
    assert (stopping.status, stopping.in_vain, stopping.stopped_after) == (0, False, 3)
    assert capfd.readouterr().out == (
        "stopped after step 3 of 10, which is saved in runs/x/checkpoint-3; to go on, give the same command and "
        "output_dir with --resume_from_checkpoint true\n"
    )
    terminate()
    assert not before, "an echo is nobody's"
    clock.now += LATER
    terminate()
    assert before == [signal.SIGTERM]


def test_after_the_last_step_the_model_is_saved_instead(capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping("sqlenv train") as stopping:
        stopping.begin_training(Ranks())
        terminate()
        assert wishes(end_of_step(stopping, 10)) == {False}
        assert stopping.stopped_after is None
        assert stopping.end_training(Path("runs/x/model"), "spider:here")
    assert stopping.status == 0
    assert capfd.readouterr().out == (
        "the policy is trained and saved in runs/x/model, but not evaluated; to do so, run "
        "sqlenv evaluate --policy runs/x/model --data spider:here\n"
    )


def test_a_run_that_only_concludes_is_finished_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    with Stopping("sqlenv train") as stopping:
        stopping.begin_training(Ranks())
        assert not stopping.end_training(Path("model"), "synthetic")
        stopping.conclude()
        terminate()
    assert stopping.status == 0
    assert capfd.readouterr() == ("", "")


def prepared(stopping: Stopping) -> None:
    pass


def trained(stopping: Stopping) -> None:
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
        (prepared, "stopped before training began; start again with the same command\n"),
        (trained, "the policy is trained and saved in m, but not evaluated; to do so, run sqlenv evaluate "
         "--policy m --data d\n"),
    ],
)  # fmt: skip
def test_elsewhere_all_is_closed_at_once(
    interrupts: None, prepare: Callable[[Stopping], None], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []
    with Stopping("sqlenv train") as stopping:
        prepare(stopping)
        with asyncio.Runner() as runner:
            runner.run(wait_forever(terminate, closed))
        pytest.fail("the run went on")
    assert closed == ["task"]
    assert (stopping.status, stopping.in_vain) == (0, prepare is prepared)
    assert capfd.readouterr().out == words


def test_a_second_signal_closes_all_in_a_step_too(
    interrupts: None, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    closed: list[str] = []

    def twice() -> None:
        terminate()
        clock.now += LATER
        terminate()

    with Stopping("sqlenv train") as stopping:
        stopping.begin_training(Ranks())
        with asyncio.Runner() as runner:
            runner.run(wait_forever(twice, closed))
        pytest.fail("the run went on")
    assert closed == ["task"]
    assert stopping.status == 143
    said = capfd.readouterr()
    assert (said.out, said.err.splitlines()[-1]) == ("", "sqlenv train: ended at once by a second SIGTERM")


def test_a_second_signal_ends_what_does_not_react_to_the_first(interrupts: None, clock: Clock) -> None:
    cancelled: list[str] = []

    async def shrug() -> None:
        terminate()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        cancelled.append("by the first")
        clock.now += LATER
        terminate()
        await asyncio.Event().wait()

    with Stopping("sqlenv train") as stopping:
        with asyncio.Runner() as runner:
            runner.run(shrug())
        pytest.fail("the run went on")
    assert cancelled == ["by the first"]
    assert stopping.status == 143


def test_an_interrupt_and_an_error_are_none_of_its_business(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> None:
        with Stopping("sqlenv train") as stopping:
            stopping.begin_training(Ranks())
            terminate()
            raise error

    for error in (KeyboardInterrupt(), RuntimeError("a bug")):
        with pytest.raises(type(error)):
            fail(error)
    assert capfd.readouterr().out == ""


def test_outside_the_main_thread_nothing_is_changed(before: list[int]) -> None:
    handlers: list[Any] = []

    def run() -> None:
        with Stopping("sqlenv train"):
            handlers.append(signal.getsignal(signal.SIGTERM))

    mine = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [mine]


def test_ranks_stop_together_when_one_is_told(tmp_path: Path) -> None:
    done = run_on_two(tmp_path, STEPS)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["3 3 0 5 True 0 "] * 2
    said = done.stdout.splitlines()
    assert [line.partition(",")[0] for line in said] == [
        "stopped after step 3 of 5",
        f"the policy is trained and saved in {tmp_path / 'model'}",
    ]
