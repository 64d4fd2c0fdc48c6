"""What a run keeps on disk: checkpoints, with states beside the weights, and a policy that no full disk costs.

Guarantees:

1. Before training the policy is saved once, and room is looked for: a run that could not be saved does not start.
2. A checkpoint that cannot be written is left out. A trained policy that cannot be written is kept in memory and tried
   again for `PATIENCE_S`, then written into the system's folder for temporary files. A failed write leaves nothing.
3. Only failures to write are handled so; `write_failure` knows them by errno, and by the words of the libraries that
   have no errno. On several ranks a checkpoint that cannot be written ends the run, with its policy saved.
4. A run that resumes restores every `Stateful` to the bit.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import DistributedType
from safetensors import SafetensorError
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from env_server.errors import SQLEnvError
from trainer.config import ConfigError
from trainer.eval.output_folder import remove_on_failure
from trainer.policy import PlaySettings
from trainer.training.memory import optimizer_bytes

RETRY_S, PATIENCE_S = 30.0, 600.0
TRIAL = "trial-save"
"""The folder, in the run's, that the policy is saved to before training."""
WEIGHTS = ("*.safetensors", "*.bin")
_UNWRITABLE = frozenset(
    getattr(errno, name)
    for name in (
        *("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EIO", "ESTALE"),  # a disk that is full, gone or read-only
        *("EACCES", "EPERM", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENAMETOOLONG"),  # a folder that takes nothing
    )
)
_TORCH_WRITER = re.compile(r"inline_container\.cc|PytorchStreamWriter|Parent directory .* does not exist")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class SaveError(SQLEnvError):
    """Something of a run cannot be saved; the text names the folder, and where the policy is instead."""


def write_failure(error: BaseException) -> str | None:
    """Return why a write failed, in a few words; None where the error is another one."""
    if isinstance(error, OSError) and error.errno is not None and error.errno in _UNWRITABLE:
        return os.strerror(error.errno)
    if isinstance(error, SafetensorError) and (found := _OS_ERROR.search(str(error))):
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and _TORCH_WRITER.search(str(error)):
        return "the file could not be written to its end"
    return None


@contextmanager
def writes_in_one_line(what: str) -> Iterator[None]:
    """Raise a write that fails in the block as SaveError."""
    try:
        yield
    except Exception as error:
        if (reason := write_failure(error)) is None:
            raise
        raise SaveError(f"{getattr(error, 'filename', None) or what}: {reason}; free room on the disk") from error


def save_patiently(write: Callable[[Path], object], folder: Path, *, movable: bool = True) -> None:
    """Call `write` with the folder until it succeeds. Raises SaveError where it does not within `PATIENCE_S`.

    `movable`: then it is written into another folder, which the error names.
    """
    for left in range(int(PATIENCE_S // RETRY_S), -1, -1):
        if (reason := _attempt(write, folder)) is None:
            return
        problem = f"the trained policy cannot be saved in {folder}: {reason} ({amount(free_bytes(folder))} are free)"
        if left:
            sys.stderr.write(f"{problem}. It is kept in memory; next try in {RETRY_S:g} s, {left} more: free room\n")
            time.sleep(RETRY_S)
    other = Path(tempfile.mkdtemp(prefix="sqlenv-policy-"))
    if not movable or (reason := _attempt(write, other)) is not None:
        shutil.rmtree(other, ignore_errors=True)
        raise SaveError(problem if not movable else f"{problem}; nor in {other}: {reason}")
    raise SaveError(f"{problem}; it is in {other}; to evaluate it: sqlenv evaluate --policy {other}")


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
        raise SaveError(
            f"training ended after step {step()}, since {f'{name}: ' if name else ''}{reason}; the policy of that step "
            f"is in {save()}"
        ) from error


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
    limit = config.save_total_limit
    count: float = limit + 1 if limit else 1
    if config.save_strategy == SaveStrategy.NO:
        return 0
    if config.save_strategy == SaveStrategy.EPOCH:
        count = config.num_train_epochs
    elif config.save_strategy == SaveStrategy.STEPS and config.max_steps > 0:
        every = config.save_steps if config.save_steps >= 1 else max(1.0, config.max_steps * config.save_steps)
        count = config.max_steps / every
    # The oldest goes when the newest is there; the best stays beside the newest.
    keeps_best = config.load_best_model_at_end or config.eval_strategy != IntervalStrategy.NO
    return min(math.ceil(count), max(limit, 1 + keeps_best) + 1) if limit else math.ceil(count)


def require_room(config: TrainingArguments, policy: float, optimizer: float) -> str:
    """Return what a run will write, and how much is free. Raises SaveError where it does not fit.

    `policy` and `optimizer` are sizes in bytes.
    """
    folder, count = Path(config.output_dir), checkpoints_at_once(config)
    each = policy + (0.0 if config.save_only_model else optimizer)
    there = sum(size_of(old) for old in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    needed = max(0.0, count * each - there) + policy
    how = f"{f'{count} x {amount(each)} for checkpoints, and ' if count else ''}{amount(policy)} for the policy"
    if (free := free_bytes(folder)) < needed:
        fix = "lower --save_total_limit, add --save_only_model true, or " if count else ""
        raise SaveError(
            f"--output_dir {folder}: {amount(free)} are free, and the run writes about {amount(needed)} ({how}); free "
            f"room, {fix}name another --output_dir"
        )
    return f"about {amount(needed)} of the {amount(free)} that are free: {how}"


class Stateful(Protocol):
    """What resumes as if it had not been interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in JSON's types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what a checkpoint kept. Raises ConfigError where it does not fit."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, and the file of a checkpoint that keeps it. `flags`: without them it is missing, None: it may be."""

    stateful: Stateful
    file: str
    flags: str | None


class SaveStates(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Writes into each checkpoint how the policy is played, and states, which a run that resumes loads.

    The last callback of a run: the settings mark a checkpoint as whole (`trainer.eval.output_folder`).
    """

    def __init__(self, play: PlaySettings, saved: Sequence[Saved] = ()) -> None:
        self._play = play
        self._saved = saved

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load what the checkpoint has. Raises ConfigError when it lacks something."""
        for saved in self._saved if args.resume_from_checkpoint else ():
            path = Path(args.resume_from_checkpoint) / saved.file
            if path.is_file():
                saved.stateful.load_state_dict(json.loads(path.read_bytes()))
            elif saved.flags is not None:
                raise ConfigError(
                    f"{path} is missing: the checkpoint is of a run without {saved.flags}; leave the flags as they were"
                )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was saved."""
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            for saved in self._saved:
                (folder / saved.file).write_text(json.dumps(saved.stateful.state_dict()), encoding="utf-8")
            self._play.save(folder)


class CheckpointingTrainer:
    """Mixed into a Trainer, with what transformers and TRL get wrong about a run's beginning, its end and its disk.

    transformers looks whether training is to end after a step, not before one: a run that was broken off after its last
    step would take another one. A learning-rate warm-up of n steps goes from 0/n to (n - 1)/n there, and a first step
    at rate 0 trains nothing; here it goes from 1/n to n/n. TRL puts a card into each checkpoint, which calls a base
    that is a local folder `None`; `sqlenv export` writes one. And a full disk ends a Trainer; see the module.
    """

    args: Any
    state: Any
    control: Any
    lr_scheduler: Any
    model: Any
    accelerator: Any
    processing_class: Any
    save_model: Callable[..., None]
    _beside: Callable[[Path], object] | None = None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]  # the Trainer's

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule, its warm-up a step ahead."""
        known = self.lr_scheduler
        scheduler = super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]  # the Trainer's
        if known is None and isinstance(scheduler, LambdaLR):
            warmup = self.args.get_warmup_steps(num_training_steps)
            scheduler.lr_lambdas = [_ahead(share, warmup) for share in scheduler.lr_lambdas]
            for group, base, share in zip(
                scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
            ):
                group["lr"] = base * share(0)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
        return scheduler

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none."""

    @property
    def is_sharded(self) -> bool:
        """Whether saving the policy takes all ranks."""
        return self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)

    def try_saving(self, beside: Callable[[Path], object]) -> str:
        """Save the policy as it is and remove it, and look for room for the run; returns what that comes to.

        `beside` writes what else is in a policy's folder. Raises SaveError. Collective: every rank calls it.
        """
        scratch, policy_bytes = Path(self.args.output_dir) / TRIAL, 0
        try:
            if self.is_sharded:  # weights come together only once the ranks have shared them out
                self._save_settings(scratch)
            else:
                self.save_model(str(scratch), _internal_call=True)
            if self.args.should_save:
                beside(scratch)
                policy_bytes = size_of(scratch)
                if not self.is_sharded and not any(any(scratch.glob(name)) for name in WEIGHTS):
                    raise SaveError("saving the policy writes no weights")
        except SaveError:
            raise
        except Exception as error:  # whatever it is, it would come at the end
            reason = write_failure(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SaveError(f"the policy cannot be saved in {self.args.output_dir}: {reason}") from error
        finally:
            if self.args.should_save:
                shutil.rmtree(scratch, ignore_errors=True)
        if not self.args.should_save or self.is_sharded:
            return ""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        state = sum(p.numel() * optimizer_bytes(self.args.optim.value, p.element_size()) for p in trained)
        return require_room(self.args, policy_bytes, state)

    def save_policy(self, folder: Path, beside: Callable[[Path], object]) -> Path:
        """Save the policy, with what `beside` writes, and return the folder.

        Raises SaveError. Collective: every rank calls it.
        """
        self._beside = beside
        try:
            self.save_model(str(folder), _internal_call=True)
        finally:
            self._beside = None
        return folder

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        save, beside = super()._save, self._beside  # type: ignore[misc]
        if beside is None:
            save(output_dir, state_dict)
            return

        def write(folder: Path) -> None:
            save(str(folder), state_dict)
            beside(folder)

        save_patiently(write, Path(output_dir or self.args.output_dir))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        save = super()._save_checkpoint  # type: ignore[misc]
        if self.args.world_size > 1:
            save(*args, **kwargs)
            return
        folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            # The run was asked to stop, and can resume from here alone.
            save_patiently(lambda _: save(*args, **kwargs), folder, movable=False)
        elif (reason := _attempt(lambda _: save(*args, **kwargs), folder)) is not None:
            sys.stderr.write(f"{folder} is not saved: {reason}; training goes on without this checkpoint\n")

    def _save_settings(self, folder: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if self.args.should_save:
            for part in (model.config, getattr(model, "generation_config", None), self.processing_class):
                if part is not None:
                    part.save_pretrained(str(folder))


def _ahead(share: Callable[[int], float], warmup: int) -> Callable[[int], float]:
    """The share of the full rate at a step, while it warms up that of the next step."""
    return lambda step: share(step + (step < warmup))
