"""Which questions the report shows as they were played before and after, and how a turn is shown.

The choice follows a fixed rule that shows losses too. Long texts are cut and marked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from env_server.types import RewardComponents
from trainer.eval.run_files import RunFolderError
from trainer.eval.statistics import keyed, successful
from trainer.rollout.episodes import EpisodeRecord, Outcome, Turn

TEXT_LIMIT = 600
RANDOM = 2
"""Questions that are drawn at random."""
OUTCOMES = {
    Outcome.CORRECT: "correct",
    Outcome.WRONG: "wrong answer",
    Outcome.OUT_OF_BUDGET: "out of steps",
    Outcome.OUT_OF_TOKENS: "out of tokens",
    Outcome.FAILED: "failed (infrastructure; not counted)",
}
_TURN = TypeAdapter(Turn)


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as it is shown."""

    text: str
    output: str
    is_error: bool
    note: str
    reward: str
    components: str


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One side of a replay."""

    label: str
    outcome: str
    reward: str
    correct: bool
    turns: list[TurnView]


@dataclass(frozen=True, slots=True)
class Replay:
    """The same question before and after."""

    kind: str
    question: str
    about: str
    sides: list[EpisodeView]


def replays(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> list[Replay]:
    """Return up to eight questions as played on both sides.

    Up to four that went from wrong to right (varied in kind and database, short ones first), then up to one that
    went the other way and one that stayed wrong, then two of all others, drawn at random; the same ones each time.
    """
    left, right = keyed(before), keyed(after)
    pairs = [(left[key], right[key]) for key in sorted(left.keys() & right.keys())]
    kinds = (
        ("Wrong before, right after", False, True, 4),
        ("Right before, wrong after", True, False, 1),
        ("Wrong before and after", False, False, 1),
    )
    shown: list[tuple[str, EpisodeRecord, EpisodeRecord]] = []
    for name, was, now, limit in kinds:
        candidates = [(b, a) for b, a in pairs if (successful(b), successful(a)) == (was, now)]
        for b, a in varied(candidates, limit):
            shown.append((name, b, a))
    taken = {id(b) for _, b, _ in shown}
    rest = [pair for pair in pairs if id(pair[0]) not in taken]
    drawn = random.Random(0).sample(rest, min(RANDOM, len(rest)))
    return [_replay(name, b, a) for name, b, a in (*shown, *(("Drawn at random", b, a) for b, a in drawn))]


def _replay(name: str, before: EpisodeRecord, after: EpisodeRecord) -> Replay:
    about = ", ".join(part for part in (f"database {before.db_id}", before.hardness, before.family) if part)
    sides = [episode_view("before", before), episode_view("after", after)]
    return Replay(name, cut(before.question), cut(about, 200), sides)


def varied(
    pairs: Sequence[tuple[EpisodeRecord, EpisodeRecord]], limit: int
) -> list[tuple[EpisodeRecord, EpisodeRecord]]:
    """Choose pairs that share as little as possible with those already chosen, the shortest of them."""
    chosen: list[tuple[EpisodeRecord, EpisodeRecord]] = []
    rest = list(pairs)

    def cost(pair: tuple[EpisodeRecord, EpisodeRecord]) -> tuple[int, int]:
        shared = sum(
            getattr(pair[0], field) == getattr(other[0], field)
            for other in chosen
            for field in ("question_id", "family", "hardness", "db_id")
        )
        return shared, pair[0].steps + pair[1].steps

    while rest and len(chosen) < limit:
        best = min(rest, key=cost)
        rest.remove(best)
        chosen.append(best)
    return chosen


def episode_view(label: str, record: EpisodeRecord) -> EpisodeView:
    """Return an episode as it is shown. Raises RunFolderError when a turn is not one."""
    try:
        turns = [turn_view(_TURN.validate_python(turn)) for turn in record.turns]
    except ValidationError as error:
        raise RunFolderError(f"episode {record.episode_id}: a turn cannot be read: {error}") from error
    outcome = OUTCOMES[Outcome(record.outcome)] if record.outcome in OUTCOMES else record.outcome
    return EpisodeView(label, outcome, f"{record.reward:+.2f}", successful(record), turns)


def turn_view(turn: Turn) -> TurnView:
    """Return a turn as it is shown."""
    note = "" if turn.parseable else "not in the action format: taken as a raw query"
    return TurnView(
        text=cut(turn.text.strip()) or "(no text)",
        output=cut(turn.error or turn.result),
        is_error=bool(turn.error),
        note=note,
        reward=f"{turn.reward.total:+.2f}",
        components=components(turn.reward),
    )


def components(reward: RewardComponents) -> str:
    """Return the parts of a step's reward, which add up to it."""
    return ", ".join(f"{name.replace('_', ' ')} {value:+.2f}" for name, value in reward.parts.items())


def cut(text: str, limit: int = TEXT_LIMIT) -> str:
    """Cut a long text and say how much is gone."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
