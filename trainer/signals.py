"""How `sqlenv train` and `warmup` stop on SIGTERM or Ctrl-C (SIGINT): a flag that signals set, and a callback.

Guarantees:

1. During training the running step ends, a checkpoint is saved whatever `save_strategy` says, and training stops. A run
   that has made its last step saves its model instead; one that has only the report to write, writes it. What is
   `skippable` between two steps, an evaluation, is left at once. At any other time everything is closed at once.
2. Either way the run says what it has saved and the command that resumes it. The exit status is 0 after SIGTERM, which
   a machine sends, and 130 after Ctrl-C, so that a script goes no further.
3. A second signal closes everything at once; the exit status is then that of the signal, 143 or 130. What follows
   within ECHO_S is the same signal, and is ignored: clusters signal every process of a job, a terminal does too, and
   launchers pass signals on.
4. On several ranks all stop after the same step, also when one alone was signalled.
5. After the block signals do what they did before, and nothing changes outside the main thread.
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
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
SHELL_STATUS = 128
"""What a shell adds to a signal's number for the exit status of the process that it ended."""


class Stage(Enum):
    """How far a run is."""

    BEFORE = auto()
    STARTING = auto()
    """The ranks agree that training begins."""
    TRAINING = auto()
    """Steps, and the saving of the model."""
    TRAINED = auto()
    CONCLUDING = auto()


_PATIENT = (Stage.STARTING, Stage.TRAINING, Stage.CONCLUDING)
"""Where a first signal lets the work be finished."""


class StopSignals:
    """Listens to SIGTERM and Ctrl-C in its `with` block, and says at the block's end that the run was stopped.

    An end at once leaves the block as KeyboardInterrupt or CancelledError, and goes no further. On several ranks the
    process ends there; see `ranks.abort_together`. `part` is what the block is of the command, "" where it is all.
    """

    def __init__(self, command: str, after: NextCommand, part: str = "") -> None:
        self.part = part
        self.stopped_after: int | None = None
        """The step that training stopped after, before its last one."""
        self._command, self._after = command, after
        self._outcome = f"stopped before training began; to start again:\n  {after.restart_command}"
        self._stage = Stage.BEFORE
        self._requested: int | None = None
        """The signal that asked the run to stop, here or at another rank."""
        self._forced: int | None = None
        """The signal that did not let the work be finished."""
        self._ending = False
        self._heard_at: float | None = None
        """When this process got its last signal that was no echo."""
        self._cancelled = False
        self._skip: Callable[[], object] | None = None
        self._ranks = Ranks()
        # A launcher says so long before the ranks have met.
        self._alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        self._before: dict[int, Any] = {}

    @property
    def status(self) -> int:
        """The exit status of a run that came to its end, or was stopped."""
        if self._forced is not None:
            return SHELL_STATUS + self._forced
        return SHELL_STATUS + signal.SIGINT if self.cut_short and self._requested == signal.SIGINT else 0

    @property
    def cut_short(self) -> bool:
        """True in a run that was stopped before it came to its end."""
        return self._requested is not None and self._stage is not Stage.CONCLUDING

    def begin_training(self, ranks: Ranks) -> None:
        """From here on steps are finished. Raises KeyboardInterrupt on all ranks when one was signalled.

        Collective: every rank calls it.
        """
        self._ranks = ranks
        # Before the ranks meet: one that gets there no longer ends at once, so none that has gone on is left alone.
        self._stage = Stage.STARTING
        if self.agreed():
            self._end()
        self._stage = Stage.TRAINING

    def agreed(self) -> bool:
        """Whether to stop, as all ranks see it. Collective: every rank calls it."""
        requested = [number for number in self._ranks.gather([self._requested]) if number is not None]
        if requested:
            self._requested = min(requested)  # SIGINT before SIGTERM
        return bool(requested)

    @contextmanager
    def skippable(self, skip: Callable[[], object]) -> Iterator[None]:
        """Call `skip` as soon as this process is asked to stop, in a block that need not be finished then.

        It is called between any two instructions of the main thread, also before the block when it was asked already.
        """
        self._skip = skip
        try:
            if self._requested is not None:
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
        self.stopped_after = state.global_step
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self._outcome = (
            f"stopped after step {state.global_step} of {state.max_steps}, which is saved in {checkpoint}; to resume:\n"
            f"  {self._after.resume_command}"
        )

    def end_training(self, model: Path, data: str) -> bool:
        """From here on a signal ends the run at once; returns whether to stop for one that came before.

        Collective: every rank calls it.
        """
        evaluate = shlex.join(["sqlenv", "evaluate", "--policy", str(model), "--data", data])
        where, command = (f" and saved in {model}", evaluate) if not self.part else ("", self._after.resume_command)
        self._outcome = f"the policy is trained{where}, but not evaluated; to do so:\n  {command}"
        agreed = self.agreed()
        self._stage = Stage.TRAINED
        if self._requested is not None and not agreed:
            self._end()  # the signal came after the ranks had agreed
        return agreed

    def conclude(self) -> None:
        """From here on the run is finished, since it takes but seconds."""
        self._stage = Stage.CONCLUDING

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A shell has its background jobs ignore Ctrl-C, which is meant for another command.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            heeded = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._on_signal) for number in heeded}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for number, before in self._before.items():
            signal.signal(number, before if self._heard_at is None else self._on_late_signal)
        explained = self._explains(error)
        if explained or error is None:
            self._say_outcome()
        if explained and not self._alone:
            # Not by `sys.exit`, as in `ranks`: the interpreter's end may wait for ranks that wait for this one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)
        return explained

    def _explains(self, error: BaseException | None) -> bool:
        """Whether what came out of the block is how it ends at once."""
        if self._ending and isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            return True
        # Other ranks that were signalled may have ended while this one went to meet them. But a training step that
        # fails is never kept quiet.
        in_between = self._stage not in (Stage.TRAINING, Stage.CONCLUDING)
        return self._heard_at is not None and in_between and not self._alone and isinstance(error, Exception)

    def _end(self) -> NoReturn:
        self._ending = True
        raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_echo():
            return
        first, self._heard_at = self._heard_at is None, time.monotonic()
        if first and self._requested is not None:
            return  # another rank got it, too, and this one knows from there
        self._requested = self._requested or number
        if not first or self._stage not in _PATIENT:
            self._ending, self._forced = True, None if first else number
            self._interrupt(number, frame)
            return
        # A launcher that ends the ranks after a failure sends the same signal; the failure is reported.
        if self._stage is not Stage.CONCLUDING and self._alone:
            again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
            # Not through `sys.stderr`, which the signal may have found in the middle of a write.
            os.write(2, f"{self._command}: stopping after this step; {again} stops at once\n".encode())
        if self._skip is not None:
            self._skip()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Leave what runs. Tasks are cancelled, once; an exception from within would leave them undone."""
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
        if not self._is_echo():
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    def _is_echo(self) -> bool:
        return self._heard_at is not None and time.monotonic() - self._heard_at < ECHO_S

    def _say_outcome(self) -> None:
        if os.environ.get("RANK", "0") != "0" or not self.cut_short:
            return
        if self._forced is not None:
            sys.stderr.write(f"{self._command}: ended at once by a second {NAMES[signal.Signals(self._forced)]}\n")
        else:
            sys.stdout.write(f"{self.part and f'{self.part}: '}{self._outcome}\n")


class StopAfterStep(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Has the trainer save and stop at the end of a step, when the run was asked to stop; every rank needs one."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Agree with the other ranks."""
        if self._signals.agreed():
            self._signals.stop_training(args, state, control)
