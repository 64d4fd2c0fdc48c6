"""A rank among several, without the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from accelerate import PartialState


def rank_state(index: int, count: int) -> PartialState:
    """Return what `trainer.ranks.Ranks` reads of accelerate's state."""
    return cast("PartialState", SimpleNamespace(process_index=index, num_processes=count))
