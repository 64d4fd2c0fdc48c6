"""`sqlenv data doctor`: what is wrong with a data set, in words, and the repair of what is chosen, in a copy.

The finding and the mending are in `env_server.data.doctor`; here are the flags, the text, and the questions to the
person at the terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

from env_server.cache import default_cache_dir
from env_server.data.cli.asking import typed
from env_server.data.doctor.diagnosis import Diagnosis, diagnose, repairable
from env_server.data.doctor.findings import MEANINGS, Kind, Severity
from env_server.data.doctor.repairs import mend_folder
from env_server.data.loading import is_folder
from env_server.dataset import Dataset, Gold
from env_server.errors import DataError
from sqlenv.parser import unwritable_folder
from sqlenv.progress import reported

SHOWN = 5
"""Findings of one kind that are shown, unless all are asked for."""
_KEYS = "Repair it? [y]es, [n]o, [a]ll that are left, [q]uit asking: "
DATE_ORDERS = {"day-first": True, "month-first": False}
_VALIDATED = (Kind.NO_DATABASE, Kind.GOLD_FAILS, Kind.GOLD_EMPTY, Kind.GOLD_TOO_LARGE)
"""What a validation counts and lists itself."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
DESCRIPTION = """\
Say what is wrong with the files and the questions of a data set, where, and what to do about it: numbers that are text,
dates in mixed formats, words for missing values, keys that are not declared, repeated rows, golds that fail, are empty,
left to chance, guessable or lucky, and so on. With --fix, repair what can be repaired, in a copy; your own files are
never written to. Ends with status 0 when nothing but notes was found, else with 1.
"""
EPILOG = """\
examples:
  sqlenv data doctor my-shop
  sqlenv data doctor my-shop --fix                     asks before each repair; the copy is fixed/my-shop
  sqlenv data doctor my-shop --fix --yes --out clean   all repairs
  sqlenv data doctor my-shop --only number_as_text,mixed_dates --dates day-first
  sqlenv data doctor spider:data/spider --quick --json | jq .counts
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sqlenv data doctor`, beside the data set and the answer mode."""
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired, in a copy of the folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the copy (default: fixed/NAME beside the folder)")
    parser.add_argument("--yes", action="store_true", help="with --fix: do not ask, make every repair")
    parser.add_argument("--only", metavar="KINDS", help="look at these kinds of trouble alone, separated by commas")
    parser.add_argument("--dates", choices=list(DATE_ORDERS), help="what 03/04/2024 is, where a column does not tell")
    parser.add_argument("--quick", action="store_true", help="do not measure what is guessable; seconds, not minutes")
    parser.add_argument("--all", action="store_true", help=f"show every finding, not {SHOWN} of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def run(args: argparse.Namespace) -> int:
    """Diagnose, and mend when asked to. Raises DataError."""
    _refuse_idle_flags(args)
    kinds = _kinds(args.only)
    order = DATE_ORDERS.get(args.dates)
    with progress_bar() as progress:
        found = diagnose(
            args.data,
            default_cache_dir(),
            answer_mode=args.answer_mode,
            variants=not args.quick,
            order=order,
            progress=progress,
        )
    console = Console(highlight=False, stderr=args.json)
    places = [i for i, finding in enumerate(found.findings) if kinds is None or finding.kind in kinds]
    if args.json:
        sys.stdout.write(json.dumps(summary(found, places)) + "\n")
    else:
        console.print(text_of(found, places, None if args.all else SHOWN), soft_wrap=True)
    if args.fix:
        _fix(console, found, places, args, order)
    return int(any(found.findings[i].severity is not Severity.NOTE for i in places))


def beside_validation(diagnosis: Diagnosis) -> list[int]:
    """Return the places of the findings that a validation does not list itself, notes aside."""
    return [
        i
        for i, finding in enumerate(diagnosis.findings)
        if finding.severity is not Severity.NOTE and finding.kind not in _VALIDATED
    ]


def _refuse_idle_flags(args: argparse.Namespace) -> None:
    for flag in ("out", "yes"):
        if getattr(args, flag) and not args.fix:
            raise DataError(f"--{flag} says how to repair, and nothing is repaired without --fix. Add it")
    if args.fix and not is_folder(args.data):
        raise DataError(f"--fix repairs a folder of your own, and {args.data} is none. Leave it out")
    if args.fix and not args.yes and not sys.stdin.isatty():
        raise DataError("--fix asks before each repair, and there is no terminal to ask at. Add --yes to make them all")
    if args.fix and (problem := unwritable_folder(_target(args).parent)):
        raise DataError(f"{_target(args)} cannot be written: {problem}. Choose another place with --out")


def _kinds(only: str | None) -> set[Kind] | None:
    if only is None:
        return None
    names = [name.strip() for name in only.split(",")]
    known = [kind.value for kind in Kind]
    if unknown := next((name for name in names if name not in known), None):
        close = get_close_matches(unknown, known, n=1)
        fix = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
        raise DataError(f"--only: there is no kind of trouble {unknown!r}. {fix}")
    return {Kind(name) for name in names}


def summary(diagnosis: Diagnosis, places: Iterable[int]) -> dict[str, object]:
    """Return the findings as JSON."""
    chosen = list(places)
    counts: dict[str, int] = {}
    for i in chosen:
        kind = diagnosis.findings[i].kind.value
        counts[kind] = counts.get(kind, 0) + 1
    return {
        "data": diagnosis.spec,
        "counts": counts,
        "findings": [
            {
                "kind": finding.kind.value,
                "severity": finding.severity.value,
                "where": diagnosis.where(i),
                "database": finding.place.db_id,
                "table": finding.place.table,
                "column": finding.place.column,
                "question_id": finding.place.question_id,
                "lines": list(diagnosis.lines.get(i, ())),
                "found": finding.said,
                "fix": finding.advice,
                "repairable": repairable(finding, diagnosis.files),
            }
            for i, finding in ((i, diagnosis.findings[i]) for i in chosen)
        ],
    }


def text_of(diagnosis: Diagnosis, places: Sequence[int], shown: int | None = SHOWN) -> Group:
    """Return the findings for a person, the worst kind first; `shown` of each kind, None for all."""
    parts = [Text(_headline(diagnosis, places), style="bold")]
    for kind, group in groupby(places, key=lambda i: diagnosis.findings[i].kind):
        parts += _kind_text(diagnosis, kind, list(group), shown)
    count = sum(repairable(diagnosis.findings[i], diagnosis.files) for i in places)
    if count and is_folder(diagnosis.spec):
        said = "\nOne of them can be repaired" if count == 1 else f"\n{count:,} of them can be repaired"
        parts.append(Text(f"{said}, in a copy: sqlenv data doctor {diagnosis.spec} --fix"))
    return Group(*parts)


def _kind_text(diagnosis: Diagnosis, kind: Kind, group: list[int], shown: int | None) -> Iterator[Text]:
    severity, meaning = MEANINGS[kind]
    yield Text.assemble("\n", (severity.value, _STYLES[severity]), f" {kind.value}: {meaning}")
    for i in group[:shown]:
        finding = diagnosis.findings[i]
        yield Text(f"  {diagnosis.where(i)}: {finding.said}\n    {finding.advice}")
    if shown is not None and len(group) > shown:
        yield Text(f"  and {len(group) - shown:,} more (--all shows them)", style="dim")


def _headline(diagnosis: Diagnosis, places: Sequence[int]) -> str:
    if not places:
        return f"{diagnosis.spec}: nothing is wrong, as far as it can be told"
    counts = [(each, sum(diagnosis.findings[i].severity is each for i in places)) for each in Severity]
    told = ", ".join(f"{count:,} {each.value}{'' if count == 1 else 's'}" for each, count in counts if count)
    return f"{diagnosis.spec}: {told}"


def _fix(
    console: Console, diagnosis: Diagnosis, places: Sequence[int], args: argparse.Namespace, order: bool | None
) -> None:
    offered = [i for i in places if repairable(diagnosis.findings[i], diagnosis.files)]
    chosen = offered if args.yes else list(_asked(console, diagnosis, offered))
    if not chosen:
        console.print("\nNothing was repaired, and nothing written.", markup=False)
        return
    folder, target = Path(args.data).expanduser(), _target(args)
    findings = [diagnosis.findings[i] for i in chosen]
    mend_folder(diagnosis, findings, target)
    again = diagnose(str(target), default_cache_dir(), answer_mode=args.answer_mode, variants=False, order=order)
    said = f"\n{len(chosen):,} repaired in {target}; {folder} is as it was."
    console.print(said, markup=False, soft_wrap=True)
    lines = _changed_answers(diagnosis.dataset, again.dataset)
    if lines:
        console.print("\nAnswers that are other ones now:", style="bold")
        console.print("\n".join(f"  {line}" for line in lines), markup=False, soft_wrap=True)
    left = sum(each.severity is not Severity.NOTE for each in again.findings)
    console.print(f"\n{_left(left)}: sqlenv data doctor {target}", markup=False, soft_wrap=True)


def _target(args: argparse.Namespace) -> Path:
    folder = Path(args.data).expanduser()
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return args.out or named.parent / "fixed" / named.name


def _left(count: int) -> str:
    return "Look at what is left" if count else "Nothing but notes is left"


def _asked(console: Console, diagnosis: Diagnosis, offered: Sequence[int]) -> Iterator[int]:
    """Ask before each repair."""
    for done, i in enumerate(offered):
        finding = diagnosis.findings[i]
        console.print(f"\n{diagnosis.where(i)}: {finding.said}\n  {finding.advice}", markup=False, soft_wrap=True)
        reply = ""
        while reply not in ("y", "n", "a", "q"):
            reply = typed(console, _KEYS, otherwise="q").lower()[:1]
        if reply == "a":
            yield from offered[done:]
        if reply in ("a", "q"):
            return
        if reply == "y":
            yield i


def _changed_answers(before: Dataset | None, after: Dataset | None) -> list[str]:
    """Say which questions have another answer after the repair, or none any more."""
    if before is None or after is None:
        return []
    golds = {question.text: question.gold for question in after.questions}
    times = Counter(question.text for question in before.questions)
    lost = {exclusion.text: exclusion.detail for exclusion in after.excluded}
    lines = []
    for question in before.questions:
        now = golds.get(question.text)
        if times[question.text] > 1:  # which is which cannot be told
            continue
        if now is not None and now.rows != question.gold.rows:
            lines.append(f"{question.text} It was {_shown(question.gold)}, it is {_shown(now)}")
        elif now is None and question.text in lost:
            lines.append(f"{question.text} It was {_shown(question.gold)}; now {lost[question.text]}")
    return lines


def _shown(gold: Gold) -> str:
    cells = [["NULL" if cell is None else str(cell) for cell in row] for row in gold.rows[:SHOWN]]
    rows = [row[0] if gold.width == 1 else f"({', '.join(row)})" for row in cells]
    return ", ".join(rows) + (", ..." if len(gold.rows) > len(rows) else "")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Report how far a diagnosis is."""
    with reported("reading the data") as progress:
        yield lambda what, done, total: progress.update(done, total, what)
