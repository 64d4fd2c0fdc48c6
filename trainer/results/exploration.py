"""How an evaluation's policy explored, and what that cost: shares and means over its episodes' records. Pure.

Promises: episodes that the infrastructure lost are left out. A share that is of nothing is None, and so are tokens that
nobody counted. Intervals are 95%, with the database as the unit that was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from env_server.types import ActionType
from trainer.results.failure_kinds import FailureKind, error_kind, kind_of, queries_of
from trainer.results.statistics import Interval, clustered_interval, judged
from trainer.results.summary_table import interval_text, percent
from trainer.rollout.episodes import EpisodeRecord

INVENTED = (FailureKind.NO_SUCH_COLUMN, FailureKind.NO_SUCH_TABLE)
"""The errors of a query that names what the database does not have."""


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `n`."""

    share: float
    interval: Interval
    count: int
    n: int


@dataclass(frozen=True, slots=True)
class Exploration:
    """What an evaluation's episodes did; tokens and steps are means over questions.

    `described_first`: of the episodes that queried, those with a successful DESCRIBE before the first QUERY.
    `recovered`: of the failed queries, those that a successful one follows in their episode. `invented_names`: of the
    queries, those that failed for a column or a table that is not there. `generated_tokens`: what the policy wrote.
    `prompt_tokens`: what it was given to read, each turn's whole prompt counted; an engine's prefix cache saves most of
    that after the first turn.
    """

    described_first: Share | None
    recovered: Share | None
    invented_names: Share | None
    steps: float
    generated_tokens: float | None
    prompt_tokens: float | None


def explore(records: Sequence[EpisodeRecord]) -> Exploration:
    """Return how the episodes of an evaluation explored, of which one was judged at least."""
    counted = judged(records)
    read = [r.prompt_tokens for r in counted if r.prompt_tokens is not None]
    known = len(read) == len(counted)
    return Exploration(
        described_first=_share([(r.db_id, _described_first(r)) for r in counted if queries_of(r)]),
        recovered=_share([(r.db_id, recovered) for r in counted for recovered in _recoveries(r)]),
        invented_names=_share([(r.db_id, invented) for r in counted for invented in _inventions(r)]),
        steps=_mean([r.steps for r in counted]),
        generated_tokens=_mean([r.tokens for r in counted]) if known else None,
        prompt_tokens=_mean(read) if known else None,
    )


def exploration_lines(exploration: Exploration, *, one_query: bool = False) -> list[str]:
    """Say it, one line each; what episodes of `one_query` have nothing to say about is left out."""
    explored = (
        ("DESCRIBE before the first QUERY", exploration.described_first, "episodes that queried"),
        ("followed by a query that succeeds", exploration.recovered, "failed queries"),
    )
    named = (
        *(() if one_query else explored),
        ("named a column or a table that is not there", exploration.invented_names, "queries"),
    )
    lines = [f"{what}: {share_text(share)} of {share.n:,} {of}" for what, share, of in named if share is not None]
    cost = f"a question took {exploration.steps:.1f} steps"
    if exploration.generated_tokens is not None and exploration.prompt_tokens is not None:
        cost += f", {exploration.generated_tokens:,.0f} tokens written and {exploration.prompt_tokens:,.0f} read"
    return [*lines, cost]


def share_of(databases: Sequence[str], outcomes: Sequence[bool], questions: Sequence[str] = ()) -> Share:
    """Return the share of outcomes that are true, of which there is one; `databases[i]` is that of `outcomes[i]`.

    `questions[i]` is its question, where that may be the same of several.
    """
    count, n = sum(outcomes), len(outcomes)
    return Share(count / n, clustered_interval(outcomes, databases, questions), count, n)


def share_text(share: Share) -> str:
    """A share with its interval, in percent."""
    return f"{percent(share.share)} ({interval_text(share.interval)})"


def _described_first(record: EpisodeRecord) -> bool:
    first_query = queries_of(record)[0]
    before = takewhile(lambda turn: turn is not first_query, record.turns)
    return any(kind_of(turn) == ActionType.DESCRIBE and not turn["error"] for turn in before)


def _recoveries(record: EpisodeRecord) -> Iterator[bool]:
    """Of each failed query, whether one that succeeds comes later."""
    errors = [bool(turn["error"]) for turn in queries_of(record)]
    return (not all(errors[i:]) for i, failed in enumerate(errors) if failed)


def _inventions(record: EpisodeRecord) -> Iterator[bool]:
    return (bool(turn["error"]) and error_kind(turn["error"]) in INVENTED for turn in queries_of(record))


def _share(cases: Sequence[tuple[str, bool]]) -> Share | None:
    """The share of the cases, each of a database, that are true."""
    return share_of([db_id for db_id, _ in cases], [outcome for _, outcome in cases]) if cases else None


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)
