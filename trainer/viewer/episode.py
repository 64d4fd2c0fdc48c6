"""One episode as it is shown, turn by turn. Pure.

Promises: the parts of a turn's reward that are shown, what the clip took or gave back among them, add up to the turn's
reward, and the turns' rewards to the episode's.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainer.results.failure_kinds import FailureKind, failure_kind
from trainer.rollout.episodes import EpisodeRecord

PARTS = ("step_cost", "success", "new_information", "repeat", "progress", "terminal")
CLIPPED = "clipped"
"""What the clip of a step's operational and progress parts adds to them."""
NOTHING = 1e-9


def episode_view(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode with its turns; of each its parts of the reward and the total so far."""
    total = 0.0
    turns = []
    for turn in record.turns:
        total += turn["reward"]["total"]
        turns.append({**turn, "parts": reward_parts(turn["reward"]), "total": round(total, 6)})
    kind = failure_kind(record)
    return {
        **asdict(record),
        "turns": turns,
        "kind": None if kind is None else kind.value,
        "why": "" if kind is None else FailureKind(kind).meaning,
    }


def reward_parts(reward: dict[str, float]) -> dict[str, float]:
    """Return the parts of a step's reward that are not nothing."""
    parts = {name: reward[name] for name in PARTS}
    parts[CLIPPED] = reward["total"] - sum(parts.values())
    return {name: round(value, 6) for name, value in parts.items() if abs(value) > NOTHING}
