"""Two evaluations compared question by question. Pure: no I/O, no randomness.

Guarantees:

1. A question is compared where both sides were judged on it, under the same id, text and database, whatever the order
   of the files. What is left out is counted and reported.
2. Swapping the sides gives the same comparison with every difference negated.
3. Every difference is paired, and has a 95% interval with the database as its cluster: of success and failures as
   `statistics.paired_difference` has it (jackknife over databases, t(G - 1), Bonett and Price's interval), of means as
   `statistics.mean_difference`. They are not adjusted for their number: of twenty that are truly 0, one is expected to
   exclude it.
4. What makes the two sides not comparable, or not quite, is in `warnings`. Nothing in common is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from env_server.errors import SQLEnvError
from trainer.eval.failure_kinds import FailureKind, failure_kind
from trainer.eval.run_files import Differing, Evaluation, RunFolder, differing
from trainer.eval.statistics import (
    HARDNESS,
    GroupSummary,
    MeanDifference,
    PairedDifference,
    compare_pairs,
    group_summary,
    judged,
    keyed,
    mean_difference,
    successful,
)
from trainer.rollout.episodes import EpisodeRecord

Pair = tuple[EpisodeRecord, EpisodeRecord]


@dataclass(frozen=True, slots=True)
class Mean:
    """What is compared by its mean: an episode's value and its weight, and how it and a difference are written."""

    label: str
    of: Callable[[EpisodeRecord], tuple[float | None, float]]
    text: str
    change: str
    scale: int = 1
    """Of a difference."""


MEANS = {
    "reward": Mean("reward per episode", lambda r: (r.reward, 1), "{:+.2f}", "{:+.2f}"),
    "steps": Mean("steps", lambda r: (r.steps, 1), "{:.1f}", "{:+.1f}"),
    "tokens": Mean(
        "generated tokens", lambda r: (None if r.prompt_tokens is None else r.tokens, 1), "{:,.0f}", "{:+,.0f}"
    ),
    "prompt_tokens": Mean("prompt tokens", lambda r: (r.prompt_tokens, 1), "{:,.0f}", "{:+,.0f}"),
    "parse_rate": Mean("turns that parsed", lambda r: (r.parse_rate, r.steps), "{:.1%}", "{:+.1f}", 100),
}
"""As in `EvaluationSummary` and `Exploration`; None where it is not known."""


class SideError(SQLEnvError):
    """What is to be compared does not exist, or cannot be compared; the text names what to give instead."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side. `evaluation` is None for a file of episodes alone; `run` is the run that it belongs to, if any.

    `settings`: how it was played, as far as that matters to this policy and is known. `flags`: what the run was started
    with.
    """

    name: str
    records: list[EpisodeRecord]
    evaluation: Evaluation | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    run: RunFolder | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SideFacts:
    """What is known of a side; empty where it is not. `judged` and `failed` count all its episodes.

    `unmatched` were judged on this side only, `mismatched` have an id that is another question's on the other side.
    """

    name: str
    policy: str
    data: str
    split: str
    answer_mode: str
    judged: int
    failed: int
    unmatched: int
    mismatched: int


@dataclass(frozen=True, slots=True)
class GroupDifference:
    """The success of both sides on the same questions, and the paired difference, B minus A."""

    a: GroupSummary
    b: GroupSummary
    difference: PairedDifference


@dataclass(frozen=True, slots=True)
class FailureDifference:
    """How many of the compared episodes failed in one way, and the paired difference of their shares."""

    a: int
    b: int
    difference: PairedDifference


@dataclass(frozen=True, slots=True)
class Ending:
    """How an episode ended, why it failed if it did, and its last action."""

    outcome: str
    failure: str
    steps: int
    last_action: str


@dataclass(frozen=True, slots=True)
class Flip:
    """A question that one side got right and the other did not."""

    question_id: str
    question: str
    database: str
    difficulty: str
    a: Ending
    b: Ending


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides on the questions that both were judged on; every difference is B minus A.

    `means` are those that are known on both sides; `failures`, by kind, are of those that are not right. `gained`: only
    B got them right; `lost`: only A did; round-robin over the databases. `settings`: how they were played differently.
    `flags`: what two runs were started with differently.
    """

    a: SideFacts
    b: SideFacts
    warnings: list[str]
    success: GroupDifference
    by_difficulty: dict[str, GroupDifference]
    by_family: dict[str, GroupDifference]
    by_database: dict[str, GroupDifference]
    means: dict[str, MeanDifference]
    failures: dict[str, FailureDifference]
    gained: list[Flip]
    lost: list[Flip]
    settings: list[Differing]
    flags: list[Differing]


def compare_sides(a: Side, b: Side) -> Comparison:
    """Compare two sides; B's success minus A's. Raises SideError when they have no judged question in common."""
    left, right = keyed(a.records), keyed(b.records)
    common = left.keys() & right.keys()
    same = sorted(key for key in common if _identity(left[key]) == _identity(right[key]))
    mismatched = len(common) - len(same)
    facts = (
        _facts(a, len(left.keys() - right.keys()), mismatched),
        _facts(b, len(right.keys() - left.keys()), mismatched),
    )
    if not same:
        raise SideError(_nothing_in_common(*facts))
    pairs = [(left[key], right[key]) for key in same]
    settings = [d for d in differing(a.settings, b.settings) if d.name in a.settings and d.name in b.settings]
    names = [d.name for d in settings]
    return Comparison(
        a=facts[0],
        b=facts[1],
        warnings=[*_warnings(*facts, len(same), names), *dict.fromkeys((*a.notes, *b.notes))],
        success=_group_difference(pairs),
        by_difficulty=_by(pairs, "hardness", HARDNESS),
        by_family=_by(pairs, "family"),
        by_database=_by(pairs, "db_id"),
        means={name: mean for name, one in MEANS.items() if (mean := _mean_difference(pairs, one)) is not None},
        failures=_failures(pairs),
        gained=[_flip(pair) for pair in _round_robin(pairs) if successful(pair[1]) > successful(pair[0])],
        lost=[_flip(pair) for pair in _round_robin(pairs) if successful(pair[1]) < successful(pair[0])],
        settings=settings,
        flags=[d for d in differing(a.flags, b.flags) if d.name not in names] if a.flags and b.flags else [],
    )


def _identity(record: EpisodeRecord) -> tuple[str, str]:
    return record.db_id, record.question


def _facts(side: Side, unmatched: int, mismatched: int) -> SideFacts:
    of = side.evaluation
    known = ("", "", "", "") if of is None else (of.policy, of.data, of.split, of.answer_mode)
    count = len(judged(side.records))
    return SideFacts(side.name, *known, count, len(side.records) - count, unmatched, mismatched)


def _played_on(facts: SideFacts) -> str:
    return f"{facts.data}, split {facts.split}" if facts.data else "unknown data"


def _nothing_in_common(a: SideFacts, b: SideFacts) -> str:
    clash = f" ({a.mismatched} have the same id but another text or database)" if a.mismatched else ""
    sides = " and ".join(f"{side.name} was judged on {side.judged} of {_played_on(side)}" for side in (a, b))
    return (
        f"they have no question in common{clash}: {sides}. Play both on the same questions: sqlenv evaluate --policy "
        "POLICY --data DATA --split SPLIT --episodes N --episodes_out FILE.jsonl"
    )


def _warnings(a: SideFacts, b: SideFacts, n: int, settings: Sequence[str]) -> list[str]:
    """What makes two sides not quite comparable, the gravest first; `settings`: which of play's differ."""
    found = []
    known = bool(a.data and b.data)
    if known and a.answer_mode != b.answer_mode:
        found.append(
            f"A answers as {a.answer_mode}, B as {b.answer_mode} (--answer_mode): they are not judged alike, "
            "and a difference may be due to that"
        )
    if a.unmatched or b.unmatched or a.mismatched:
        parts = [f"A alone has {a.unmatched} more", f"B alone {b.unmatched}"]
        if a.mismatched:
            parts.append(f"{a.mismatched} have one id but another text or database on each side")
        found.append(
            f"not the same questions: compared are the {n} that both were judged on; {', '.join(parts)}. "
            "To compare all, play both with the same --data, --split, --episodes and --samples"
        )
    if known and _played_on(a) != _played_on(b):
        found.append(
            f"the names of the data differ (A {_played_on(a)}; B {_played_on(b)}), though its questions have the same "
            "id, text and database"
        )
    if settings:
        found.append(f"they were not played alike: {', '.join(settings)}")
    if a.failed or b.failed:
        found.append(f"errored episodes (infrastructure) are left out: {a.failed} of A, {b.failed} of B")
    return found


def _group_difference(pairs: Sequence[Pair]) -> GroupDifference:
    a, b = ([pair[side] for pair in pairs] for side in (0, 1))
    return GroupDifference(group_summary(a), group_summary(b), compare_pairs(pairs))


def _by(pairs: Sequence[Pair], field: str, order: Sequence[str] = ()) -> dict[str, GroupDifference]:
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(getattr(pair[0], field), []).append(pair)
    places = {name: i for i, name in enumerate(order)}
    names = sorted(filter(None, groups), key=lambda name: (places.get(name, len(order)), name))
    return {name: _group_difference(groups[name]) for name in names}


def _mean_difference(pairs: Sequence[Pair], mean: Mean) -> MeanDifference | None:
    """The difference of a mean; None where the value of an episode is not known."""
    a, b = ([(n, weight) for n, weight in map(mean.of, side) if n is not None] for side in zip(*pairs, strict=True))
    if min(len(a), len(b)) < len(pairs):
        return None
    return mean_difference(a, b, [one.db_id for one, _ in pairs], [one.question_id for one, _ in pairs])


def _failures(pairs: Sequence[Pair]) -> dict[str, FailureDifference]:
    left, right = Counter(_failure(a) for a, _ in pairs), Counter(_failure(b) for _, b in pairs)

    def difference(kind: FailureKind) -> PairedDifference:
        return compare_pairs(pairs, lambda record: _failure(record) == kind)

    return {k.value: FailureDifference(left[k], right[k], difference(k)) for k in FailureKind if k in left | right}


def _failure(record: EpisodeRecord) -> str:
    kind = failure_kind(record)
    return "" if kind is None else kind.value


def _round_robin(pairs: Sequence[Pair]) -> list[Pair]:
    """One pair of each database, then the next of each: the first ones are of many databases."""
    seen: Counter[str] = Counter()
    places = []
    for pair in pairs:
        places.append((seen[pair[0].db_id], pair[0].db_id))
        seen[pair[0].db_id] += 1
    return [pair for _, pair in sorted(zip(places, pairs, strict=True), key=lambda placed: placed[0])]


def _flip(pair: Pair) -> Flip:
    a, b = pair
    return Flip(a.question_id, a.question, a.db_id, a.hardness, _ending(a), _ending(b))


def _ending(record: EpisodeRecord) -> Ending:
    last = record.turns[-1] if record.turns else {}
    action = f"{last.get('action_type', '')} {last.get('argument', '')}".strip()
    return Ending(record.outcome, _failure(record), record.steps, action)
