"""The report's tables of why episodes failed and of how a policy explored, from the episodes of its evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.eval.failure_kinds import FailureKind, count_failures
from trainer.eval.summaries import Share, explore
from trainer.report.played import Played
from trainer.report.tables import NONE, Table

NBSP = "\N{NO-BREAK SPACE}"


def failure_table(played: Mapping[str, Played]) -> Table:
    """Return why episodes of each evaluation failed, those that the infrastructure lost left out."""
    counts = {label: count_failures(one.records) for label, one in played.items()}
    kinds = [kind for kind in FailureKind if any(kind in each for each in counts.values())]
    rows = [[kind.meaning, *(str(each.get(kind, 0)) for each in counts.values())] for kind in kinds]
    return Table("Why episodes failed, the first reason that applies", ["reason", *played], rows)


def exploration_table(played: Mapping[str, Played]) -> Table:
    """Return how the policy of each evaluation explored, and what a question cost in tokens."""
    sides = [explore(one.records) for one in played.values()]
    rows = [
        ["episodes that queried, with a DESCRIBE before", *(_share(side.described_first) for side in sides)],
        ["failed queries that a successful one follows", *(_share(side.recovered) for side in sides)],
        ["queries with a column or table that is not there", *(_share(side.hallucinated_names) for side in sides)],
        ["tokens written per question", *(_tokens(side.generated_tokens) for side in sides)],
        ["tokens read per question", *(_tokens(side.prompt_tokens) for side in sides)],
    ]
    return Table("How it explored", ["", *played], rows)


def _share(share: Share | None) -> str:
    if share is None:
        return NONE
    return f"{share} of {share.n}".replace(" to ", f"{NBSP}to{NBSP}")  # an interval stays on one line


def _tokens(count: float | None) -> str:
    return NONE if count is None else f"{count:,.0f}"
