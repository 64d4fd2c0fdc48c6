"""`sqlenv compare A B`: two evaluations, or two runs, question by question; B's success minus A's.

A and B are each a run's folder (its evaluation after training), RUN:LABEL for another one of its evaluations (before,
random, oracle, step-000050), or a file that `sqlenv evaluate --episodes_out FILE.jsonl` wrote. The questions that both
were judged on are paired; intervals are of 95%, with the database as the cluster (the jackknife over databases with the
quantile of t, in Bonett and Price's interval of a paired difference; trainer/eval/statistics.py has the method and its
sources).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from inference.adapters import RUN_MODEL
from sqlenv.parser import Parser, output_file
from trainer.eval.run_files import ABOUT, RunFolder, flags_of, read_about, read_records, runs_in
from trainer.eval.statistics import intervals_as_pairs
from trainer.policy import SCRIPTED, SETTINGS_FILE, read_play
from trainer.report.comparison import Comparison, Flip, Side, SideError, SideFacts, compare_sides
from trainer.report.tables import comparison_table, counted, differing_table, for_terminal, verdict

SHOWN = 10
"""Flipped questions of each direction, and differing flags, that are shown unless all are requested."""
AFTER = "after"
"""The label of a run's evaluation that is meant where none is named."""
RECORDS = ".jsonl"
HOW = "give a run's folder, RUN:LABEL, or a file that sqlenv evaluate --episodes_out FILE.jsonl wrote"


def build_parser() -> Parser:
    """The flags of `sqlenv compare`."""
    parser = Parser(
        prog="sqlenv compare",
        description=__doc__,
        epilog="examples:\n  sqlenv compare runs/first:before runs/first\n"
        "  sqlenv compare runs/first runs/second --png comparison.png\n"
        "  sqlenv compare base.jsonl runs/first --json",
    )
    parser.add_argument("a", metavar="A", help="the baseline, such as runs/first:before")
    parser.add_argument("b", metavar="B", help="what is compared with it, such as runs/first")
    parser.add_argument("--all", action="store_true", help=f"show all that differs, not the first {SHOWN} of each kind")
    parser.add_argument(
        "--png",
        type=output_file,
        metavar="FILE",
        help="draw it as well: success, and paired differences by difficulty and database; of two runs, training too",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return parser


def run(argv: Sequence[str]) -> int:
    """Compare as the flags say. Raises SQLEnvError."""
    args = build_parser().parse_args(argv)
    a, b = find_side(args.a), find_side(args.b)
    comparison = compare_sides(a, b)
    if args.json:
        sys.stdout.write(json.dumps(asdict(comparison, dict_factory=intervals_as_pairs)) + "\n")
    else:
        print_comparison(comparison, Console(highlight=False), everything=args.all)
    if args.png is not None:
        # matplotlib takes a second to import, which the text need not wait for.
        from trainer.report.plots import write_comparison

        write_comparison(comparison, a.run, b.run, args.png)
        Console(stderr=args.json, highlight=False).print(f"picture {args.png}", soft_wrap=True, markup=False)
    return 0


def print_comparison(comparison: Comparison, console: Console, *, everything: bool) -> None:
    """Print which is better and how certain that is, then where, how, on which questions, and why, in 80 columns.

    Text from data and policies is never parsed as markup. `everything`: all flipped questions and differing flags.
    """
    limit = None if everything else SHOWN
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        console.print(Text(f"{letter}  {_about(side)}"))
    for warning in comparison.warnings:
        console.print(Text(f"WARNING: {warning}", "bold yellow"))
    console.print()
    console.print(Text(verdict(comparison), "bold"))
    console.print(for_terminal(comparison_table(comparison)))
    for flips, letter in ((comparison.gained, "B"), (comparison.lost, "A")):
        title = f"right in {letter} alone: {counted(len(flips), 'question')}{_shown(len(flips), limit)}"
        console.print(Text(title, "bold"))
        for flip in flips[:limit]:
            _print_flip(console, flip)
    for title, found in (
        ("played differently", comparison.settings),
        ("runs started with other flags", comparison.flags),
    ):
        if found:
            console.print(Text(f"{title}: {len(found)}{_shown(len(found), limit)}", "bold"))
            console.print(for_terminal(differing_table(found[:limit]), wrap=True))


def _about(side: SideFacts) -> str:
    if not side.policy:
        return side.name
    return f"{side.name}: {side.policy} on {side.data}, split {side.split}, answers as {side.answer_mode}"


def _print_flip(console: Console, flip: Flip) -> None:
    about = ", ".join(part for part in (flip.database, flip.difficulty, flip.question_id) if part)
    console.print(Padding(Text(f"{about}: {_line(flip.question)}"), (0, 0, 0, 2), expand=False))
    for letter, ending in (("A", flip.a), ("B", flip.b)):
        how = f"failed ({ending.failure.replace('_', ' ')})" if ending.failure else "right"
        text = f"{letter}  {how} in {counted(ending.steps, 'step')}: {_line(ending.last_action)}"
        console.print(Padding(Text(text, "dim", no_wrap=True, overflow="ellipsis"), (0, 0, 0, 6), expand=False))


def _shown(count: int, limit: int | None) -> str:
    return "" if limit is None or count <= limit else f" (the first {limit}; --all shows them all)"


def _line(text: str) -> str:
    return " ".join(text.split())


def find_side(text: str) -> Side:
    """Return what the user named. Raises SQLEnvError: SideError, or RunFolderError for a broken file."""
    path, label = Path(text), ""
    if not path.exists() and ":" in text:
        head, _, label = text.rpartition(":")
        path = Path(head)
    if path.is_file() and not label:
        return _of_file(path)
    if (path / "evaluations").is_dir():
        return _of_run(RunFolder.open(path), label)
    if not path.is_dir():
        raise SideError(f"there is no {text}; {HOW}")
    inside = [str(run.path) for run in runs_in(path)] or [str(file) for file in sorted(path.glob(f"*{RECORDS}"))]
    if inside:
        raise SideError(f"{path} is a folder of several; name one: {', '.join(inside)}")
    raise SideError(
        f"{path} holds no evaluation; {HOW}. A policy is evaluated by: "
        f"sqlenv evaluate --policy {path} --episodes_out FILE{RECORDS}"
    )


def _of_run(run: RunFolder, label: str) -> Side:
    during = [evaluation for _, evaluation in run.evaluations_during()]
    found = {evaluation.label: evaluation for evaluation in (*run.evaluations(), *during)}
    notes: list[str] = []
    wanted = label or AFTER
    if not label and AFTER not in found and during:
        wanted = during[-1].label
        notes.append(f"{run.path} has no evaluation after training yet; this is its latest, {wanted}")
    if wanted not in found:
        named = f"it has {', '.join(f'{run.path}:{name}' for name in found)}" if found else "it has none at all"
        raise SideError(f"{run.path} has no evaluation {wanted!r}; {named}")
    evaluation = found[wanted]
    if evaluation.best_of > 1:
        notes.append(
            f"the policy of {run.path}:{wanted} was chosen as the best of {evaluation.best_of} by these very "
            "questions, which flatters it; no interval here allows for that"
        )
    settings = evaluation.settings or _settings_of(run)
    return Side(
        f"{run.path}:{wanted}",
        run.evaluation_episodes(wanted),
        evaluation,
        _relevant(settings, evaluation.policy),
        run,
        flags_of(run.config()),
        tuple(notes),
    )


def _of_file(path: Path) -> Side:
    run = path.parent.parent
    if path.parent.name == "evaluations" and (run / "config.json").is_file():
        return _of_run(RunFolder.open(run), path.name.partition(".")[0])
    if path.name == "episodes.jsonl" and (path.parent / "config.json").is_file():
        raise SideError(f"{path} are episodes of training, under many policies; give the run's folder, {path.parent}")
    if path.name.endswith(ABOUT):
        path = path.with_name(path.name.removesuffix(ABOUT) + RECORDS)
    evaluation, records = read_about(path), read_records(path)
    if evaluation is None:
        note = f"there is no {path.with_suffix(ABOUT).name} beside {path}: data, answer mode and settings are not known"
        return Side(str(path), records, notes=(note,))
    return Side(str(path), records, evaluation, _relevant(evaluation.settings, evaluation.policy))


def _settings_of(run: RunFolder) -> dict[str, Any]:
    """How a run's evaluations were played: greedily, and otherwise as its policy or a checkpoint says."""
    checkpoints = sorted(run.path.glob(f"checkpoint-*/{SETTINGS_FILE}"))
    for file in (run.path / RUN_MODEL / SETTINGS_FILE, *checkpoints):
        if file.is_file():
            return {**asdict(read_play(file).settings), "temperature": 0.0, "protocol": "explore"}
    return {}


def _relevant(settings: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Leave out the settings that do not affect this policy's play, and those that the questions and the data show."""
    if policy in SCRIPTED:
        wanted = {"step_budget", "seed"} if policy == "random" else {"step_budget"}
        return {name: value for name, value in settings.items() if name in wanted}
    without = {"data", "answer_mode", "eval_episodes"} | (set() if settings.get("temperature") else {"seed"})
    return {name: value for name, value in settings.items() if name not in without}
