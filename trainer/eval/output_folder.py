"""The folder that a run writes into: how it is chosen, and its clean-up when the run fails early.

Guarantees:

1. A new run goes into a folder that holds neither a policy nor a run. Without `--output_dir` it takes the first name
   that holds no policy, so that the name of a policy keeps meaning that policy.
2. A run is resumed in its own folder: a warm-up never writes into a GRPO run, nor the other way round. A finished run
   is not trained again unless `--max_steps` is raised.
3. A run that fails before its first result leaves the folder as it was: the same command can be run again.

Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from inference.adapters import RUN_MODEL, STAGES_FILE, PolicyNameError, saved_policy
from trainer.config import ConfigError
from trainer.eval.run_files import RunFolder
from trainer.policy import SETTINGS_FILE

OUTPUT, RESUME = "output_dir", "resume_from_checkpoint"
CHECKPOINT = "checkpoint-"
"""What the names of transformers' checkpoints begin with."""
FINAL_STATE = "trainer_state.json"
"""The Trainer's state, which a run writes into its folder as the last of all when it is finished."""


class RunKind(Enum):
    """What runs, by the command that starts it. A run saves its policy in `model/`, one of stages in its last stage."""

    TRAIN = "sqlenv train"
    WARMUP = "sqlenv warmup"
    STAGES = "stages"


@dataclass(frozen=True, slots=True)
class Output:
    """The folder that a run writes into, the checkpoint that it resumes from, and lines to print about them."""

    folder: Path
    checkpoint: Path | None = None
    lines: tuple[str, ...] = ()


def find_output(kind: RunKind, given: Mapping[str, Any]) -> Output:
    """Return the output folder for these flags and keys. Raises ConfigError where a run must not write there."""
    resume = str(given.get(RESUME) or "")
    newest = resume.lower() == "true" or (resume != "" and kind is RunKind.STAGES)
    default = Path("runs", _default_name(kind, given))
    if given.get(OUTPUT):
        folder = Path(str(given[OUTPUT]))
    elif newest:
        *_, folder = default, *takewhile(_is_taken, _names(kind, default))
    elif resume:
        folder = Path(resume).parent
    else:
        folder = _without_policy(kind, default)
    if not resume:
        _require_free(kind, folder)
        moved = f"{default} holds a policy: this run writes into {folder} (--{OUTPUT} chooses another folder)"
        return Output(folder, None, () if given.get(OUTPUT) or folder == default else (moved,))
    checkpoint = last_checkpoint(folder) if newest else Path(resume)
    if checkpoint is not None and checkpoint.parent.resolve() != folder.resolve():
        _require_free(kind, folder)
    elif _kind_of(folder) not in (None, kind):
        raise ConfigError(f"{folder} holds no run of {kind.value} to resume; name the run's folder with --{OUTPUT}")
    elif (state := final_state(folder)) is not None and not _asks_for_more(given, state):
        raise ConfigError(
            f"{folder} holds a finished run of {state['global_step']} steps: to train it further, raise --max_steps "
            f"above {state['max_steps']}; to train anew, choose another --{OUTPUT}"
        )
    if checkpoint is None and kind is not RunKind.STAGES:
        raise ConfigError(f"{folder} holds no checkpoint to resume from; was save_strategy set?")
    return Output(folder, checkpoint)


def final_state(folder: Path) -> dict[str, Any] | None:
    """Return the Trainer's state of a finished run; None where the folder holds none."""
    try:
        state = json.loads((folder / FINAL_STATE).read_bytes())
    except (OSError, ValueError):  # there is none, or a killed process left it half
        return None
    return state if isinstance(state, dict) and _holds_policy(folder) else None


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; one that a killed process left half is skipped."""
    steps = {path: path.name.removeprefix(CHECKPOINT) for path in folder.glob(f"{CHECKPOINT}*")}
    # The file is the last that a checkpoint gets; see `trainer.training.checkpointing`.
    complete = [path for path, step in steps.items() if step.isdecimal() and (path / SETTINGS_FILE).is_file()]
    return max(complete, key=lambda path: int(steps[path]), default=None)


def left_nothing(folder: Path) -> bool:
    """Whether a run has left neither a checkpoint nor a policy."""
    return last_checkpoint(folder) is None and not (folder / RUN_MODEL / SETTINGS_FILE).is_file()


@contextmanager
def remove_on_failure(folder: Path, left_nothing: Callable[[], bool]) -> Iterator[None]:
    """Remove what the block has written into the folder when it raises and there is nothing to keep.

    Files and parent folders that existed before stay. Raises what the block raises.
    """
    before = set(folder.iterdir()) if folder.is_dir() else None
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        yield
    except BaseException:
        if left_nothing():
            _remove(folder, before, made)
        raise


def _remove(folder: Path, before: set[Path] | None, made: list[Path]) -> None:
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        for path in set(folder.iterdir()) - before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for parent in made:
        with suppress(OSError):  # another process has written there
            parent.rmdir()


def _asks_for_more(given: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether the flags ask for more steps than the finished run was given."""
    steps, epochs = float(given.get("max_steps") or -1), given.get("num_train_epochs")
    if steps <= 0 and epochs:
        # It may have ended before its last step, by a deadline.
        steps = int(float(epochs) * state["global_step"] / (state["epoch"] or 1))
    return steps > float(state["max_steps"])


def _default_name(kind: RunKind, given: Mapping[str, Any]) -> str:
    """Return the name of the policy, or of the file of stages."""
    if kind is RunKind.STAGES:
        return Path(str(given["config"])).stem
    policy = Path(given.get("model_name_or_path") or "train")
    name = policy.resolve().name if policy.name in ("", "..") else policy.name
    return name if kind is RunKind.TRAIN else f"warmup-{name}"


def _names(kind: RunKind, first: Path) -> Iterator[Path]:
    """Yield the folder, then its alternatives in order."""
    yield first
    if kind is RunKind.TRAIN:
        first = Path(f"{first}-grpo")
        yield first
    yield from (Path(f"{first}-{number}") for number in count(2))


def _without_policy(kind: RunKind, first: Path) -> Path:
    return next(folder for folder in _names(kind, first) if not _holds_policy(folder))


def _require_free(kind: RunKind, folder: Path) -> None:
    """Raise ConfigError where a folder holds a policy or a run."""
    if not _is_taken(folder):
        return
    free = next(other for other in _names(kind, folder) if not _is_taken(other))
    if _holds_policy(folder):
        raise ConfigError(f"--{OUTPUT} {folder} holds a policy; choose another folder, such as --{OUTPUT} {free}")
    raise ConfigError(
        f"{folder} already holds a run; resume it with --{RESUME} true, or choose another folder, such as "
        f"--{OUTPUT} {free}"
    )


def _is_taken(folder: Path) -> bool:
    marks = RunFolder(folder).config_path, folder / STAGES_FILE
    return _holds_policy(folder) or any(map(Path.exists, marks)) or last_checkpoint(folder) is not None


def _holds_policy(folder: Path) -> bool:
    try:
        return saved_policy(folder) is not None
    except PolicyNameError:
        return False  # of stages that are not finished


def _kind_of(folder: Path) -> RunKind | None:
    """Return which kind of run a folder holds; None also for a warm-up that has saved checkpoints alone."""
    if (folder / STAGES_FILE).exists():
        return RunKind.STAGES
    if RunFolder(folder).evaluations_path.is_dir():
        return RunKind.TRAIN
    return RunKind.WARMUP if _holds_policy(folder) else None
