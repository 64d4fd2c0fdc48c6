"""An evaluation with its episodes."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.eval.run_files import Evaluation
from trainer.rollout.episodes import EpisodeRecord


@dataclass(frozen=True, slots=True)
class Played:
    """An evaluation with its episodes."""

    evaluation: Evaluation
    records: list[EpisodeRecord]
