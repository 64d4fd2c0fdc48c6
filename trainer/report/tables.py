"""The tables of evaluations and runs, made once for the terminal, the report and the model card: cells of text.

Pure, but for `for_terminal`, which makes a table of Rich's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from trainer.eval.failure_kinds import FailureKind, count_failures
from trainer.eval.statistics import (
    HARDNESS,
    EvaluationSummary,
    GroupSummary,
    PairedDifference,
    interval_text,
    percent,
)
from trainer.eval.summaries import explore
from trainer.rollout.episodes import EpisodeRecord, Outcome

NONE = "-"
"""A cell without a known value."""
OUTCOMES = {
    Outcome.CORRECT: "correct",
    Outcome.WRONG: "wrong answer",
    Outcome.OUT_OF_BUDGET: "out of steps",
    Outcome.OUT_OF_TOKENS: "out of tokens",
    Outcome.FAILED: "failed (infrastructure; not counted)",
}
HALLUCINATED = "queries naming a missing column or table"
Summaries = Mapping[str, EvaluationSummary]
"""Evaluations by the labels that tables show them under."""
Records = Mapping[str, Sequence[EpisodeRecord]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text: the first cell of a row is its heading."""

    caption: str
    header: list[str]
    rows: list[list[str]]


def for_terminal(table: Table) -> RichTable:
    """Return the table as Rich prints it; text from data and policies is never parsed as markup."""
    shown = RichTable(title=Text(table.caption) if table.caption else None)
    for column, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if column else "left", overflow="fold", no_wrap=column > 0)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def success_table(summaries: Summaries, caption: str, changes: Mapping[str, str] | None = None) -> Table:
    """Return one row per evaluation; `changes`: of each, the paired difference to `before`."""
    header = ["policy", "success", "95% interval", "reward", "steps", "parsed", "episodes"]
    rows = []
    for label, s in summaries.items():
        numbers = [f"{s.mean_reward:+.2f}", f"{s.mean_steps:.1f}", percent(s.parse_rate)]
        episodes = str(s.episodes) + (f" (+{s.failed} failed)" if s.failed else "")
        rows.append([label, percent(s.success_rate), interval_text(s.interval), *numbers, episodes])
        if changes is not None:
            rows[-1].append(changes.get(label, NONE))
    return Table(caption, header if changes is None else [*header, "points against before"], rows)


def group_table(
    kind: str, summaries: Summaries, *, intervals: bool, changes: Mapping[str, str] | None = None
) -> Table | None:
    """Return success by `difficulty` or `family`; None when no evaluation is grouped so.

    `changes`: of each group, the paired difference between two of the evaluations.
    """
    groups = {label: s.by_hardness if kind == "difficulty" else s.by_family for label, s in summaries.items()}
    names = sorted({name for each in groups.values() for name in each}, key=_place)
    rows = []
    for name in names:
        found = [each.get(name) for each in groups.values()]
        cells = [NONE if g is None else percent(g.success_rate) for g in found]
        if intervals:
            cells = [
                c if g is None else f"{c} ({interval_text(g.interval)})" for g, c in zip(found, cells, strict=True)
            ]
        size = max(g.episodes for g in found if g is not None)
        rows.append([f"{name} ({size})", *cells, *([] if changes is None else [changes.get(name, NONE)])])
    header = [kind, *groups, *([] if changes is None else ["change in points"])]
    return Table(f"Success by {kind}", header, rows) if rows else None


def _rate(group: GroupSummary, with_interval: bool) -> str:
    interval = f" ({interval_text(group.interval)})" if with_interval else ""
    return percent(group.success_rate) + interval


def _place(name: str) -> tuple[int, str]:
    return (HARDNESS.index(name) if name in HARDNESS else len(HARDNESS), name)


def outcome_table(summaries: Summaries) -> Table:
    """Return how the episodes of each evaluation ended."""
    seen = {kind for s in summaries.values() for kind in s.outcomes}
    kinds = [str(o) for o in OUTCOMES if o in seen] + sorted(seen - set(OUTCOMES))
    rows = []
    for kind in kinds:
        cells = [_of(s.outcomes.get(kind, 0), sum(s.outcomes.values())) for s in summaries.values()]
        rows.append([OUTCOMES[Outcome(kind)] if kind in OUTCOMES else cut(kind, 60), *cells])
    return Table("How the episodes ended", ["outcome", *summaries], rows)


def failure_table(records: Records) -> Table:
    """Return why episodes of each evaluation failed, the most frequent kind first; errored ones are left out."""
    counts = {label: count_failures(each) for label, each in records.items()}
    totals = {kind: sum(each.get(kind, 0) for each in counts.values()) for kind in FailureKind}
    kinds = sorted(filter(totals.get, FailureKind), key=lambda kind: -totals[kind])
    rows = [[kind.meaning, *(_of(each.get(kind, 0), sum(each.values())) for each in counts.values())] for kind in kinds]
    return Table("Why episodes failed: the first reason that applies", ["failure", *records], rows)


def exploration_table(records: Records, *, one_query: bool = False) -> Table:
    """Return how the policy of each evaluation explored, and what a question cost in steps and tokens.

    `one_query`: an episode is one query, before and after which there is nothing to explore.
    """
    found = [explore(each) for each in records.values()]
    shares = {
        "episodes that queried, with a DESCRIBE before": [one.described_first for one in found],
        "failed queries that a successful one follows": [one.recovered for one in found],
        HALLUCINATED: [one.hallucinated_names for one in found],
    }
    rows = [
        [name, *(NONE if share is None else f"{share} of {share.n:,}" for share in each)]
        for name, each in shares.items()
        if any(each) and not (one_query and name != HALLUCINATED)
    ]
    rows.append(["steps per question", *(f"{one.steps:.1f}" for one in found)])
    for name, tokens in (
        ("generated tokens per question", [one.generated_tokens for one in found]),
        ("prompt tokens per question", [one.prompt_tokens for one in found]),
    ):
        if any(count is not None for count in tokens):
            rows.append([name, *(NONE if count is None else f"{count:,.0f}" for count in tokens)])
    return Table("How it explored", ["", *records], rows)


def excluded_table(summaries: Summaries) -> Table | None:
    """Return the questions that the data set excluded at load, by reason; None when there are none."""
    reasons = sorted({reason for s in summaries.values() for reason in s.excluded})
    rows = [[cut(reason, 60), *(str(s.excluded.get(reason, 0)) for s in summaries.values())] for reason in reasons]
    return Table("Questions excluded at load: they cannot be judged", ["reason", *summaries], rows) if rows else None


def difference_text(paired: PairedDifference) -> str:
    """Return a paired difference in percentage points, with its interval."""
    low, high = 100 * paired.interval.low, 100 * paired.interval.high
    return f"{100 * paired.mean:+.1f} ({low:+.1f} to {high:+.1f})"


def cut(text: str, limit: int = 600) -> str:
    """Cut a long text and say how much is cut."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def clock(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes."""
    minutes = int(seconds) // 60
    return f"{minutes}:{int(seconds) % 60:02d}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}"


def _of(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})" if total else str(count)
