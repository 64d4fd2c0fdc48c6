"""The reward functions that GRPOTrainer calls, one signal each, weighted by `reward_weights`.

They read the structured fields that the rollout hands over, one value per row, never text. A row whose episode
failed has None in every field, so TRL leaves it out of the group's baseline and gives it advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from env_server.settings import RewardSettings
from trainer.episodes import Episode, Outcome

Rewards = list[float | None]


def reward_correctness(*, correctness: Sequence[float | None], **_: Any) -> Rewards:
    """1.0 when the ANSWER was judged correct, else 0.0."""
    return list(correctness)


def reward_progress(*, progress: Sequence[float | None], **_: Any) -> Rewards:
    """How close the episode's best query came to the gold rows, in [0, 1]."""
    return list(progress)


def reward_operational(*, operational: Sequence[float | None], **_: Any) -> Rewards:
    """Sum of the operational signals (step cost, success, new information, repeats) over the episode."""
    return list(operational)


def reward_format(*, format_share: Sequence[float | None], **_: Any) -> Rewards:
    """Share of the turns that were parseable as an action, in [0, 1]."""
    return list(format_share)


REWARD_FUNCTIONS: tuple[Callable[..., Rewards], ...] = (
    reward_correctness,
    reward_progress,
    reward_operational,
    reward_format,
)


def reward_fields(episodes: Sequence[Episode], settings: RewardSettings) -> dict[str, Rewards]:
    """The fields that the reward functions read, one value per episode; None for a failed one."""

    def field(of: Any) -> Rewards:
        return [None if e.outcome is Outcome.FAILED else float(of(e)) for e in episodes]

    return {
        "correctness": field(lambda e: e.correct),
        "progress": field(lambda e: sum(t.reward.progress for t in e.turns) / settings.progress_scale),
        "operational": field(lambda e: sum(t.reward.operational for t in e.turns)),
        "format_share": field(lambda e: sum(t.parseable for t in e.turns) / len(e.turns)),
    }
