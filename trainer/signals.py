"""How `sqlenv train` and `warmup` end when they are asked to: by SIGTERM or by Ctrl-C (SIGINT).

Promises:

1. While it trains, the running step ends, a checkpoint is saved whatever `save_strategy` says, and training stops. A
   run that has made its last step saves its model instead; one that has only the report to write, writes it. What is
   `skippable` between two steps, an evaluation, is left at once.
2. At any other time all is closed at once.
3. Either way it is said what there is, and the command that goes on. The exit status is 0 after SIGTERM, which a
   machine sends, and 130 after Ctrl-C, so that a script goes no further.
4. A second signal closes all at once, whatever is done, and the exit status is that of the signal, 143 or 130. What
   follows within ECHO_S is the same signal, and is ignored: clusters tell every process of a job, a terminal too, and
   launchers pass on what they are told.
5. On several ranks all stop after the same step, also when one alone was asked.
6. After the block signals do what they did before, echoes apart, and nothing changes outside the main thread.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainer.next_command import NextCommand
from trainer.ranks import Ranks

ECHO_S = 1.0
"""How long a signal's copies may take to arrive."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
STATUS = {number: 128 + number for number in SIGNALS}
"""The exit status that a shell gives a process which a signal has ended."""
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


def half_trained(step: int, steps: int, checkpoint: Path, go_on: str) -> str:
    """Say what a run has that has stopped between two steps."""
    return f"stopped after step {step} of {steps}, which is saved in {checkpoint}; to go on:\n  {go_on}"


def trained(model: Path, data: str) -> str:
    """Say what a run has that has stopped before or in its last evaluation."""
    command = shlex.join(["sqlenv", "evaluate", "--policy", str(model), "--data", data])
    return f"the policy is trained and saved in {model}, but not evaluated; to do so:\n  {command}"


class Stage(Enum):
    """How far a run is, as far as stopping goes."""

    BEFORE = auto()
    STARTING = auto()
    """The ranks agree that training begins."""
    TRAINING = auto()
    """Steps, and the saving of the model."""
    TRAINED = auto()
    CONCLUDING = auto()


_PATIENT = (Stage.STARTING, Stage.TRAINING, Stage.CONCLUDING)
"""Where a signal lets the work go on up to where it can be left."""


class Reaction(Enum):
    """What to do about a signal."""

    NONE = auto()
    FINISH = auto()
    """What is being done, and stop then."""
    END = auto()
    """At once."""


@dataclass(slots=True)
class StopRequest:
    """What a run was asked so far, and what follows from it. No clock, no signals: it is told of both."""

    stage: Stage = Stage.BEFORE
    asked: bool = False
    """To stop, here or at another rank."""
    ending: bool = False
    """All is being closed at once."""
    interrupted: bool = False
    """The signal that asked first was Ctrl-C."""
    forced_by: int = 0
    """The signal that did not let the work be finished."""
    heard_at: float | None = None
    """When this process got its last signal that was no echo."""

    @property
    def status(self) -> int:
        """The exit status: of a run that came to its end, or was stopped."""
        if self.forced_by:
            return STATUS[signal.Signals(self.forced_by)]
        cut_short = self.asked and self.stage is not Stage.CONCLUDING
        return STATUS[signal.SIGINT] if cut_short and self.interrupted else 0

    def signalled(self, now: float, number: int = signal.SIGTERM) -> Reaction:
        """Take a signal that came at `now`, in seconds."""
        if self.is_echo(now):
            return Reaction.NONE
        first, self.heard_at = self.heard_at is None, now
        known, self.asked = self.asked, True
        self.interrupted = self.interrupted if known else number == signal.SIGINT
        if first and known:
            return Reaction.NONE
        if first and self.stage in _PATIENT:
            return Reaction.FINISH
        self.ending = True
        self.forced_by = 0 if first else number
        return Reaction.END

    def is_echo(self, now: float) -> bool:
        """Whether a signal that comes at `now` is one that was heard before."""
        return self.heard_at is not None and now - self.heard_at < ECHO_S

    def explains(self, error: BaseException | None, alone: bool) -> bool:
        """Whether what came out of the run is how it ends at once."""
        if self.ending and isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return True
        # Ranks that were asked, too, may have ended while this one went to meet them. But a training step that fails
        # is never kept quiet.
        in_between = self.stage in (Stage.BEFORE, Stage.STARTING, Stage.TRAINED)
        return self.heard_at is not None and in_between and not alone and isinstance(error, Exception)


class StopSignals:
    """Listens to SIGTERM and Ctrl-C in its `with` block, and says at the block's end that the run was stopped.

    An end at once leaves the block as KeyboardInterrupt or CancelledError, and goes no further. On several ranks the
    process ends there; see `ranks.abort_together`.
    """

    def __init__(self, command: str, after: NextCommand, part: str = "") -> None:
        self._command = command
        self._after = after
        self.part = part
        """What the block is of the command; "" where it is all of it."""
        self._request = StopRequest()
        self._ranks = Ranks()
        self._there_is = f"stopped before training began; to start again:\n  {after.restart_command}"
        self._before: dict[signal.Signals, Any] = {}
        self._listens = threading.current_thread() is threading.main_thread()
        # A launcher says so long before the ranks have met.
        self._alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self._speaks = int(os.environ.get("RANK", "0")) == 0
        self._cancelled = False
        self._skip: Callable[[], object] | None = None
        self.stopped_after: int | None = None
        """The step that training stopped after, before its last one."""

    @property
    def status(self) -> int:
        """The exit status of a run that came to its end, or was stopped."""
        return self._request.status

    @property
    def cut_short(self) -> bool:
        """True in a run that was stopped before it came to its end."""
        return self._request.asked and self._request.stage is not Stage.CONCLUDING

    def begin_training(self, ranks: Ranks) -> None:
        """From here on steps are finished. Raises KeyboardInterrupt on all ranks when one was asked.

        Collective: every rank calls it.
        """
        self._ranks = ranks
        # Before the ranks meet: one that gets there no longer ends at once, so none that has gone on is left alone.
        self._request.stage = Stage.STARTING
        if self.agreed():
            self._end()
        self._request.stage = Stage.TRAINING

    def agreed(self) -> bool:
        """Whether to stop, as all ranks see it. Collective: every rank calls it."""
        heard = self._ranks.gather([(self._request.asked, self._request.interrupted)])
        agreed = any(asked for asked, _ in heard)
        if agreed:
            self._request.asked = True
            self._request.interrupted = any(interrupted for _, interrupted in heard)
        return agreed

    @contextmanager
    def skippable(self, skip: Callable[[], object]) -> Iterator[None]:
        """Call `skip` as soon as this process is asked to stop, in a block that need not be finished then.

        It is called between any two instructions of the main thread, also before the block when it was asked already.
        """
        self._skip = skip
        try:
            if self._request.asked:
                skip()
            yield
        finally:
            self._skip = None

    def stop_training(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Have the trainer save the step that is done and stop. After the last one it stops anyway, and saves more."""
        if state.global_step >= state.max_steps:
            self.stopped_after = None
            return
        # What was measured since the last log is in no checkpoint.
        control.should_log = control.should_save = control.should_training_stop = True
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.stopped_after = state.global_step
        self._there_is = half_trained(state.global_step, state.max_steps, checkpoint, self._after.resume_command)

    def end_training(self, model: Path, data: str) -> bool:
        """From here on a signal ends the run at once; returns whether to stop for one that came before.

        Collective: every rank calls it.
        """
        self._there_is = trained(model, data)
        if self.part:
            self._there_is = f"the policy is trained, but not evaluated; to go on:\n  {self._after.resume_command}"
        agreed = self.agreed()
        self._request.stage = Stage.TRAINED
        if self._request.asked and not agreed:
            self._end()  # it came when the others had been told that there was none
        return agreed

    def conclude(self) -> None:
        """From here on the run is finished, since it takes but seconds."""
        self._request.stage = Stage.CONCLUDING

    def __enter__(self) -> Self:
        if self._listens:
            # A shell has its background jobs ignore Ctrl-C, which is meant for another command.
            ignores = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            heeded = (signal.SIGTERM,) if ignores else SIGNALS
            self._before = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._listens:
            for number, before in self._before.items():
                signal.signal(number, before if self._request.heard_at is None else self._on_late_signal)
        explained = self._request.explains(error, self._alone)
        if explained or error is None:
            self._say_exit_reason()
        if explained and not self._alone:
            # Not by `sys.exit`, as in `ranks`: the interpreter's end may wait for ranks that wait for this one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)
        return explained

    def _end(self) -> NoReturn:
        self._request.ending = True
        raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        match self._request.signalled(time.monotonic(), number):
            case Reaction.FINISH:
                # A launcher that ends the ranks after a failure sends the same signal; the failure is reported.
                if self._request.stage is not Stage.CONCLUDING and self._alone:
                    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
                    self._notify(f"stopping after this step; {again} stops at once")
                if self._skip is not None:
                    self._skip()
            case Reaction.END:
                self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Get out of what runs. Tasks are cancelled, once; an exception from within would leave them undone."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None or self._cancelled:
            signal.default_int_handler(number, frame)
        self._cancelled = True
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)

    def _on_late_signal(self, number: int, frame: FrameType | None) -> None:
        """Ignore echoes, and do what was done before the block about others."""
        if not self._request.is_echo(time.monotonic()):
            signal.signal(number, self._before[signal.Signals(number)])
            signal.raise_signal(number)

    def _notify(self, words: str) -> None:
        # Not through `sys.stderr`, which the signal may have found in the middle of a write.
        os.write(2, f"{self._command}: {words}\n".encode())

    def _say_exit_reason(self) -> None:
        if not self._speaks or not self._request.asked or self._request.stage is Stage.CONCLUDING:
            return
        if forced_by := self._request.forced_by:
            sys.stderr.write(f"{self._command}: ended at once by a second {NAMES[signal.Signals(forced_by)]}\n")
        else:
            sys.stdout.write(f"{self.part and f'{self.part}: '}{self._there_is}\n")


class StopAfterStep(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Has the trainer save and stop at the end of a step, when the run was asked to stop; every rank needs one."""

    def __init__(self, stopping: StopSignals) -> None:
        self._stopping = stopping

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree with the other ranks."""
        if self._stopping.agreed():
            self._stopping.stop_training(args, state, control)
