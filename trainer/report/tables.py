"""What the report's tables are made of, and from."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.results.run_files import Evaluation
from trainer.rollout.episodes import EpisodeRecord

NONE = "-"
"""A cell that nothing is known for."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text: the first cell of a row is its heading."""

    caption: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Played:
    """An evaluation with its episodes."""

    evaluation: Evaluation
    records: list[EpisodeRecord]
