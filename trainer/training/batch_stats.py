"""What the ranks of a run exchange of a batch, and the metrics that the log and every tracker get of it. Pure.

Every rank needs the results of all: the metrics, adaptive weights and the limit of failures are the same everywhere.
None needs the others' tokens and texts, which are a hundred times as large, and which with hundreds of ranks would take
each of them longer to read than a step takes.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from env_server.reward import normalize_action
from env_server.types import ActionType
from trainer.rollout.episodes import EpisodeRecord, Outcome, has_signal

Group = Sequence[EpisodeRecord]
"""The episodes of one question."""


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """The episodes of a batch, or of a rank's part of one."""

    rows: list[EpisodeRecord]
    """Those that are trained on, in the order of the rows."""
    others: list[EpisodeRecord] = field(default_factory=list)
    """Those that were played beside them."""
    drawn_first: list[Group] = field(default_factory=list)
    """Whole groups, as many as the batch has, chosen by no result. Empty where no group was judged."""
    replaced: int = 0
    """Groups without signal that were filtered."""
    guided: list[Group] = field(default_factory=list)
    """Played with steps given, since the unguided group of the question was all wrong."""

    @property
    def failures(self) -> list[str]:
        """The causes of the episodes that failed."""
        return [each.failure for each in (*self.rows, *self.others) if each.failed]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """How long a batch took, in seconds; of several ranks, as the slowest saw it."""

    seconds: float
    """From its first episode's beginning to its last one's end."""
    idle: float
    """That it lay there, complete, before the trainer asked for it."""


def without_texts(record: EpisodeRecord) -> EpisodeRecord:
    """Return what ranks exchange of an episode: of its turns, what is counted, and a digest for an action's argument.

    Actions that are equal to the environment have equal digests, on every rank.
    """
    turns = []
    for turn in record.turns:
        action = normalize_action(turn["action_type"], turn["argument"])
        digest = hashlib.blake2b(action.encode(), digest_size=8).hexdigest()
        turns.append({name: turn[name] for name in ("action_type", "tokens", "policy_version")} | {"argument": digest})
    return replace(record, question="", turns=turns)


def of_all_ranks(parts: Sequence[BatchRecords], generations: int) -> BatchRecords:
    """Put the ranks' parts together, in the order of the ranks.

    Where no group was judged, a group of `generations` rows may have some on one rank and some on the next.
    """
    rows = [row for part in parts for row in part.rows]
    return BatchRecords(
        rows=rows,
        others=[other for part in parts for other in part.others],
        drawn_first=[group for part in parts for group in part.drawn_first] or groups_of(rows, generations),
        replaced=sum(part.replaced for part in parts),
        guided=[group for part in parts for group in part.guided],
    )


def groups_of(rows: Sequence[EpisodeRecord], generations: int) -> list[Group]:
    """Cut a batch's rows into its groups."""
    return [rows[first : first + generations] for first in range(0, len(rows), generations)]


def batch_metrics(batch: BatchRecords, generations: int, times: BatchTimes, step: int) -> dict[str, float]:
    """Numbers of a batch that is trained on at a step; shares are of all rows, means of those that did not fail.

    Success, reward and exploration are those of the groups that were drawn first, whether kept or replaced: those that
    are trained on were chosen by their results, and would show another rate. Staleness counts the updates between a
    turn's weights and those that it is trained on.
    """
    rows = batch.rows
    played = [each for each in rows if not each.failed]
    outcomes = Counter(each.outcome for each in rows)
    trained, generated = sum(each.tokens for each in played), sum(each.generated_tokens for each in played)
    ages = [step - turn["policy_version"] for each in played for turn in each.own_turns]
    judged = [[each for each in group if not each.failed] for group in batch.drawn_first]
    drawn = [each for group in judged for each in group]
    metrics = {
        "rollout/steps": fmean(len(each.own_turns) for each in played) if played else 0.0,
        "rollout/out_of_budget": outcomes[Outcome.OUT_OF_BUDGET] / len(rows),
        "rollout/out_of_tokens": outcomes[Outcome.OUT_OF_TOKENS] / len(rows),
        "rollout/failed": outcomes[Outcome.FAILED],
        "rollout/truncated": sum(each.truncated_turns > 0 for each in rows),
        "rollout/trained_tokens": sum(each.tokens for each in rows),
        "rollout/trained_token_share": trained / generated if generated else 1.0,
        "rollout/staleness/mean": fmean(ages) if ages else 0.0,
        "rollout/staleness/max": max(ages, default=0),
        "rollout/seconds": times.seconds,
        "rollout/idle_seconds": times.idle,
        "rollout/episodes_per_second": len(rows) / times.seconds,
        "rollout/success_rate": fmean(each.correct for each in drawn) if drawn else 0.0,
        "rollout/reward": fmean(each.reward for each in drawn) if drawn else 0.0,
        "rollout/replaced": batch.replaced,
        "rollout/no_signal": fmean(not has_signal(group) for group in groups_of(rows, generations)),
    }
    if entropies := [_exploration_entropy(group) for group in judged if len(group) > 1]:
        metrics["rollout/exploration_entropy"] = fmean(entropies)
    return metrics


def guided_metrics(batch: BatchRecords) -> dict[str, float]:
    """The part of guided episodes in the rows that are trained on; of all that were played, success and steps given."""
    played = [each for group in batch.guided for each in group if not each.failed]
    metrics = {"rollout/guided_share": fmean(each.given_steps > 0 for each in batch.rows)}
    if played:
        metrics["rollout/guided_success"] = fmean(each.correct for each in played)
        metrics["rollout/given_steps"] = fmean(each.given_steps for each in played)
    return metrics


def _exploration_entropy(group: Group) -> float:
    """Return the entropy of what a question's episodes explored, as a share of its greatest: 1 where no two agree."""
    explored = Counter(
        tuple(turn["argument"] for turn in each.turns if turn["action_type"] != ActionType.ANSWER) for each in group
    )
    shares = [count / len(group) for count in explored.values()]
    return sum(share * math.log(1 / share) for share in shares) / math.log(len(group))
