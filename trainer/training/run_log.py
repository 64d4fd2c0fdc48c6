"""What a training run says and keeps as it goes: a few lines per logged step, metrics.jsonl and episodes.jsonl.

The metrics are those that TRL logs, and so those that the trackers of `--report_to` get: `grpo` adds what rollouts were
like to them, `evaluating` logs evaluations. On several ranks, the main one alone keeps a log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.results.run_files import RunFolder, episode_line
from trainer.results.step_text import WIDTH, step_text
from trainer.rollout.episodes import Episode, record
from trainer.training.evaluating import BEST, PREFIX


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
        self._folder.go_on_from(state.global_step)
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


def episode_lines(step: int, episodes: Iterable[Episode]) -> str:
    """Return the lines of a training step's episodes, as they are kept."""
    return "".join(episode_line(step, record(episode, with_versions=True)) for episode in episodes)


def _shown(logs: Mapping[str, float]) -> dict[str, float]:
    """An evaluation under the names that trackers show."""
    return {f"eval/{name.removeprefix(PREFIX)}": value for name, value in logs.items() if name.startswith(PREFIX)}
