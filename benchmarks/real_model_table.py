"""The table of `benchmarks/real_model.py`: what each policy gets right, what training added, what it cost.

Success and gains are on the same questions, greedy; intervals are of 95%, with the database as the cluster, gains
paired by question (`trainer.report.comparison`, `trainer.eval.statistics`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.real_model_phases import Finished
from trainer.eval.failure_kinds import FailureKind
from trainer.eval.statistics import HARDNESS, Interval, interval_text, intervals_as_pairs, percent
from trainer.report.compare import find_side
from trainer.report.comparison import compare_sides

ROWS: Mapping[str, str] = {
    "random": "random play",
    "zero_shot": "the model as it comes",
    "before": "before: other databases alone",
    "few_shot": "with worked episodes",
    "text_to_sql": "whole schema, one query",
    "text_to_sql_few_shot": "the same, with examples",
    "after_warmup": "after warm-up",
    "after_replay": "after its second round",
    "after_grpo": "after GRPO",
    "after_rejection": "rejection sampling, same answers",
    "after_control": "control: more warm-up",
    "after_supervised": "warm-up on the gold SQL",
    "oracle": "oracle",
}
"""The evaluations, in the order of the table, and what they are called there."""
GAINS = (
    ("zero_shot", "after_warmup"),
    ("text_to_sql", "after_warmup"),
    ("before", "after_grpo"),
    ("before", "after_rejection"),
    ("before", "after_control"),
    ("before", "after_supervised"),
    ("after_rejection", "after_grpo"),
    ("after_warmup", "after_replay"),
    ("after_warmup", "after_grpo"),
    ("after_replay", "after_grpo"),
    ("after_warmup", "after_control"),
    ("after_control", "after_grpo"),
)
"""What is compared in pairs, where both are there: the second less the first."""
KEPT = ("success", "by_difficulty", "means", "failures", "warnings")
"""What is kept of a comparison."""


def gather(folder: Path, costs: Mapping[str, Finished]) -> dict[str, Any]:
    """Return the result of what is finished in a folder, as it goes into JSON; `costs` are of all phases, in order."""
    outs = {name: folder / name / "out" for name in ROWS if name in costs}
    gains = {}
    for a, b in GAINS:
        if a in outs and b in outs:
            comparison = compare_sides(*(find_side(str(outs[name] / "episodes.jsonl")) for name in (a, b)))
            gains[f"{b} over {a}"] = asdict(comparison, dict_factory=intervals_as_pairs)
    seconds = sum(cost.seconds for cost in costs.values())
    return {
        "policies": {name: json.loads((out / "summary.json").read_bytes()) for name, out in outs.items()},
        "gains": {name: {key: gain[key] for key in KEPT} for name, gain in gains.items()},
        "phases": {name: {**asdict(cost), "share": cost.seconds / seconds} for name, cost in costs.items()},
        "minutes": seconds / 60,
    }


def print_tables(result: Mapping[str, Any], console: Console) -> None:
    """Print the result."""
    policies: Mapping[str, Any] = result["policies"]
    for table in (_success(policies), _difficulty(policies), _failures(policies), _gains(result["gains"])):
        console.print(table)
    console.print(_cost(result))


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _pair(pair: Sequence[float]) -> str:
    return interval_text(Interval(*pair))


def _success(policies: Mapping[str, Any]) -> Table:
    columns = ("success", "95% interval", "n", "steps", "read", "written", "false positives")
    table = _table("success on held-out questions, greedy; tokens an episode", "policy", columns)
    for name, summary in policies.items():
        explored, unverified = summary["exploration"], summary["false_positives"]
        tokens = (explored["prompt_tokens"], explored["generated_tokens"])
        table.add_row(
            ROWS[name],
            percent(summary["success_rate"]),
            _pair(summary["interval"]),
            str(summary["episodes"]) + (f" (+{summary['failed']} failed)" if summary["failed"] else ""),
            f"{summary['mean_steps']:.1f}",
            *("-" if count is None else f"{count:,.0f}" for count in tokens),
            "-" if unverified is None else f"{unverified['share']['count']} of {unverified['share']['n']}",
        )
    return table


def _difficulty(policies: Mapping[str, Any]) -> Table:
    groups = [summary["by_hardness"] for summary in policies.values()]
    sizes = {
        level: max((group[level]["episodes"] for group in groups if level in group), default=0) for level in HARDNESS
    }
    levels = [level for level in HARDNESS if sizes[level]]
    table = _table("success by difficulty", "policy", [f"{level} ({sizes[level]})" for level in levels])
    for name, summary in policies.items():
        found = [summary["by_hardness"].get(level) for level in levels]
        table.add_row(ROWS[name], *("-" if group is None else percent(group["success_rate"]) for group in found))
    return table


def _failures(policies: Mapping[str, Any]) -> Table:
    table = Table(title="why they failed, the most frequent kinds first")
    table.add_column("policy", overflow="fold")
    table.add_column("kinds", overflow="fold")
    for name, summary in policies.items():
        kinds = sorted(summary["failure_kinds"].items(), key=lambda pair: -pair[1])
        if kinds:
            table.add_row(ROWS[name], "; ".join(f"{count} {FailureKind(kind).meaning}" for kind, count in kinds))
    return table


def _gains(gains: Mapping[str, Any]) -> Table:
    table = _table("paired gains, in points", "gain", ("points", "95% interval", "better", "worse", "pairs"))
    for name, gain in gains.items():
        difference = gain["success"]["difference"]
        b, _, a = name.partition(" over ")
        table.add_row(
            f"{ROWS[b]}, over {ROWS[a]}",
            f"{100 * difference['mean']:+.1f}",
            _pair(difference["interval"]),
            *(str(difference[count]) for count in ("better", "worse", "n")),
        )
    return table


def _cost(result: Mapping[str, Any]) -> Table:
    columns = ("minutes", "share", "steps", "tokens read", "written")
    table = _table(f"what it cost: {result['minutes']:.0f} minutes", "phase", columns)
    for name, cost in result["phases"].items():
        tokens = (cost["tokens_read"], cost["tokens_written"])
        table.add_row(
            name,
            f"{cost['seconds'] / 60:.1f}",
            percent(cost["share"]),
            str(cost["steps"] or ""),
            *("" if count is None else f"{count:,}" for count in tokens),
        )
    return table
