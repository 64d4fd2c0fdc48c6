"""What a batch of episodes was like, in the numbers that TRL, the run's log and every tracker get. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from trainer.rollout.episodes import Outcome
from trainer.training.batch_summary import EpisodeGroup, EpisodeSummary


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """How long a batch took, in seconds; of several ranks, as the slowest saw it."""

    seconds: float
    """From its first episode's beginning to its last one's end."""
    idle: float
    """That it lay there, complete, before the trainer asked for it."""


def rollout_metrics(episodes: Sequence[EpisodeSummary], times: BatchTimes, step: int) -> dict[str, float]:
    """Numbers of the batch that is trained on, at a step; shares are of all episodes, means of those that did not fail.

    Staleness counts the updates between a turn's weights and those that it is trained on.
    """
    count = len(episodes)
    played = [e for e in episodes if e.outcome is not Outcome.FAILED]
    outcomes = Counter(e.outcome for e in episodes)
    trained, generated = sum(e.trained_tokens for e in played), sum(e.generated_tokens for e in played)
    ages = [step - version for e in played for version in e.policy_versions]
    return {
        "rollout/steps": fmean(len(e.policy_versions) for e in played) if played else 0.0,
        "rollout/out_of_budget": outcomes[Outcome.OUT_OF_BUDGET] / count,
        "rollout/out_of_tokens": outcomes[Outcome.OUT_OF_TOKENS] / count,
        "rollout/failed": outcomes[Outcome.FAILED],
        "rollout/truncated": sum(e.truncated_turns > 0 for e in episodes),
        "rollout/trained_tokens": sum(e.trained_tokens for e in episodes),
        "rollout/trained_token_share": trained / generated if generated else 1.0,
        "rollout/staleness/mean": fmean(ages) if ages else 0.0,
        "rollout/staleness/max": max(ages, default=0),
        "rollout/seconds": times.seconds,
        "rollout/idle_seconds": times.idle,
        "rollout/episodes_per_second": count / times.seconds,
    }


def drawn_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """How well the policy did, and how variously, in the groups that were drawn first, whether kept or replaced.

    Those that are trained on were chosen by their results, and would tell another rate.
    """
    judged = [[e for e in group if e.outcome is not Outcome.FAILED] for group in groups]
    played = [e for group in judged for e in group]
    metrics = {
        "rollout/success_rate": fmean(e.correct for e in played) if played else 0.0,
        "rollout/reward": fmean(e.reward for e in played) if played else 0.0,
    }
    entropies = [_exploration_entropy(group) for group in judged if len(group) > 1]
    if entropies:
        metrics["rollout/exploration_entropy"] = fmean(entropies)
    return metrics


def guided_metrics(rows: Sequence[EpisodeSummary], guided: Sequence[EpisodeSummary]) -> dict[str, float]:
    """The part of guided episodes in the rows that are trained on; of all that were played, success and steps given."""
    played = [e for e in guided if e.outcome is not Outcome.FAILED]
    metrics = {"rollout/guided_share": fmean(e.given_steps > 0 for e in rows)}
    if played:
        metrics["rollout/guided_success"] = fmean(e.correct for e in played)
        metrics["rollout/given_steps"] = fmean(e.given_steps for e in played)
    return metrics


def _exploration_entropy(group: EpisodeGroup) -> float:
    """Return the entropy of what a question's episodes explored, as a share of its greatest: 1 where no two agree."""
    shares = [count / len(group) for count in Counter(e.explored for e in group).values()]
    return sum(share * math.log(1 / share) for share in shares) / math.log(len(group))
