"""What a training run says and keeps as it goes: a line per logged step, metrics.jsonl and episodes.jsonl.

On several ranks, the main one alone keeps a log.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainer.episodes import Episode, record
from trainer.run_files import RunFolder


class RunLog(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Collects the metrics of rollouts between two logs of the trainer and writes both as one line."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._metrics = folder.metrics_writer()
        self._episodes = folder.episodes_writer()
        self._console = console
        self._pending: dict[str, list[float]] = defaultdict(list)
        self._started = time.monotonic()
        self._first_step = 0

    def write_batch(self, step: int, episodes: Sequence[Episode], metrics: dict[str, float]) -> None:
        """Keep a batch of training episodes; called by the rollout."""
        for episode in episodes:
            self._episodes.write_episode(step, record(episode))
        for name, value in metrics.items():
            self._pending[name].append(value)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and remember where a resumed run goes on."""
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
        """Write one line of metrics, and say how it goes. A step that trained on earlier episodes has no rollout's."""
        if logs is None or "loss" not in logs:
            return
        rollout = {name: fmean(values) for name, values in self._pending.items()}
        self._pending.clear()
        metrics = {**logs, **rollout}
        self._metrics.write({"step": state.global_step, **metrics})
        elapsed = time.monotonic() - self._started
        left = elapsed / (state.global_step - self._first_step) * (state.max_steps - state.global_step)
        self._console.print(
            f"step {state.global_step:>4}/{state.max_steps}  success {_of(metrics, 'rollout/success_rate'):5.1%}  "
            f"reward {_of(metrics, 'reward'):+.3f}  steps {_of(metrics, 'rollout/steps'):4.1f}  "
            f"loss {_of(metrics, 'loss'):+.4f}  "
            f"|logprob gap| {_of(metrics, 'sampling/sampling_logp_difference/max'):.1e}  "
            f"{_clock(elapsed)} gone, {_clock(left)} left",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        self._episodes.close()


def _of(metrics: Mapping[str, float], name: str) -> float:
    return metrics.get(name, math.nan)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
