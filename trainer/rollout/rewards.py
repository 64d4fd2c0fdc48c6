"""The reward functions that GRPOTrainer calls, one signal each, weighted by `reward_weights`.

They read the structured fields that the rollout hands over, one value per row, never text. A row whose episode
failed has None in every field, so TRL leaves it out of the group's baseline and gives it advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from env_server.settings import RewardSettings
from trainer.rollout.episodes import Episode, Outcome

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
REWARD_NAMES = tuple(function.__name__.removeprefix("reward_") for function in REWARD_FUNCTIONS)


def most_without_answer(weights: Sequence[float], settings: RewardSettings, step_budget: int) -> float:
    """Return an upper bound of the weighted sum of the rewards for an episode without a correct ANSWER.

    It is what GRPO optimises, and so what farming pays; `env_server.reward.wrong_total_bound` is that of the
    environment's own total. Progress and format lie in [0, 1]; the operational signals of n steps, unclipped, between
    n times the worst and n times the best step. `weights` are in the order of REWARD_FUNCTIONS.
    """
    _, progress, operational, format_share = weights
    bonuses = (0.0, settings.repeat, settings.success, settings.success + settings.repeat)
    steps = [settings.step_cost + bonus for bonus in (*bonuses, settings.success + settings.new_information)]
    paid = max(operational * step for step in steps)
    return max(0.0, progress) + max(paid, step_budget * paid) + max(0.0, format_share)


def reward_fields(episodes: Sequence[Episode], settings: RewardSettings) -> dict[str, Rewards]:
    """The fields that the reward functions read, one value per episode; None for a failed one."""

    def field(of: Any) -> Rewards:
        return [None if e.outcome is Outcome.FAILED else float(of(e)) for e in episodes]

    return {
        "correctness": field(lambda e: e.correct),
        "progress": field(lambda e: sum(t.reward.progress for t in e.turns) / settings.progress_scale),
        "operational": field(lambda e: sum(t.reward.operational for t in e.turns)),
        "format_share": field(lambda e: sum(t.parseable for t in e.turns) / max(1, len(e.turns))),
    }


def reward_columns(episodes: Sequence[Episode], settings: RewardSettings) -> list[list[float]]:
    """The values of each reward function over the episodes that did not fail, in the order of REWARD_FUNCTIONS."""
    fields = reward_fields([e for e in episodes if e.outcome is not Outcome.FAILED], settings)
    return [[value or 0.0 for value in function(**fields)] for function in REWARD_FUNCTIONS]
