"""The numbers of a batch of episodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from env_server.types import ActionType, RewardComponents
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.rollout.rewards import REWARD_FUNCTIONS
from trainer.training.batch_summary import EpisodeSummary
from trainer.training.rollout_metrics import BatchTimes, drawn_metrics, rollout_metrics

TIMES = BatchTimes(seconds=2.0, idle=0.0)


def episode_with(
    outcome: Outcome,
    rewards: Sequence[float] = (),
    truncated: int = 0,
    mask: Sequence[int] = (),
    versions: Sequence[int] = (3, 3, 3),
) -> EpisodeSummary:
    turns = tuple(
        Turn("", ActionType.QUERY, "", True, "", "", RewardComponents(total=r), version, tokens=2)
        for r, version in zip(rewards, versions, strict=False)
    )
    row = TokenRow([1], [2] * len(mask), [0.0] * len(mask), list(mask), [0] * len(mask))
    episode = Episode("e", "q", "d", "", "easy", "f", outcome, turns, row, truncated)
    return EpisodeSummary.of(episode, REWARD_FUNCTIONS)


def test_metrics_of_a_batch() -> None:
    episodes = [
        episode_with(Outcome.CORRECT, [0.01, 1.0], mask=[1, 0, 1], versions=[3, 2]),
        episode_with(Outcome.WRONG, [-0.02], truncated=2, mask=[0, 1]),
        episode_with(Outcome.OUT_OF_BUDGET, [0.0] * 3, mask=[1], versions=[1, 1, 1]),
        episode_with(Outcome.OUT_OF_TOKENS, [0.01] * 2, truncated=1, mask=[1], versions=[2, 3]),
        episode_with(Outcome.FAILED, mask=[0]),
    ]
    assert {**rollout_metrics(episodes, TIMES, 3), **drawn_metrics([episodes])} == pytest.approx(
        {
            "rollout/success_rate": 1 / 4,
            "rollout/reward": (1.01 - 0.02 + 0.0 + 0.02) / 4,
            "rollout/exploration_entropy": 0.75,  # of two that explored alike, and two others
            "rollout/steps": (2 + 1 + 3 + 2) / 4,
            "rollout/out_of_budget": 1 / 5,
            "rollout/out_of_tokens": 1 / 5,
            "rollout/failed": 1,
            "rollout/truncated": 2,
            "rollout/trained_tokens": 5,
            "rollout/trained_token_share": 5 / (2 * 8),
            "rollout/staleness/mean": (0 + 1 + 0 + 2 + 2 + 2 + 1 + 0) / 8,
            "rollout/staleness/max": 2,
            "rollout/seconds": 2.0,
            "rollout/idle_seconds": 0.0,
            "rollout/episodes_per_second": 2.5,
        }
    )


def test_explorations_differ_in_what_was_done_and_not_in_how_it_is_written_or_answered() -> None:
    def exploring(*actions: tuple[str, str]) -> EpisodeSummary:
        turns = tuple(Turn("", kind, argument, True, "", "", RewardComponents()) for kind, argument in actions)
        row = TokenRow([1], [2], [0.0], [1], [0])
        return EpisodeSummary.of(Episode("e", "q", "d", "", "easy", "f", Outcome.WRONG, turns, row), REWARD_FUNCTIONS)

    count = exploring(("QUERY", "SELECT count(*) FROM pets"), ("ANSWER", "3"))
    written_otherwise = exploring(("QUERY", "select  count(*)\nfrom pets"), ("ANSWER", "4"))
    look = exploring(("DESCRIBE", "pets"), ("QUERY", "SELECT count(*) FROM pets"), ("ANSWER", "3"))

    def entropy(*groups: Sequence[EpisodeSummary]) -> float | None:
        return drawn_metrics(groups).get("rollout/exploration_entropy")

    assert entropy([count, written_otherwise]) == 0.0
    assert entropy([count, look]) == 1.0
    assert entropy([count, look], [count, count]) == 0.5
    assert entropy([count], [episode_with(Outcome.FAILED)]) is None


def test_metrics_when_every_episode_failed() -> None:
    episodes = [episode_with(Outcome.FAILED, mask=[0])]
    metrics = {**rollout_metrics(episodes, TIMES, 3), **drawn_metrics([episodes])}
    assert metrics["rollout/failed"] == 1
    assert metrics["rollout/trained_token_share"] == 1.0, "nothing that was generated is left out"
    assert metrics["rollout/success_rate"] == metrics["rollout/reward"] == metrics["rollout/steps"] == 0.0
