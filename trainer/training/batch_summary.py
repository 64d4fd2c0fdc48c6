"""What the ranks of a run tell each other of a batch. Pure.

Every rank needs the results of all: the metrics, adaptive weights and the limit of failures are the same everywhere.
None needs the others' tokens and texts, which are a hundred times as large, and which with hundreds of ranks would take
each of them longer to read than a step takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from env_server.reward import normalize_action
from env_server.types import ActionType
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.rewards import Reward


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What came of one group. Failed episodes are not in `played`."""

    question_id: str
    solved: int
    played: int


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """An episode in numbers."""

    question_id: str
    outcome: Outcome
    failure: str
    reward: float
    """Total environment reward."""
    rewards: tuple[float, ...]
    """What each of the run's rewards gives, 0 for None; empty where the episode failed."""
    policy_versions: tuple[int, ...]
    """Of each turn that the policy took."""
    truncated_turns: int
    trained_tokens: int
    generated_tokens: int
    """Of all turns, those that are no longer in the row among them."""
    given_steps: int = 0
    """First turns that were taken in the policy's place."""
    explored: bytes = b""
    """A digest of its actions before the ANSWER; of equal actions the same on every rank."""

    @classmethod
    def of(cls, episode: Episode, rewards: Sequence[Reward]) -> EpisodeSummary:
        """Sum up an episode."""
        return cls(
            question_id=episode.question_id,
            outcome=episode.outcome,
            failure=episode.failure,
            reward=episode.reward,
            rewards=() if episode.outcome is Outcome.FAILED else tuple(reward.of(episode) or 0.0 for reward in rewards),
            policy_versions=tuple(turn.policy_version for turn in episode.own_turns),
            given_steps=episode.given_steps,
            truncated_turns=episode.truncated_turns,
            trained_tokens=sum(episode.row.env_mask),
            generated_tokens=sum(turn.tokens or 0 for turn in episode.turns),
            explored=_digest(episode),
        )

    @property
    def correct(self) -> bool:
        """True when the ANSWER was judged correct."""
        return self.outcome is Outcome.CORRECT


EpisodeGroup = Sequence[EpisodeSummary]
"""The episodes of one question."""


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """A batch, or a rank's part of one."""

    rows: list[EpisodeSummary]
    """Those that are trained on, in the order of the rows."""
    others: list[EpisodeSummary] = field(default_factory=list)
    """Those that were played beside them."""
    drawn_first: list[EpisodeGroup] = field(default_factory=list)
    """Whole groups, as many as the batch has, chosen by no result. Empty where no group was judged."""
    replaced: int = 0
    """Groups that were played in vain."""
    guided: list[EpisodeGroup] = field(default_factory=list)
    """Played with steps given, since the unguided group of the question was all wrong."""

    @property
    def failures(self) -> list[str]:
        """The causes of the episodes that failed."""
        return [each.failure for each in (*self.rows, *self.others) if each.outcome is Outcome.FAILED]


def of_all_ranks(parts: Sequence[BatchSummary], generations: int) -> BatchSummary:
    """Put the ranks' parts together, in the order of the ranks.

    Where no group was judged, a group of `generations` rows may have some on one rank and some on the next.
    """
    rows = [row for part in parts for row in part.rows]
    return BatchSummary(
        rows=rows,
        others=[other for part in parts for other in part.others],
        drawn_first=[group for part in parts for group in part.drawn_first] or groups_of(rows, generations),
        replaced=sum(part.replaced for part in parts),
        guided=[group for part in parts for group in part.guided],
    )


def groups_of(rows: Sequence[EpisodeSummary], generations: int) -> list[EpisodeGroup]:
    """Cut a batch's rows into its groups."""
    return [rows[first : first + generations] for first in range(0, len(rows), generations)]


def _digest(episode: Episode) -> bytes:
    actions = [
        normalize_action(turn.action_type, turn.argument)
        for turn in episode.turns
        if turn.action_type != ActionType.ANSWER
    ]
    return hashlib.blake2b("\n".join(actions).encode(), digest_size=8).digest()


def summaries(episodes: Iterable[Episode], rewards: Sequence[Reward]) -> list[EpisodeSummary]:
    """Sum up each of `episodes`."""
    return [EpisodeSummary.of(episode, rewards) for episode in episodes]


def result_of(group: EpisodeGroup) -> GroupResult:
    """Return how a group's question was answered."""
    played = [each for each in group if each.outcome is not Outcome.FAILED]
    return GroupResult(group[0].question_id, sum(each.correct for each in played), len(played))
