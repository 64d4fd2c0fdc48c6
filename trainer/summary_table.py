"""The comparison table that evaluation and training print in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from trainer.statistics import EvaluationSummary, Interval


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f}%"


def interval_text(interval: Interval) -> str:
    """An interval of shares in percent."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"


def summary_table(rows: Sequence[tuple[str, EvaluationSummary]], title: str) -> Table:
    """One row per labelled evaluation; hardness classes that occur get a column each."""
    levels = [level for level in ("easy", "medium", "hard", "extra") if any(level in s.by_hardness for _, s in rows)]
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("success", "95% interval", *levels, "reward", "steps", "parsed", "episodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in rows:
        by_level = [summary.by_hardness.get(level) for level in levels]
        table.add_row(
            label,
            percent(summary.success_rate),
            interval_text(summary.interval),
            *("-" if group is None else percent(group.success_rate) for group in by_level),
            f"{summary.mean_reward:+.2f}",
            f"{summary.mean_steps:.1f}",
            percent(summary.parse_rate),
            str(summary.episodes) + (f" (+{summary.failed} failed)" if summary.failed else ""),
        )
    return table
