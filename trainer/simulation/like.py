"""A rehearsal like a run: its episodes, its batches, and servers of the speed that its log shows.

A run's log holds what its episodes said, and how long each step waited for tokens and for environments, but not how
long single turns took. So its last steps are rehearsed as they were, and the servers' times are scaled until the
rehearsal waits as long as the run did. That says how fast the deployment was as it was used; what it would do with
more in flight follows from the preset that is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from trainer.chat.format import ChatFormat
from trainer.results.run_files import RunFolder, TrainingEpisode
from trainer.rollout.timings import Part, split
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.calibration import CalibrationError, scaled
from trainer.simulation.rehearsal import Deployment, Load, Played, rehearse
from trainer.simulation.scripts import Script, recorded

STEPS = 4
"""Of a run that are rehearsed: its last ones, when servers are warm."""
ROUNDS = 5
SMALLEST_S = 1e-4


@dataclass(frozen=True, slots=True)
class PastRun:
    """What a run's folder says. `seconds` are medians over the rehearsed steps, of a batch."""

    config: Mapping[str, Any]
    scripts: Sequence[Script]
    """Of the rehearsed steps, one after another."""
    batch: int
    rollout_s: float
    generation_s: float | None
    environment_s: float | None

    @classmethod
    def read(cls, path: Path) -> PastRun:
        """Read a run's folder. Raises RunFolderError, CalibrationError."""
        folder = RunFolder.open(path)
        by_step: dict[int, list[TrainingEpisode]] = defaultdict(list)
        for episode in folder.episodes():
            by_step[episode.step].append(episode)
        rows = {int(row["step"]): row for row in folder.metrics() if "rollout/seconds" in row}
        steps = sorted(by_step.keys() & rows.keys())[-STEPS:]
        if not steps:
            raise CalibrationError(f"{path} holds no step with its episodes and its rollout/seconds")
        records = [episode.record for step in steps for episode in by_step[step]]
        scripts = recorded(records)
        if not scripts:
            raise CalibrationError(f"{path} holds no episode that was played to an end")
        chosen = [rows[step] for step in steps]
        return cls(
            folder.config(),
            scripts,
            len(records) // len(steps),
            median(row["rollout/seconds"] for row in chosen),
            _median(chosen, "time/generation"),
            _median(chosen, "time/environment", "time/judging"),
        )

    def setting(self, name: str, otherwise: Any) -> Any:
        """A value of the run's config, wherever it stands in it."""
        for section in (self.config, *(part for part in self.config.values() if isinstance(part, Mapping))):
            if section.get(name) is not None:
                return section[name]
        return otherwise


def _median(rows: Sequence[Mapping[str, float]], *names: str) -> float | None:
    found = [sum(row[name] for name in names) for row in rows if all(name in row for name in names)]
    return median(found) if found else None


def calibrated(run: PastRun, chat: ChatFormat, budget: TokenBudget, deployment: Deployment) -> Deployment:
    """The deployment with its times scaled so that the run's steps take as long as they did.

    Raises CalibrationError.
    """
    load = Load(run.scripts, len(run.scripts), budget)
    found = replace(deployment, batch=run.batch)
    for _ in range(ROUNDS):
        played = rehearse(chat, load, found)
        batches = len(run.scripts) / run.batch
        parts = split(episode.timing for episode in played.episodes if episode.timing is not None)
        rollout = sum(_batch_seconds(played, run.batch)) / batches
        share = {part: seconds / sum(parts.values()) for part, seconds in parts.items()}
        generation = rollout * share[Part.GENERATION]
        environment = rollout * (share[Part.ENVIRONMENT] + share[Part.JUDGING])
        wanted = run.generation_s
        if wanted is None:
            wanted = max(SMALLEST_S, run.rollout_s - (rollout - generation))
        found = replace(found, server=scaled(found.server, wanted / max(generation, SMALLEST_S)))
        if run.environment_s is not None:
            factor = max(run.environment_s, SMALLEST_S) / max(environment, SMALLEST_S)
            profile = found.environments
            times = replace(profile, call_s=profile.call_s * factor, network_s=profile.network_s * factor)
            found = replace(found, environments=times)
    return found


def _batch_seconds(played: Played, batch: int) -> list[float]:
    """How long each batch took."""
    found = []
    for first in range(0, len(played.episodes), batch):
        timings = [episode.timing for episode in played.episodes[first : first + batch] if episode.timing is not None]
        found.append(max(timing.ended for timing in timings) - min(timing.asked for timing in timings))
    return found
