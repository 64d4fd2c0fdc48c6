"""The tables that evaluation and training print in the terminal; they fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from trainer.results.failure_kinds import count_failures
from trainer.results.statistics import EvaluationSummary, Interval
from trainer.rollout.episodes import EpisodeRecord

HARDNESS = ("easy", "medium", "hard", "extra")


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}%"


def interval_text(interval: Interval) -> str:
    """An interval of shares in percent."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"


def summary_table(rows: Sequence[tuple[str, EvaluationSummary]], title: str) -> Table:
    """One row per labelled evaluation."""
    table = _table(title, ("success", "95% interval", "reward", "steps", "parsed", "episodes"))
    for label, summary in rows:
        table.add_row(
            label,
            percent(summary.success_rate),
            interval_text(summary.interval),
            f"{summary.mean_reward:+.2f}",
            f"{summary.mean_steps:.1f}",
            percent(summary.parse_rate),
            str(summary.episodes) + (f" (+{summary.failed} failed)" if summary.failed else ""),
        )
    return table


def difficulty_table(rows: Sequence[tuple[str, EvaluationSummary]]) -> Table:
    """Success by Spider's hardness; a class is there when any evaluation has it, with its number of episodes."""
    sizes = {
        level: max((s.by_hardness[level].episodes for _, s in rows if level in s.by_hardness), default=0)
        for level in HARDNESS
    }
    levels = [level for level in HARDNESS if sizes[level]]
    table = _table("success by difficulty", [f"{level} ({sizes[level]})" for level in levels])
    for label, summary in rows:
        groups = [summary.by_hardness.get(level) for level in levels]
        table.add_row(label, *("-" if group is None else percent(group.success_rate) for group in groups))
    return table


def failure_table(label: str, records: Sequence[EpisodeRecord]) -> Table:
    """Why the episodes of an evaluation failed, the most frequent kind first."""
    counts = count_failures(records)
    table = Table(title=f"why {label} failed")
    table.add_column("kind", overflow="fold")
    for name in ("episodes", "of failures"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        table.add_row(kind.meaning, str(count), percent(count / sum(counts.values())))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("policy", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
