"""A comparison in the terminal: who is better and how sure that is, then where, how, on which questions, and why.

Fits 80 columns. Text from data and policies is printed as it is, never read as markup.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainer.comparison.comparison import Comparison, Flip, GroupDifference, SideFacts
from trainer.eval.run_files import Differing
from trainer.eval.statistics import Interval, MeanDifference, PairedDifference, interval_text, percent
from trainer.report.replays import cut

SHOWN = 10
"""Flipped questions of each direction, and differing flags, that are shown unless all are asked for."""
VALUE_LIMIT = 60
MEANS = {
    "reward": ("reward an episode", "{:+.2f}", "{:+.2f}"),
    "steps": ("steps", "{:.1f}", "{:+.1f}"),
    "tokens": ("tokens written", "{:,.0f}", "{:+,.0f}"),
    "prompt_tokens": ("tokens read", "{:,.0f}", "{:+,.0f}"),
    "parse_rate": ("turns that parsed", "{:.1%}", "{:+.1f}"),
}
"""The label of a mean, and how it and its difference are written."""


def print_comparison(comparison: Comparison, console: Console, *, everything: bool) -> None:
    """Print it; `everything`: all flipped questions and differing flags, however many."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style))

    limit = None if everything else SHOWN
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        say(f"{letter}  {_about(side)}")
    for warning in comparison.warnings:
        say(f"WARNING: {warning}", "bold yellow")
    say("")
    say(verdict(comparison), "bold")
    console.print(_table(comparison))
    for flips, letter in ((comparison.gained, "B"), (comparison.lost, "A")):
        say(f"right in {letter} alone: {_count(len(flips), 'question')}{_of(len(flips), limit)}", "bold")
        for flip in flips[:limit]:
            _print_flip(console, flip)
    _print_differing(console, "played differently", comparison.settings, limit)
    _print_differing(console, "runs started with other flags", comparison.flags, limit)


def verdict(comparison: Comparison) -> str:
    """Return the sentence that says who is better, and what stands behind it."""
    success = comparison.success
    paired = success.difference
    low, high = paired.interval.low, paired.interval.high
    who = "B is better" if low > 0 else "A is better" if high < 0 else "no measurable difference"
    rates = " and ".join(
        f"{letter} {percent(group.success_rate)} ({interval_text(group.interval)})"
        for letter, group in (("A", success.a), ("B", success.b))
    )
    change = f"{100 * paired.mean:+.1f} points ({_points(paired.interval)})"
    return (
        f"{who}: {rates}, B - A {change}, paired over {_count(paired.n, 'question')} of "
        f"{_count(paired.clusters, 'database')}. In brackets: 95% intervals, clustered by database."
    )


def _about(side: SideFacts) -> str:
    if not side.policy:
        return side.name
    return f"{side.name}: {side.policy} on {side.data}, split {side.split}, answers as {side.answer_mode}"


def _table(comparison: Comparison) -> Table:
    table = Table()
    table.add_column("on the same questions", overflow="fold")
    for name in ("A", "B", "B - A", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    _add_group(table, "success", comparison.success)
    for name, group in comparison.by_difficulty.items():
        _add_group(table, f"  {name}", group)
    table.add_section()
    for name, mean in comparison.means.items():
        table.add_row(*_mean_cells(name, mean))
    table.add_section()
    n = comparison.success.difference.n
    for kind, failed in comparison.failures.items():
        cells = (percent(failed.a / n), percent(failed.b / n), *_paired_cells(failed.difference))
        table.add_row(Text(f"failed: {_words(kind)}"), *cells)
    return table


def _add_group(table: Table, label: str, group: GroupDifference) -> None:
    rates = (percent(group.a.success_rate), percent(group.b.success_rate))
    table.add_row(Text(f"{label} ({group.difference.n})"), *rates, *_paired_cells(group.difference))


def _paired_cells(paired: PairedDifference) -> tuple[str, str]:
    return f"{100 * paired.mean:+.1f}", _points(paired.interval)


def _mean_cells(name: str, mean: MeanDifference) -> tuple[str, ...]:
    label, value, change = MEANS[name]
    scale = 100 if name == "parse_rate" else 1
    low, high = (change.format(scale * end) for end in (mean.interval.low, mean.interval.high))
    return (
        label,
        value.format(mean.before),
        value.format(mean.after),
        change.format(scale * mean.mean),
        f"{low} to {high}",
    )


def _points(interval: Interval) -> str:
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _print_flip(console: Console, flip: Flip) -> None:
    about = ", ".join(part for part in (flip.database, flip.difficulty, flip.question_id) if part)
    console.print(Padding(Text(f"{about}: {_line(flip.question)}"), (0, 0, 0, 2), expand=False))
    for letter, ending in (("A", flip.a), ("B", flip.b)):
        how = "right" if not ending.failure else f"failed ({_words(ending.failure)})"
        said = f"{letter}  {how} in {_count(ending.steps, 'step')}: {_line(ending.last_action)}"
        console.print(Padding(Text(said, "dim", no_wrap=True, overflow="ellipsis"), (0, 0, 0, 6), expand=False))


def _print_differing(console: Console, title: str, found: Sequence[Differing], limit: int | None) -> None:
    if not found:
        return
    console.print(Text(f"{title}: {len(found)}{_of(len(found), limit)}", "bold"))
    table = Table()
    for name in ("", "A", "B"):
        table.add_column(name, overflow="fold")
    for one in found[:limit]:
        table.add_row(Text(one.name), Text(_value(one.a)), Text(_value(one.b)))
    console.print(table)


def _value(value: object) -> str:
    if value is None:
        return "-"
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), VALUE_LIMIT)


def _of(count: int, limit: int | None) -> str:
    return "" if limit is None or count <= limit else f" (the first {limit}; --all shows them all)"


def _line(text: str) -> str:
    return " ".join(text.split())


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
