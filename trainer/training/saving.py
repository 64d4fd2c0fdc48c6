"""What a run saves, without losing what it trained: room that is looked for first, writes that are tried again.

Guarantees:

1. `room_needed` counts what a run will hold on disk at once: its checkpoints, one more while the oldest is not yet
   removed, and the policy.
2. `Saving.keep_trying` keeps the policy in memory until it is written: in the folder, in another one that is named at
   the terminal, or, without a terminal and after `patience_s`, in the system's folder for temporary files. A write that
   fails leaves nothing behind.
3. Only failures to write are handled so; `write_failure` knows them by errno, and by the words of the libraries that
   have no errno.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from env_server.errors import SQLEnvError
from trainer.eval.output_folder import remove_on_failure

UNWRITABLE = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"),
        *("EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG"),
    )
)
"""Of a disk that is full, gone or read-only, and of a folder that cannot be written to."""
_TORCH_WRITER = re.compile(r"inline_container\.cc|PytorchStreamWriter|Parent directory .* does not exist")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class SaveError(SQLEnvError):
    """Something of a run cannot be saved; the text names the folder, and where the policy is instead."""


def write_failure(error: BaseException) -> str | None:
    """Return why a write failed, in a few words; None where the error is another one."""
    if isinstance(error, OSError) and error.errno is not None and error.errno in UNWRITABLE:
        return os.strerror(error.errno)
    text = str(error)
    if isinstance(error, SafetensorError) and (found := _OS_ERROR.search(text)):
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and _TORCH_WRITER.search(text):
        return "the file could not be written to its end"
    return None


@contextmanager
def writes_in_one_line(what: str) -> Iterator[None]:
    """Raise a write that fails in the block as SaveError."""
    try:
        yield
    except SaveError:
        raise
    except Exception as error:
        if (reason := write_failure(error)) is None:
            raise
        name = getattr(error, "filename", None)
        raise SaveError(f"{name or what}: {reason}; free room on the disk") from error


def free_bytes(folder: Path) -> int:
    """Return what is free on the disk that holds the folder, or would hold it."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def amount(size: float) -> str:
    """Return a number of bytes as people write it."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def checkpoints_at_once(config: TrainingArguments) -> int:
    """Return how many checkpoints lie on disk at most."""
    count: int
    match config.save_strategy:
        case SaveStrategy.NO:
            return 0
        case SaveStrategy.EPOCH:
            count = math.ceil(config.num_train_epochs)
        case SaveStrategy.STEPS if config.max_steps > 0:
            every = config.save_steps if config.save_steps >= 1 else max(1.0, config.max_steps * config.save_steps)
            count = math.ceil(config.max_steps / every)
        case _:
            count = config.save_total_limit + 1 if config.save_total_limit else 1
    if config.save_total_limit:
        # The oldest goes when the newest is there; the best stays beside the newest.
        keeps_best = config.load_best_model_at_end or config.eval_strategy != IntervalStrategy.NO
        count = min(count, max(config.save_total_limit, 2 if keeps_best else 1) + 1)
    return count


def room_needed(config: TrainingArguments, policy: float, optimizer: float) -> tuple[float, str]:
    """Return the bytes that a run will write, and what they are for; `policy` and `optimizer` are sizes in bytes."""
    count = checkpoints_at_once(config)
    each = policy + (0.0 if config.save_only_model else optimizer)
    how = f"{amount(policy)} for the policy"
    if count:
        how = f"{count} checkpoint{'s' if count > 1 else ''} of {amount(each)}, and {how}"
    return count * each + policy, how


def require_room(config: TrainingArguments, policy: float, optimizer: float) -> str:
    """Return what the run will write, and how much is free. Raises SaveError where it does not fit."""
    folder = Path(config.output_dir)
    needed, how = room_needed(config, policy, optimizer)
    needed -= sum(size_of(old) for old in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    free = free_bytes(folder)
    if free < needed:
        fix = "name another --output_dir"
        if checkpoints_at_once(config):
            fix = f"lower --save_total_limit, add --save_only_model true, or {fix}"
        raise SaveError(
            f"--output_dir {folder}: {amount(free)} are free, and the run writes about {amount(needed)} ({how})"
            f"; free room, {fix}"
        )
    return f"about {amount(needed)} of the {amount(free)} that are free: {how}"


@dataclass(frozen=True, slots=True)
class Saving:
    """How a policy that cannot be written is dealt with. `ask` puts a question at the terminal; None: there is none."""

    say: Callable[[str], object]
    ask: Callable[[str], str] | None = None
    sleep: Callable[[float], object] = time.sleep
    retry_s: float = 30.0
    patience_s: float = 600.0

    @classmethod
    def here(cls) -> Saving:
        """Of this process; several ranks have no terminal."""

        def say(line: str) -> None:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()

        def ask(question: str) -> str:
            sys.stderr.write(question)
            sys.stderr.flush()
            return input()

        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
        return cls(say, ask if alone and sys.stdin.isatty() and sys.stderr.isatty() else None)

    def keep_trying(self, write: Callable[[Path], object], folder: Path, size: float, *, movable: bool = True) -> Path:
        """Call `write` with a folder until it succeeds, and return that folder. Raises SaveError.

        `size`: the bytes that are needed. `movable`: another folder will do.
        """
        waited, what, target = 0.0, "the trained policy", folder
        while True:
            reason = "it holds something already" if folder != target and _is_used(folder) else _attempt(write, folder)
            if reason is None:
                return folder
            trouble = f"{what} cannot be saved in {folder}: {reason}"
            room = f"{amount(size)} are needed, {amount(free_bytes(folder))} are free"
            if self.ask is not None:
                choice = "press Enter to try again" + (", or type another folder" if movable else "")
                try:
                    other = self.ask(f"{trouble} ({room}). It is kept in memory; {choice}: ").strip()
                except EOFError as error:
                    raise SaveError(f"{trouble} ({room})") from error
                if other and movable:
                    folder = Path(other).expanduser()
                continue
            if waited >= self.patience_s:
                return self._elsewhere(write, trouble, size, movable)
            left = self.patience_s - waited
            self.say(f"{trouble} ({room}). It is kept in memory; next try in {self.retry_s:g} s, for {left:g} s more")
            self.sleep(self.retry_s)
            waited += self.retry_s

    def _elsewhere(self, write: Callable[[Path], object], trouble: str, size: float, movable: bool) -> Path:
        if not movable or free_bytes(Path(tempfile.gettempdir())) < size:
            raise SaveError(trouble)
        other = Path(tempfile.mkdtemp(prefix="sqlenv-policy-"))
        if (reason := _attempt(write, other)) is not None:
            shutil.rmtree(other, ignore_errors=True)
            raise SaveError(f"{trouble}; nor in {other}: {reason}")
        self.say(f"{trouble}; it is in {other}")
        return other


@contextmanager
def policy_kept(save: Callable[[], Path], step: Callable[[], int]) -> Iterator[None]:
    """Save the policy when what the block writes beside it cannot be written. Raises SaveError, which says where it is.

    `step`: how many steps were taken; a policy that had none is not saved.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, SaveError) else write_failure(error)
        if reason is None or not step():
            raise
        name = getattr(error, "filename", None)
        what = f"{name}: {reason}" if name else reason
        folder = save()
        raise SaveError(
            f"training ended after step {step()}, since {what}; the policy of that step is in {folder}"
        ) from error


def require_saved_in(folder: Path, saved: Path) -> None:
    """Raise SaveError where the trained policy is in another folder than the run's: the run ends there."""
    if saved != folder:
        raise SaveError(
            f"training is finished, and the policy is saved in {saved}, since {folder} cannot be written; to evaluate "
            f"it: sqlenv evaluate --policy {saved}"
        )


def _is_used(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _attempt(write: Callable[[Path], object], folder: Path) -> str | None:
    """Return why the write failed, None where it did not; a failed one leaves nothing behind."""
    try:
        with remove_on_failure(folder, lambda: True):
            write(folder)
    except Exception as error:
        if (reason := write_failure(error)) is None:
            raise
        return reason
    return None
