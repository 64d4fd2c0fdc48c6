"""The report of a run: one HTML file that explains what training did, from the run's folder alone.

Promises:

1. Self-contained: no script, no request of any kind (a content security policy forbids both), light and dark,
   readable on a phone. Pictures are images of their own, inside the file.
2. Every word from a database, a model or a config is escaped, without an exemption.
3. Honest: every rate carries its interval and its n; failed episodes, excluded questions and numbers that
   were not finite are named; two evaluations are compared only when they played the same questions the same
   way; the shown episodes are chosen by a fixed rule that shows losses too.
4. A partial run gives a report that says what is missing.
5. Bounded: long texts are cut and marked, curves are thinned, so that the file stays under 1.5 MB.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jinja2 import Environment, StrictUndefined

from env_server.dataset import Hardness
from sqlenv.parser import Parser, output_file
from trainer.eval.curves import window_for
from trainer.eval.metrics import in_order, meaning
from trainer.eval.run_files import RunFolder, TrainingEpisode, redacted
from trainer.eval.statistics import (
    GroupSummary,
    PairedDifference,
    compare,
    interval_text,
    keyed,
)
from trainer.report import plots
from trainer.report.exploration_tables import exploration_table, failure_table
from trainer.report.played import Played
from trainer.report.replays import OUTCOMES, cut, replays
from trainer.report.run_facts import departures_table, facts_table
from trainer.report.tables import NONE, Table
from trainer.rollout.episodes import Outcome

TEMPLATE = Path(__file__).with_name("report_template.html")
CONFIG_LIMIT = 40_000
MAX_REWARD_CURVES = 9
METRICS_HEADER = ["metric", "first", "last", "what it means"]
BRACKETS = "In brackets: 95% intervals."
RATIO = "sampling/importance_sampling_ratio"
WEIGHT = "reward_weights/"
MIXED = "mixed groups"
SIGNALS = {
    MIXED: "share of mixed groups",
    "gradient_share/correctness": "share of the gradient from them",
    "rollout/exploration_entropy": "entropy of explorations",
    "entropy": "entropy per token, in nats",
}
"""What tells whether a batch can teach, and whether the policy still explores, with the names they are shown by."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `sqlenv report`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, such as runs/tiny")
    parser.add_argument("--png", type=output_file, metavar="FILE", help="also write the learning curve as a picture")


def run(argv: Sequence[str]) -> int:
    """`sqlenv report`: write the report of a run and print where it is. Raises RunFolderError."""
    parser = Parser(prog="sqlenv report", description="Write a run's report.html again.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    written = [write_report(args.run)]
    if args.png is not None:
        plots.learning_curve_png(args.run, args.png)
        written.append(args.png)
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


def write_report(run: Path) -> Path:
    """Write `report.html` into the folder of a run and return its path. Raises RunFolderError."""
    folder = RunFolder.open(run)
    config = folder.config()
    metrics = folder.metrics()
    episodes = folder.episodes(turns=False)
    played = {e.label: Played(e, folder.evaluation_episodes(e.label)) for e in folder.evaluations()}
    before, after = played.get("before"), played.get("after")
    learning = plots.learning_of(folder, [(e.step, e.record) for e in episodes])
    sentence, detail = headline(before, after)
    page = {
        "name": folder.name,
        "headline": sentence,
        "detail": detail,
        "missing": missing(played, metrics, episodes),
        "notes": [*not_finite(metrics), *failures(episodes)],
        "alerts": folder.alerts(),
        "base_notes": base_notes(config.get("base_notes")),
        "pictures": pictures(learning, metrics),
        "metrics": metrics_table(metrics),
        "evaluations": evaluation_table(played) if played else None,
        "groups": [t for kind in ("hardness", "family") if (t := group_table(kind, before, after)) is not None],
        "outcomes": outcome_table(played) if played else None,
        "failures": failure_table(played) if played else None,
        "exploration": exploration_table(played) if played else None,
        "excluded": excluded_table(played),
        "signals": signal_line(metrics),
        "ratio": ratio_line(metrics),
        "times": time_line(metrics),
        "facts": facts_table(config, training_seconds(metrics), int(max((row["step"] for row in metrics), default=0))),
        "departures": departures_table(config),
        "replays": replays(before.records, after.records) if before and after and mismatch(before, after) == "" else [],
        "config": cut(json.dumps(redacted(config), ensure_ascii=False, indent=2), CONFIG_LIMIT),
    }
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return folder.write_report(environment.from_string(TEMPLATE.read_text("utf-8")).render(page))


def headline(before: Played | None, after: Played | None) -> tuple[str, str]:
    """Return the sentence that says what training changed, or what is known so far, and what stands behind it."""
    if before is None or after is None:
        one = before or after
        if one is None:
            return "No evaluation before or after training yet.", ""
        label, other = ("before", "after") if one is before else ("after", "before")
        return f"Success {label} training: {_rate(one)}.", f"There is no evaluation {other} training yet. {BRACKETS}"
    reason = mismatch(before, after)
    if reason:
        return f"Success was {_rate(before)} before and {_rate(after)} after.", f"Not comparable: {reason}. {BRACKETS}"
    paired = compare(before.records, after.records)
    interval = paired.interval
    verb = "rose from" if interval.low > 0 else "fell from" if interval.high < 0 else "did not change measurably:"
    change = f"{100 * paired.mean:+.1f} points ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
    unseen = before.evaluation.unseen_databases
    where = "unseen databases" if unseen else "unseen questions about databases seen in training"
    detail = (
        f"Paired over {counted(paired.n, 'question')} of {counted(paired.clusters, 'database')}: "
        f"{paired.better} went from wrong to right, {paired.worse} from right to wrong. "
    )
    if paired.unpaired:
        detail += f"Judged on one side only, and left out: {counted(paired.unpaired, 'question')}. "
    if (count := after.evaluation.best_of) > 1:
        detail += f"This policy, that of step {after.evaluation.step}, was chosen as the best of {count} by these very "
        detail += "questions, which flatters it; no interval here allows for that. "
    return f"On {where}, success {verb} {_rate(before)} to {_rate(after)}: {change}.", detail + BRACKETS


def mismatch(one: Played, other: Played) -> str:
    """Return why two evaluations cannot be compared, or nothing."""
    for field in ("data", "split", "answer_mode"):
        left, right = getattr(one.evaluation, field), getattr(other.evaluation, field)
        if left != right:
            return f"the {field.replace('_', ' ')} differs ({left} and {right})"
    if not keyed(one.records).keys() & keyed(other.records).keys():
        return "they have no judged question in common"
    return ""


def missing(played: Mapping[str, Played], metrics: Sequence[object], episodes: Sequence[object]) -> list[str]:
    """Return what the run has not written, or not yet."""
    found = {
        "an evaluation before training": "before" in played,
        "an evaluation after training": "after" in played,
        "training metrics": bool(metrics),
        "training episodes": bool(episodes),
    }
    return [name for name, there in found.items() if not there]


def pictures(learning: plots.Learning, metrics: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the sources of the pictures by name, empty where there is nothing to draw."""
    drawn = {"learning": "", "rewards": "", "weights": "", "signals": "", "times": ""}
    if learning.points or learning.during or learning.marks:
        drawn["learning"] = plots.svg_uri(plots.learning_curve(learning))
    if series := plots.series_of(metrics, reward_keys(metrics)):
        drawn["rewards"] = plots.svg_uri(plots.reward_curves(series, window_for(len(metrics))))
    if weights := plots.series_of(metrics, weight_keys(metrics)):
        drawn["weights"] = plots.svg_uri(plots.reward_curves(weights, 1))
    if signals := signals_of(metrics):
        drawn["signals"] = plots.svg_uri(plots.reward_curves(signals, window_for(len(metrics))))
    if (times := plots.times_of(metrics))["step"]:
        drawn["times"] = plots.svg_uri(plots.time_picture(times, window_for(len(metrics))))
    return drawn


def time_line(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return how the steps' time was spent, the longest part first, or that it was not logged."""
    times = plots.times_of(metrics)
    if not times["step"]:
        return "Where the time went was not logged."
    mean = {part: float(np.mean(times[part])) for part in plots.TIMES}
    whole = sum(mean.values())
    named = [
        f"{part} {seconds / whole:.0%}"
        for part, seconds in sorted(mean.items(), key=lambda pair: -pair[1])
        if seconds >= plots.NEGLIGIBLE * whole
    ]
    return f"A step took {whole:.3g} s on average: {', '.join(named)}."


def training_seconds(metrics: Sequence[Mapping[str, float]]) -> float:
    """Return how long all steps took together, those that were not logged as long as the others; 0 if none was."""
    times = plots.times_of(metrics)
    if not times["step"]:
        return 0.0
    return float(np.mean(np.sum([times[part] for part in plots.TIMES], axis=0)) * max(times["step"]))


def reward_keys(metrics: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the logged reward keys with the names they are shown by: the total, then each reward function."""
    logged = dict.fromkeys(key for row in metrics for key in row)
    keys = {"reward": "weighted reward"} if "reward" in logged else {}
    for key in logged:
        if match := re.fullmatch(r"rewards/(.+)/mean", key):
            keys[key] = cut(match[1], 40)
    return dict(list(keys.items())[:MAX_REWARD_CURVES])


def signals_of(metrics: Sequence[Mapping[str, float]]) -> list[plots.Series]:
    """Return the logged series of `SIGNALS`."""
    silent = "rollout/no_signal"
    return plots.series_of([{**row, MIXED: 1 - row[silent]} if silent in row else row for row in metrics], SIGNALS)


def signal_line(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return how many groups were mixed and how the policy explored, at first and at last; "" where nothing was logged.

    Each is the mean of a tenth of the steps.
    """
    parts = []
    for series in signals_of(metrics):
        window = window_for(len(series.values))
        first, last = (float(np.mean(values)) for values in (series.values[:window], series.values[-window:]))
        share = series.name.startswith("share")
        parts.append(
            f"{series.name} {first:.0%} to {last:.0%}" if share else f"{series.name} {first:.2f} to {last:.2f}"
        )
    return f"From the first steps to the last: {'; '.join(parts)}." if parts else ""


def weight_keys(metrics: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return the logged weights of rewards with the names they are shown by."""
    logged = dict.fromkeys(key for row in metrics for key in row if key.startswith(WEIGHT))
    return {key: f"weight of {cut(key.removeprefix(WEIGHT), 40)}" for key in list(logged)[:MAX_REWARD_CURVES]}


def evaluation_table(played: Mapping[str, Played]) -> Table:
    """Return all evaluations, with the paired difference to `before`."""
    header = ["policy", "success", "95% interval", "n", "points against before", "reward", "steps", "parsed", "failed"]
    base = played.get("before")
    rows = []
    for label, one in played.items():
        s = one.evaluation.summary
        same = base is None or label == "before" or mismatch(base, one) != ""
        against = NONE if base is None or same else difference(compare(base.records, one.records))
        name = label if one.evaluation.policy == label else f"{label} ({cut(one.evaluation.policy, 60)})"
        numbers = [f"{s.mean_reward:.2f}", f"{s.mean_steps:.1f}", f"{s.parse_rate:.1%}", str(s.failed)]
        rows.append(
            [name, f"{s.success_rate:.1%}", f"{interval_text(s.interval)}%", str(s.episodes), against, *numbers]
        )
    kinds = {(p.evaluation.data, p.evaluation.split, p.evaluation.answer_mode) for p in played.values()}
    what = "; ".join(f"{data}, split {split}, answers as {mode}" for data, split, mode in sorted(kinds))
    return Table(f"Evaluations on {cut(what, 300)}", header, rows)


def group_table(kind: str, before: Played | None, after: Played | None) -> Table | None:
    """Return success by hardness or family, before and after; None when nothing is grouped so."""
    sides = [(p, _by(p, kind)) for p in (before, after) if p is not None]
    names = dict.fromkeys(name for _, groups in sides for name in groups)
    if not names:
        return None
    known = [h.value for h in Hardness]
    order = sorted(names, key=lambda n: (known.index(n) if n in known else len(known), n))
    header = [kind, *(part for p, _ in sides for part in (p.evaluation.label, "95% interval", "n"))]
    paired = before is not None and after is not None and mismatch(before, after) == ""
    rows = []
    for name in order:
        cells = [cell for _, groups in sides for cell in _group_cells(groups.get(name))]
        change = []
        if paired and before is not None and after is not None:
            change = [_group_change(kind, name, before, after)]
        rows.append([cut(name, 60), *cells, *change])
    return Table(f"Success by {kind}", header + (["change in points"] if paired else []), rows)


def outcome_table(played: Mapping[str, Played]) -> Table:
    """Return how the episodes of each evaluation ended."""
    seen = {kind for p in played.values() for kind in p.evaluation.summary.outcomes}
    kinds = [o for o in OUTCOMES if o in seen] + sorted(seen - set(OUTCOMES))
    rows = []
    for kind in kinds:
        cells = []
        for one in played.values():
            count = one.evaluation.summary.outcomes.get(kind, 0)
            cells.append(f"{count} ({count / len(one.records):.0%})" if one.records else str(count))
        rows.append([OUTCOMES[Outcome(kind)] if kind in OUTCOMES else cut(kind, 60), *cells])
    return Table("How the episodes ended", ["ended", *played], rows)


def excluded_table(played: Mapping[str, Played]) -> Table | None:
    """Return the questions that the data set left out at load, by reason; None when there are none."""
    reasons = dict.fromkeys(reason for p in played.values() for reason in p.evaluation.summary.excluded)
    if not reasons:
        return None
    rows = [
        [cut(reason, 60), *(str(p.evaluation.summary.excluded.get(reason, 0)) for p in played.values())]
        for reason in reasons
    ]
    return Table("Questions left out at load, because they cannot be judged", ["reason", *played], rows)


def metrics_table(metrics: Sequence[Mapping[str, float]]) -> Table | None:
    """Return what was logged, with its first and its last value and what it means; None when nothing was."""
    ends: dict[str, tuple[float, float]] = {}
    for row in metrics:
        for name, value in row.items():
            ends[name] = (ends.get(name, (value,))[0], value)
    ends.pop("step", None)
    rows = [[cut(name, 60), *(f"{value:.4g}" for value in ends[name]), meaning(name)] for name in in_order(ends)]
    return (
        Table("Every metric at the first and at the last step that logged it", METRICS_HEADER, rows) if rows else None
    )


def ratio_line(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return how far the engine's token probabilities were from the trainer's, or that it was not logged."""
    values = {end: [row[key] for row in metrics if (key := f"{RATIO}/{end}") in row] for end in ("min", "mean", "max")}
    means = [v for v in values["mean"] if np.isfinite(v)]
    if not means:
        return f"The importance ratio ({RATIO}) was not logged."
    low, high = min(values["min"] or means), max(values["max"] or means)
    return (
        f"Importance ratio over {len(means)} steps: mean {np.mean(means):.6f}, smallest {low:.6f}, largest "
        f"{high:.6f}. It is 1 where the trainer gives each trained token the probability it was drawn with, that "
        "is, with the same weights and exactly the same prefix."
    )


def not_finite(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """Return which of the logged numbers are none."""
    broken = Counter(key for row in metrics for key, value in row.items() if not np.isfinite(value))
    worst = ", ".join(f"{cut(key, 60)} ({n})" for key, n in broken.most_common(5))
    return [f"Not finite at some steps, and left out of the curves: {worst}."] if broken else []


def failures(episodes: Sequence[TrainingEpisode]) -> list[str]:
    """Return how many training episodes the infrastructure lost, by kind of error."""
    failed = [e.record for e in episodes if e.record.outcome == Outcome.FAILED]
    if not failed:
        return []
    kinds = Counter(cut(r.failure.split(":", 1)[0], 60) or "no reason given" for r in failed)
    named = ", ".join(f"{kind} ({n})" for kind, n in kinds.most_common(6))
    return [f"{len(failed)} of {len(episodes)} training episodes failed and were masked: {named}."]


def base_notes(notes: object) -> list[str]:
    """Return the paragraphs on how the base policy was made."""
    if not notes:
        return []
    text = notes if isinstance(notes, str) else json.dumps(notes, ensure_ascii=False, indent=2)
    return [part.strip() for part in re.split(r"\n\s*\n", cut(text, 8_000)) if part.strip()]


def counted(n: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def difference(paired: PairedDifference) -> str:
    """Return a paired difference in percentage points."""
    low, high = 100 * paired.interval.low, 100 * paired.interval.high
    return f"{100 * paired.mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _rate(played: Played) -> str:
    summary = played.evaluation.summary
    return f"{summary.success_rate:.1%} ({interval_text(summary.interval)}%)"


def _by(played: Played, kind: str) -> dict[str, GroupSummary]:
    summary = played.evaluation.summary
    return summary.by_hardness if kind == "hardness" else summary.by_family


def _group_cells(group: GroupSummary | None) -> list[str]:
    if group is None:
        return [NONE, NONE, "0"]
    return [f"{group.success_rate:.1%}", f"{interval_text(group.interval)}%", str(group.episodes)]


def _group_change(kind: str, name: str, before: Played, after: Played) -> str:
    left, right = ([r for r in p.records if getattr(r, kind) == name] for p in (before, after))
    return difference(compare(left, right)) if keyed(left).keys() & keyed(right).keys() else NONE
