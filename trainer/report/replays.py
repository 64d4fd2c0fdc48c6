"""Episodes turn by turn, and which questions the report shows as they were played before and after.

The choice follows a fixed rule that shows losses too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from env_server.types import RewardComponents
from trainer.eval.failure_kinds import failure_kind
from trainer.eval.run_files import RunFolderError
from trainer.eval.statistics import keyed, successful
from trainer.rollout.episodes import EpisodeRecord

CHOSEN = (
    ("Wrong before, right after", False, True, 4),
    ("Right before, wrong after", True, False, 1),
    ("Wrong before and after", False, False, 1),
)
RANDOM = 2
"""Questions that are drawn at random."""
Pair = tuple[EpisodeRecord, EpisodeRecord]


def episode_view(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode with its turns, each with the parts of its reward and the total so far, and why it failed.

    The parts, the clip among them, add up to the turn's reward, and the turns' rewards to the episode's. Raises
    RunFolderError when a turn is malformed.
    """
    total = 0.0
    turns = []
    try:
        for turn in record.turns:
            total += turn["reward"]["total"]
            parts = RewardComponents.model_validate(turn["reward"]).parts
            turns.append({**turn, "parts": parts, "total": round(total, 6)})
        kind = failure_kind(record)
    except (KeyError, TypeError, ValidationError) as error:
        raise RunFolderError(f"episode {record.episode_id}: a turn cannot be read: {error!r}") from error
    return {**asdict(record), "turns": turns, "kind": kind, "why": "" if kind is None else kind.meaning}


def replays(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> list[tuple[str, Pair]]:
    """Return up to eight questions as played on both sides, each with the reason why it is shown.

    Up to four that went from wrong to right (varied in kind and database, short ones first), then up to one that
    went the other way and one that stayed wrong, then two of all others, drawn at random; the same ones each time.
    """
    left, right = keyed(before), keyed(after)
    rest = [(left[key], right[key]) for key in sorted(left.keys() & right.keys())]
    shown: list[tuple[str, Pair]] = []
    for reason, was, now, limit in CHOSEN:
        candidates = [pair for pair in rest if (successful(pair[0]), successful(pair[1])) == (was, now)]
        shown += [(reason, pair) for pair in _varied(candidates, limit)]
    rest = [pair for pair in rest if all(pair is not other for _, other in shown)]
    drawn = random.Random(0).sample(rest, min(RANDOM, len(rest)))
    return [*shown, *(("Drawn at random", pair) for pair in drawn)]


def _varied(pairs: Sequence[Pair], limit: int) -> list[Pair]:
    """Choose pairs that share as little as possible with those already chosen, the shortest of them."""
    chosen: list[Pair] = []
    rest = list(pairs)

    def cost(pair: Pair) -> tuple[int, int]:
        fields = ("question_id", "family", "hardness", "db_id")
        shared = sum(getattr(pair[0], name) == getattr(other[0], name) for other in chosen for name in fields)
        return shared, pair[0].steps + pair[1].steps

    while rest and len(chosen) < limit:
        chosen.append(min(rest, key=cost))
        rest.remove(chosen[-1])
    return chosen
