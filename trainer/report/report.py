"""The report of a run: one HTML file that shows what training did, from the run's folder alone.

Guarantees:

1. Self-contained: no script and no request (a content security policy forbids both), light and dark, readable on a
   phone. Pictures are images of their own, inside the file.
2. Every word from a database, a model or a config is escaped, without an exemption.
3. Honest: every rate carries its interval and its n; errored episodes, excluded questions and non-finite values are
   named; two evaluations are compared only when they played the same questions the same way; the shown episodes are
   chosen by a fixed rule that shows losses too.
4. A partial run gives a report that says what is missing.
5. Bounded: long texts are cut and marked, curves are thinned, so that the file stays under 1.5 MB.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from sqlenv.parser import Parser, output_file
from trainer.eval.run_files import RunFolder, TrainingEpisode, redacted
from trainer.eval.statistics import compare as paired_change
from trainer.eval.statistics import interval_text, keyed, percent
from trainer.report import plots
from trainer.report.comparison import Comparison, Side, SideError, compare_sides
from trainer.report.curves import (
    CHARTS,
    TIMES,
    Learning,
    Metrics,
    charts_of,
    learning_of,
    series_of,
    times_of,
    window_for,
)
from trainer.report.replays import episode_view, replays
from trainer.report.tables import (
    OUTCOMES,
    counted,
    cut,
    difference_text,
    excluded_table,
    exploration_table,
    facts_table,
    failure_table,
    group_table,
    metrics_table,
    non_default_table,
    outcome_table,
    points_text,
    success_table,
)
from trainer.rollout.episodes import Outcome

TEMPLATE = Path(__file__).with_name("report_template.html")
CONFIG_LIMIT = 40_000
MAX_CHARTS = 9
BRACKETS = "In brackets: 95% intervals."


def run(argv: Sequence[str]) -> int:
    """`sqlenv report`: write the report of a run and print where it is. Raises RunFolderError."""
    parser = Parser(prog="sqlenv report", description="Write a run's report.html again.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, such as runs/tiny")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="also write the learning curve as a picture")
    args = parser.parse_args(argv)
    written = [write_report(args.run)]
    if args.png is not None:
        plots.write_learning_curve(args.run, args.png)
        written.append(args.png)
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


def write_report(run: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path. Raises RunFolderError."""
    folder = RunFolder.open(run)
    config, metrics, episodes = folder.config(), folder.metrics(), folder.episodes(turns=False)
    sides = {e.label: Side(e.label, folder.evaluation_episodes(e.label), e) for e in folder.evaluations()}
    before, after = sides.get("before"), sides.get("after")
    compared = None if before is None or after is None else comparable(before, after)
    comparison = compared if isinstance(compared, Comparison) else None
    summaries = {label: side.evaluation.summary for label, side in sides.items() if side.evaluation is not None}
    records = {label: side.records for label, side in sides.items()}
    ends = {label: summary for label, summary in summaries.items() if label in ("before", "after")}
    changes = {} if comparison is None else {"difficulty": comparison.by_difficulty, "family": comparison.by_family}
    sentence, detail = headline(before, after, compared)
    page = {
        "name": folder.name,
        "headline": sentence,
        "detail": detail,
        "missing": missing(sides, metrics, episodes),
        "notes": [*non_finite(metrics), *failures(episodes)],
        "alerts": folder.alerts(),
        "base_notes": base_notes(config.get("base_notes")),
        "pictures": pictures(learning_of(folder, episodes), metrics),
        "charts": CHARTS,
        "metrics": metrics_table(metrics),
        "evaluations": evaluations_table(sides),
        "groups": [
            group_table(
                kind,
                ends,
                intervals=True,
                changes={name: difference_text(g.difference) for name, g in changes[kind].items()} if changes else None,
            )
            for kind in ("difficulty", "family")
        ],
        "outcomes": outcome_table(summaries),
        "failures": failure_table(records),
        "exploration": exploration_table(records),
        "excluded": excluded_table(summaries),
        "times": time_line(metrics),
        "facts": facts_table(config, training_seconds(metrics), int(max((row["step"] for row in metrics), default=0))),
        "non_default": non_default_table(config),
        "replays": replays(records["before"], records["after"]) if comparison is not None else [],
        "config": cut(json.dumps(redacted(config), ensure_ascii=False, indent=2), CONFIG_LIMIT),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cut": cut, "episode": episode_view, "outcome": lambda name: OUTCOMES.get(name, name)}
    return folder.write_report(environment.from_string(TEMPLATE.read_text("utf-8")).render(page))


def comparable(before: Side, after: Side) -> Comparison | str:
    """Return the comparison of two evaluations, or why they cannot be compared."""
    for field in ("data", "split", "answer_mode"):
        left, right = getattr(before.evaluation, field), getattr(after.evaluation, field)
        if left != right:
            return f"the {field.replace('_', ' ')} differs ({left} and {right})"
    try:
        return compare_sides(before, after)
    except SideError:
        return "they have no judged question in common"


def headline(before: Side | None, after: Side | None, compared: Comparison | str | None) -> tuple[str, str]:
    """Return the sentence that says what training changed, or what is known so far, and its evidence."""
    if before is None or after is None or compared is None:
        one = before or after
        if one is None:
            return "No evaluation before or after training yet.", ""
        label, other = ("before", "after") if one is before else ("after", "before")
        return f"Success {label} training: {_rate(one)}.", f"There is no evaluation {other} training yet. {BRACKETS}"
    if isinstance(compared, str):
        return (
            f"Success was {_rate(before)} before and {_rate(after)} after.",
            f"Not comparable: {compared}. {BRACKETS}",
        )
    paired = compared.success.difference
    verb = "rose from" if paired.interval.low > 0 else "did not change measurably:"
    verb = "fell from" if paired.interval.high < 0 else verb
    unseen = before.evaluation is not None and before.evaluation.unseen_databases
    where = "unseen databases" if unseen else "unseen questions about databases seen in training"
    detail = (
        f"Paired over {counted(paired.n, 'question')} of {counted(paired.clusters, 'database')}: "
        f"{paired.better} went from wrong to right, {paired.worse} from right to wrong. "
    )
    if unpaired := compared.a.unmatched + compared.b.unmatched:
        detail += f"Judged on one side only, and left out: {counted(unpaired, 'question')}. "
    if after.evaluation is not None and (count := after.evaluation.best_of) > 1:
        detail += f"This policy, that of step {after.evaluation.step}, was chosen as the best of {count} by these very "
        detail += "questions, which flatters it; no interval here allows for that. "
    change = f"{100 * paired.mean:+.1f} points ({points_text(paired.interval)})"
    return f"On {where}, success {verb} {_rate(before)} to {_rate(after)}: {change}.", detail + BRACKETS


def _rate(side: Side) -> str:
    assert side.evaluation is not None
    summary = side.evaluation.summary
    return f"{percent(summary.success_rate)} ({interval_text(summary.interval)}%)"


def missing(sides: Mapping[str, Side], metrics: Metrics, episodes: Sequence[TrainingEpisode]) -> list[str]:
    """Return what the run has not written, or not yet."""
    found: dict[str, object] = {
        "an evaluation before training": "before" in sides,
        "an evaluation after training": "after" in sides,
        "training metrics": metrics,
        "training episodes": episodes,
    }
    return [name for name, present in found.items() if not present]


def evaluations_table(sides: Mapping[str, Side]) -> Any:
    """Return all evaluations, with the paired difference to `before`; None when there are none."""
    if not sides:
        return None
    base = sides.get("before")
    summaries, changes, kinds = {}, {}, set()
    for label, side in sides.items():
        assert side.evaluation is not None
        policy = side.evaluation.policy
        name = label if policy == label else f"{label} ({cut(policy, 60)})"
        summaries[name] = side.evaluation.summary
        kinds.add((side.evaluation.data, side.evaluation.split, side.evaluation.answer_mode))
        if base is not None and side is not base and keyed(base.records).keys() & keyed(side.records).keys():
            changes[name] = difference_text(paired_change(base.records, side.records))
    what = "; ".join(f"{data}, split {split}, answers as {mode}" for data, split, mode in sorted(kinds))
    # Evaluations of different kinds are not comparable.
    return success_table(summaries, f"Evaluations on {cut(what, 300)}", changes if len(kinds) == 1 else {})


def pictures(learning: Learning, metrics: Metrics) -> dict[str, str]:
    """Return the sources of the pictures that are not empty, by name: learning, time, and each group of CHARTS."""
    drawn = {}
    if learning.points or learning.during or learning.marks:
        drawn["learning"] = plots.svg_uri(plots.learning_curve(learning))
    if (times := times_of(metrics))["step"]:
        drawn["time"] = plots.svg_uri(plots.time_picture(times, window_for(len(metrics))))
    for group in CHARTS:
        titles = dict(islice(charts_of(group, metrics).items(), MAX_CHARTS))
        if series := series_of(metrics, titles):
            drawn[group] = plots.svg_uri(plots.series_grid({cut(titles[n], 40): one for n, one in series.items()}))
    return drawn


def time_line(metrics: Metrics) -> str:
    """Return where the steps' time went, the longest part first, or that it was not logged."""
    times = times_of(metrics)
    if not times["step"]:
        return "Where the time went was not logged."
    mean = {part: float(np.mean(times[part])) for part in TIMES}
    total = sum(mean.values())
    parts = sorted(mean.items(), key=lambda pair: -pair[1])
    named = [f"{part} {seconds / total:.0%}" for part, seconds in parts if seconds >= plots.NEGLIGIBLE * total]
    return f"A step took {total:.3g} s on average: {', '.join(named)}."


def training_seconds(metrics: Metrics) -> float:
    """Return how long all steps took together, those that were not logged as long as the others; 0 if none was."""
    times = times_of(metrics)
    if not times["step"]:
        return 0.0
    return float(np.mean(np.sum([times[part] for part in TIMES], axis=0)) * max(times["step"]))


def non_finite(metrics: Metrics) -> list[str]:
    """Return which of the logged metrics had non-finite values."""
    broken = Counter(key for row in metrics for key, value in row.items() if not np.isfinite(value))
    worst = ", ".join(f"{cut(key, 60)} ({n})" for key, n in broken.most_common(5))
    return [f"Not finite at some steps, and left out of the curves: {worst}."] if broken else []


def failures(episodes: Sequence[TrainingEpisode]) -> list[str]:
    """Return how many training episodes failed (the infrastructure broke), by kind of error."""
    failed = [e.record for e in episodes if e.record.outcome == Outcome.FAILED]
    if not failed:
        return []
    kinds = Counter(cut(r.failure.split(":", 1)[0], 60) or "no reason given" for r in failed)
    named = ", ".join(f"{kind} ({n})" for kind, n in kinds.most_common(6))
    return [f"{len(failed)} of {len(episodes)} training episodes failed and were masked: {named}."]


def base_notes(notes: object) -> list[str]:
    """Return the paragraphs on how the base policy was trained."""
    if not notes:
        return []
    text = notes if isinstance(notes, str) else json.dumps(notes, ensure_ascii=False, indent=2)
    return [part.strip() for part in re.split(r"\n\s*\n", cut(text, 8_000)) if part.strip()]
