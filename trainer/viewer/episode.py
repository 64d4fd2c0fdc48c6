"""One episode as it is shown, turn by turn. Pure.

Promises: the parts of a turn's reward that are shown, what the clip took or gave back among them, add up to the turn's
reward, and the turns' rewards to the episode's.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from env_server.types import RewardComponents
from trainer.eval.failure_kinds import failure_kind
from trainer.rollout.episodes import EpisodeRecord


def episode_view(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode with its turns; of each its parts of the reward and the total so far."""
    total = 0.0
    turns = []
    for turn in record.turns:
        total += turn["reward"]["total"]
        parts = RewardComponents.model_validate(turn["reward"]).parts
        turns.append({**turn, "parts": parts, "total": round(total, 6)})
    kind = failure_kind(record)
    return {**asdict(record), "turns": turns, "kind": kind, "why": "" if kind is None else kind.meaning}
