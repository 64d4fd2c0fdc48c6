"""What the stages of a run came to: a table in the terminal, and one page that leads to their own reports.

A stage of GRPO is measured before and after its training, on questions that no stage is trained on; what a warm-up gave
is the measurement before the stage that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from rich.table import Table

from trainer.eval.run_files import RunFolder
from trainer.eval.statistics import EvaluationSummary, interval_text, percent
from trainer.stages.plan import Kind, Plan

COLUMNS = ("stage", "kind", "questions", "steps", "success before", "success after")
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ name }}: stages</title>
<style>
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1.25rem; font: 16px/1.5 system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: .35rem .7rem; border-bottom: 1px solid; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p>Success on the evaluation questions, greedy, with 95% intervals. Each stage goes on from the policy of the one
before. The reports of the stages say more.</p>
<div class="scroll"><table>
<thead><tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr><th>{% if row.report %}<a href="{{ row.report }}">{{ row.name }}</a>{% else %}{{ row.name }}{% endif %}</th>\
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A stage: its folder's name, the other cells of `COLUMNS`, and where its report is, from the run's folder."""

    name: str
    cells: tuple[str, ...]
    report: str = ""


def rows_of(plan: Plan) -> list[Row]:
    """Return one row for each stage, in order. Raises RunFolderError when an evaluation cannot be read."""
    rows = []
    for stage in plan.stages:
        questions = stage.settings.get("difficulty", "all")
        if stage.kind is Kind.WARMUP:
            rows.append(Row(stage.folder, (stage.kind, questions, "", "", "")))
            continue
        folder = RunFolder(plan.folder(stage))
        summaries = {evaluation.label: evaluation.summary for evaluation in folder.evaluations()}
        steps = max((int(row["step"]) for row in folder.metrics()), default=0)
        measured = (_success(summaries.get(label)) for label in ("before", "after"))
        rows.append(
            Row(
                stage.folder,
                (stage.kind, questions, str(steps), *measured),
                f"{stage.folder}/{folder.report_path.name}",
            )
        )
    return rows


def table(plan: Plan, rows: Sequence[Row]) -> Table:
    """The rows for the terminal."""
    shown = Table(title=f"the stages of {plan.output_dir}")
    for column in COLUMNS:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(row.name, *row.cells)
    return shown


def write_page(plan: Plan, rows: Sequence[Row]) -> Path:
    """Write the page into the run's folder, and return its path."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(PAGE).render(name=plan.output_dir.resolve().name, columns=COLUMNS, rows=rows)
    path = plan.output_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _success(summary: EvaluationSummary | None) -> str:
    return f"{percent(summary.success_rate)} ({interval_text(summary.interval)})" if summary else ""
