"""The tables of evaluations, runs and comparisons, in cells of text: one for the terminal, the report and the viewer.

Pure; `for_terminal` makes a table of Rich's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from trainer.eval.failure_kinds import FailureKind, count_failures
from trainer.eval.metrics import in_order, meaning
from trainer.eval.run_files import PLACES, SECTIONS, Differing, redacted
from trainer.eval.statistics import (
    HARDNESS,
    EvaluationSummary,
    Interval,
    PairedDifference,
    interval_text,
    percent,
)
from trainer.eval.summaries import explore
from trainer.report.comparison import MEANS, Comparison, GroupDifference
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
    rules: tuple[int, ...] = ()
    """Numbers of rows before which the terminal draws a line."""


def for_terminal(table: Table, *, wrap: bool = False) -> RichTable:
    """Return the table as Rich prints it; text from data and policies is never parsed as markup.

    `wrap`: cells are long texts, to the left, and not numbers.
    """
    shown = RichTable(title=Text(table.caption) if table.caption else None)
    for column, name in enumerate(table.header):
        number = column > 0 and not wrap
        shown.add_column(Text(name), justify="right" if number else "left", overflow="fold", no_wrap=number)
    for index, row in enumerate(table.rows):
        if index in table.rules:
            shown.add_section()
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


def metrics_table(metrics: Sequence[Mapping[str, float]]) -> Table | None:
    """Return the logged metrics with their first and last values and meanings; None when nothing was logged."""
    ends: dict[str, tuple[float, float]] = {}
    for row in metrics:
        for name, value in row.items():
            ends[name] = (ends.get(name, (value,))[0], value)
    ends.pop("step", None)
    rows = [[cut(name, 60), *(f"{value:.4g}" for value in ends[name]), meaning(name)] for name in in_order(ends)]
    caption = "Every metric at the first and at the last step that logged it"
    return Table(caption, ["metric", "first", "last", "meaning"], rows) if rows else None


def facts_table(config: Mapping[str, Any], training_s: float, steps: int) -> Table | None:
    """Return versions, commit, hardware and time; None where nothing is known. `training_s`: of all steps together."""
    machine = config.get("machine", {})
    versions = [f"{name} {number}" for name, number in config.get("versions", {}).items()]
    units = {"processor": "{}", "cores": "{} cores", "memory_gib": "{} GiB of memory", "system": "{}"}
    rows = {
        "began": str(machine.get("started", "")),
        "training took": f"{clock(training_s)} ({steps} steps, with what lies between them)" if training_s else "",
        "versions": ", ".join([*versions, *([f"Python {machine['python']}"] if "python" in machine else [])]),
        "commit": str(machine.get("commit", "")),
        "hardware": ", ".join(unit.format(machine[name]) for name, unit in units.items() if name in machine),
        "GPUs": ", ".join(machine.get("gpus", [])),
    }
    known = [[name, cut(text, 300)] for name, text in rows.items() if text]
    return Table("Software and hardware", ["", ""], known) if known else None


def non_default_table(config: Mapping[str, Any]) -> Table | None:
    """Return the non-default arguments; None where they were not written down, as by older runs."""
    if "departures" not in config:
        return None
    values = {name: value for section in SECTIONS for name, value in redacted(config.get(section, {})).items()}
    rows = [
        [name, _value(values.get(name), 200), _value(default, 200)]
        for name, default in redacted(config["departures"]).items()
        if not PLACES.fullmatch(name)
    ]
    return Table("Non-default arguments", ["argument", "this run", "default"], rows)


def differing_table(found: Sequence[Differing]) -> Table:
    """Return what is not the same on two sides."""
    return Table("", ["", "A", "B"], [[one.name, _value(one.a, 60), _value(one.b, 60)] for one in found])


def _value(value: Any, limit: int) -> str:
    if value is None:
        return NONE
    return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), limit)


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """A row of a comparison: label, A, B, B - A and its interval as text, and the latter two as numbers.

    `better`: 1 where more is better, -1 where less is, 0 where neither.
    """

    cells: list[str]
    mean: float
    interval: Interval
    better: int


def group_rows(groups: Mapping[str, GroupDifference]) -> list[DifferenceRow]:
    """Return the rows of groups of questions."""
    return [
        _difference_row(f"{name} ({g.difference.n})", g.a.success_rate, g.b.success_rate, g.difference, 1)
        for name, g in groups.items()
    ]


def comparison_rows(comparison: Comparison) -> tuple[list[DifferenceRow], list[DifferenceRow], list[DifferenceRow]]:
    """Return the rows of success, of means and of failures."""
    n = comparison.success.difference.n
    success = group_rows({"success": comparison.success})
    success += group_rows({f"  {name}": group for name, group in comparison.by_difficulty.items()})
    means = []
    for name, found in comparison.means.items():
        mean = MEANS[name]
        change, low, high = (
            mean.change.format(mean.scale * x) for x in (found.mean, found.interval.low, found.interval.high)
        )
        cells = [mean.label, mean.text.format(found.before), mean.text.format(found.after), change, f"{low} to {high}"]
        means.append(DifferenceRow(cells, found.mean, found.interval, 0))
    failures = [
        _difference_row(f"failed: {kind.replace('_', ' ')}", one.a / n, one.b / n, one.difference, -1)
        for kind, one in comparison.failures.items()
    ]
    return success, means, failures


def comparison_table(comparison: Comparison) -> Table:
    """Return a comparison as the terminal shows it."""
    success, means, failures = comparison_rows(comparison)
    rows = [row.cells for row in (*success, *means, *failures)]
    rules = (len(success), len(success) + len(means))
    return Table("", ["on the same questions", "A", "B", "B - A", "95% interval"], rows, rules)


def _difference_row(label: str, a: float, b: float, paired: PairedDifference, better: int) -> DifferenceRow:
    cells = [label, percent(a), percent(b), f"{100 * paired.mean:+.1f}", points_text(paired.interval)]
    return DifferenceRow(cells, paired.mean, paired.interval, better)


def verdict(comparison: Comparison) -> str:
    """Return the sentence that says which side is better, with its evidence."""
    success = comparison.success
    paired = success.difference
    low, high = paired.interval.low, paired.interval.high
    who = "B is better" if low > 0 else "A is better" if high < 0 else "no measurable difference"
    rates = " and ".join(
        f"{letter} {percent(group.success_rate)} ({interval_text(group.interval)})"
        for letter, group in (("A", success.a), ("B", success.b))
    )
    change = f"{100 * paired.mean:+.1f} points ({points_text(paired.interval)})"
    return (
        f"{who}: {rates}, B - A {change}, paired over {counted(paired.n, 'question')} of "
        f"{counted(paired.clusters, 'database')}. In brackets: 95% intervals, clustered by database."
    )


def points_text(interval: Interval) -> str:
    """Return the interval of a difference in percentage points."""
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def difference_text(paired: PairedDifference) -> str:
    """Return a paired difference in percentage points, with its interval."""
    return f"{100 * paired.mean:+.1f} ({points_text(paired.interval)})"


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
