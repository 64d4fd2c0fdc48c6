"""The log of a training run: two lines per logged step at the terminal, metrics.jsonl, episodes.jsonl, and trackers.

The metrics are those that TRL logs, and so those that the trackers of `--report_to` get: `grpo` adds what rollouts were
like to them, and logs evaluations. On several ranks, the main one alone keeps a log.

Of the two lines at the terminal, the first is about the episodes, the second about the update and the time. Lines break
between two numbers where the terminal is narrow. What was not measured is left out. "reward" is the environment's, as
in evaluations and in `sqlenv play`; TRL's "reward" is the weighted one that it trains on.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig

from trainer.eval.run_files import RunFolder, episode_line
from trainer.flags.configs import BEST
from trainer.report.tables import clock
from trainer.rollout.episodes import EpisodeRecord
from trainer.training.evaluations import PREFIX

WIDTH = 132
"""Columns that both lines fit into, unless a KL term or a slow weight sync is shown as well."""
GAP = "  "
INDENT = "    "
RATIO = "sampling/importance_sampling_ratio"
ROLLOUT_PARTS = ("queue", "generation", "environment", "judging", "client")
SLOW_PUSH = 0.02
"""Share of a step's time above which the weight sync is shown."""

Metrics = Mapping[str, float]


class RunLog(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Writes what the trainer logs, and says it."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder = folder
        self._metrics = folder.metrics_writer()
        self._episodes = folder.episodes_writer()
        self._console = console
        self._started = time.monotonic()
        self._first_step = 0

    def write_episodes(self, lines: str) -> None:
        """Keep training episodes, in the lines that `episode_lines` made."""
        self._episodes.write_lines(lines)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and go on where a resumed run does."""
        self._folder.resume_from(state.global_step)
        self._started = time.monotonic()
        self._first_step = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line of metrics; say how a step went. The evaluation before training is in no line: it is none."""
        if logs is None or not state.global_step:
            return
        if BEST in logs:
            self._metrics.write({"step": state.global_step, **_shown(logs)})
        elif "loss" in logs:
            self._metrics.write({"step": state.global_step, **logs})
            self._say(state, logs)

    def _say(self, state: TrainerState, logs: Mapping[str, float]) -> None:
        gone = time.monotonic() - self._started
        left = gone / (state.global_step - self._first_step) * (state.max_steps - state.global_step)
        # What is no terminal has no width, and is read in one that has another.
        width = self._console.width if self._console.is_terminal else WIDTH
        text = step_text(state.global_step, state.max_steps, logs, left, width)
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._episodes.close()


def episode_lines(step: int, records: Iterable[EpisodeRecord]) -> str:
    """Return the lines of a training step's episodes, as they are kept."""
    return "".join(episode_line(step, record) for record in records)


def _shown(logs: Mapping[str, float]) -> dict[str, float]:
    """An evaluation under the names that trackers show."""
    return {f"eval/{name.removeprefix(PREFIX)}": value for name, value in logs.items() if name.startswith(PREFIX)}


def step_text(step: int, steps: int, metrics: Metrics, left: float, width: int = WIDTH) -> str:
    """Describe a step in lines of at most `width` columns; `left` is what training has left, in seconds."""
    head = f"step {step:>4}/{steps}"
    rollout = [*_episodes(metrics), f"{clock(left)} left"]
    update = [*_update(metrics), *_times(metrics)]
    return "\n".join(_lines(head, rollout, width) + _lines(INDENT, update, width))


def _episodes(metrics: Metrics) -> list[str]:
    spread = _some(metrics, "±{:.2f}", "reward_std")
    clipped = _some(metrics, ", {:.0%} clipped", "completions/clipped_ratio")
    words = [
        _some(metrics, "success {:5.1%}", "rollout/success_rate"),
        _some(metrics, "reward {:+.2f}", "rollout/reward"),
        _some(metrics, "weighted {:+.3f}", "reward") + spread,
        _some(metrics, "no signal {:.0%}", "rollout/no_signal"),
        _some(metrics, "{:4.1f} steps", "rollout/steps"),
        _some(metrics, "{:.0f} tokens", "completions/mean_length") + clipped,
        _some(metrics, "failed {:.0f}", "rollout/failed") if metrics.get("rollout/failed") else "",
        _some(metrics, "replaced {:.0f}", "rollout/replaced") if metrics.get("rollout/replaced") else "",
    ]
    return [word for word in words if word]


def _update(metrics: Metrics) -> list[str]:
    words = [
        _some(metrics, "kl {:.4f}", "kl"),
        _some(metrics, "entropy {:.2f}", "entropy"),
        _some(metrics, "ratio {:.2f}-{:.2f}", f"{RATIO}/min", f"{RATIO}/max"),
        _some(metrics, "gap {:.0e}", "sampling/sampling_logp_difference/mean"),
        _some(metrics, "grad {:.2g}", "grad_norm")
        + _some(metrics, " ({:.0%} correctness)", "gradient_share/correctness"),
        _some(metrics, "lr {:.1e}", "learning_rate"),
    ]
    return [word for word in words if word]


def _some(metrics: Metrics, text: str, *names: str) -> str:
    """The text with the numbers, or nothing where one was not measured; TRL logs None for a mean over nothing."""
    values = [metrics.get(name) for name in names]
    return "" if None in values else text.format(*values)


def _times(metrics: Metrics) -> list[str]:
    """What the step waited for, and what episodes waited for most, or how long they waited for the step."""
    if "time/rollout" not in metrics:
        return []
    rollout, push, training = (metrics[f"time/{name}"] for name in ("rollout", "push", "training"))
    words = [f"rollout {_seconds(rollout)}"]
    if rollout > 0:
        seconds, longest = max((metrics[f"time/{part}"], part) for part in ROLLOUT_PARTS)
        words[0] += f" ({seconds / rollout:.0%} {longest})"
    if metrics.get("rollout/idle_seconds"):
        words.append(f"ready {_seconds(metrics['rollout/idle_seconds'])} early")
    if push > SLOW_PUSH * (rollout + push + training):
        words.append(f"push {_seconds(push)}")
    return [", ".join([*words, f"train {_seconds(training)}"])]


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _lines(start: str, words: Sequence[str], width: int) -> list[str]:
    """Put words one after the other, the first line beginning with `start`, the others indented."""
    lines = [start]
    for word in words:
        gap = GAP if lines[-1].strip() else ""
        if gap and len(lines[-1] + gap + word) > width:
            lines.append(INDENT)
            gap = ""
        lines[-1] += gap + word
    return [line for line in lines if line.strip()]


FOLDERS = {"TENSORBOARD_LOGGING_DIR": "tensorboard", "WANDB_DIR": ""}
"""The variables that trackers know their folder by, and where it is in a run's folder.

A container's file system is read-only but for runs. TensorBoard gets one folder for a run that stops and goes on;
transformers would start one by the date each time. trackio keeps all runs together, where TRACKIO_DIR says when it is
imported.
"""


@contextmanager
def writing_into(grpo: GRPOConfig) -> Iterator[None]:
    """Have trackers write into the run's folder, unless a variable says where, and name the run as it."""
    folder = Path(grpo.output_dir).resolve()
    if grpo.report_to and grpo.run_name is None:
        grpo.run_name = folder.name
    unset = [variable for variable in FOLDERS if variable not in os.environ]
    os.environ.update({variable: str(folder / FOLDERS[variable]) for variable in unset})
    try:
        yield
    finally:
        for variable in unset:
            del os.environ[variable]


@contextmanager
def closing_runs() -> Iterator[None]:
    """End the run that wandb keeps open in the process, so that what is trained next does not write into it.

    The other trackers end theirs with the training. One that was open before stays open.
    """
    wandb = sys.modules.get("wandb")
    before = wandb is not None and wandb.run is not None
    try:
        yield
    finally:
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None and not before:
            wandb.finish()


ROOT = Path(__file__).resolve().parents[2]
GIT_S = 5.0


def provenance() -> dict[str, Any]:
    """Return what is known of this process, its code and its machine."""
    found: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
        "gpus": [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())],
    }
    return {name: value for name, value in found.items() if value}


def commit(root: Path) -> str:
    """Return the commit of a checkout, and whether files differ from it; nothing where it is none."""
    if not (root / ".git").exists():
        return ""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_S, check=True
        )
        return done.stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    return ""


def processor() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Return the machine's memory, 0 where the system does not say."""
    with suppress(AttributeError, OSError, ValueError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return 0.0
