"""`sqlenv data doctor`: what a data set holds, what is wrong with it, and the fix of what is chosen, in a copy.

What is found is decided by `env_server.tools.diagnosis`; here are the flags, the text, the JSON, and the questions to
the person at the terminal. It shows gold queries and answers, so it is not for an agent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from env_server.cache import default_cache_dir
from env_server.data.cells import DecimalMark
from env_server.data.loading import is_folder
from env_server.dataset import Dataset, ExclusionReason, Gold, Hardness, Question, Split
from env_server.errors import DataError
from env_server.sql.display import describe_table
from env_server.tools.diagnosis import Diagnosis, diagnose
from env_server.tools.findings import Finding, Kind, Severity, Stated
from env_server.tools.fixes import changes_file, fix_folder
from env_server.tools.terminal import ask, counted
from env_server.types import AnswerMode
from sqlenv.parser import unwritable_folder, whole_number
from sqlenv.progress import reported

SHOWN = 5
"""Findings of one kind, and databases, that are shown unless all are asked for."""
_KEYS = "Fix it? [y]es, [n]o, [a]ll that are left, [q]uit asking: "
DATE_ORDERS = {"day-first": True, "month-first": False}
DECIMAL_MARKS: dict[str, DecimalMark] = {"point": ".", "comma": ","}
_UNCERTAIN = (Kind.DUPLICATE_ROWS, Kind.SENTINEL_NUMBER, Kind.NUMBER_OR_CODE)
"""Two equal rows may be two sales, -999 a debt and 1.10 a version: fixed when a person says so, or names the
kind with --only."""
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
DESCRIPTION = """\
Account for every question of a data set and say what is wrong with its files and questions, where, and what to do about
it. Every gold query is run, and the environment itself judges every gold answer: numbers that are text, dates in mixed
formats, words for missing values, keys that are not declared, repeated rows, golds that fail, are empty, depend on a
tie or are trivially answerable, and so on. With --fix, fix what can be fixed, in a copy; your own files are never
written to. Ends with status 0 when nothing but notes was found, else with 1.
"""
EPILOG = """\
examples:
  sqlenv data doctor my-shop
  sqlenv data doctor my-shop --fix                     asks before each fix; the copy is fixed/my-shop
  sqlenv data doctor my-shop --fix --yes --out clean   all fixes
  sqlenv data doctor my-shop --only number_as_text,mixed_dates --dates day-first
  sqlenv data doctor spider:data/spider --quick --json | jq .counts
  sqlenv data doctor spider:data/spider --db farm --samples 3
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sqlenv data doctor`, beside the data set and the answer mode."""
    parser.add_argument("--db", default="", help="examine this database alone, and show its columns")
    parser.add_argument("--only", metavar="KINDS", help="show these kinds of issues alone, separated by commas")
    parser.add_argument("--quick", action="store_true", help="make no test databases; seconds, not minutes")
    parser.add_argument("--all", action="store_true", help=f"show everything, not {SHOWN} findings of each kind")
    parser.add_argument(
        "--samples", type=whole_number(0), default=0, help="questions shown with their golds (default: %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, with each question, instead of text"
    )
    parser.add_argument("--fix", action="store_true", help="fix what can be fixed, in a copy of the folder")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the copy (default: fixed/NAME beside the folder)")
    parser.add_argument("--yes", action="store_true", help="with --fix: do not ask, make every fix that is certain")
    parser.add_argument("--dates", choices=list(DATE_ORDERS), help="what 03/04/2024 is, where a column leaves it open")
    parser.add_argument(
        "--pivot_year", type=whole_number(0), help="the last two-digit year of this century: 29 for 2029"
    )
    parser.add_argument("--decimal", choices=list(DECIMAL_MARKS), help="what 1,234 has, where a table leaves it open")
    parser.add_argument("--encoding", default="", help="that of the files that are not UTF-8, such as cp1250")


def run(args: argparse.Namespace) -> int:
    """Diagnose, and fix when asked to. Raises DataError."""
    _refuse_idle_flags(args)
    kinds = _kinds(args.only)
    diagnosis = _diagnosed(args.data, args, test_databases=not args.quick)
    chosen = [finding for finding in diagnosis.findings if kinds is None or finding.kind in kinds]
    console = Console(highlight=False, stderr=args.json)
    if args.json:
        sys.stdout.write(json.dumps(summary(diagnosis, args.answer_mode, chosen)) + "\n")
    else:
        shown = None if args.all else SHOWN
        if kinds is None:
            console.print(overview(diagnosis, args.answer_mode, shown, columns=bool(args.db)), soft_wrap=True)
            console.print(*map(_sample, _evenly_spaced(diagnosis, args.samples)), sep="\n", end="", soft_wrap=True)
        console.print(findings_text(diagnosis, chosen, shown), soft_wrap=True)
    if args.fix:
        _fix(console, diagnosis, chosen, args)
    return int(any(finding.severity is not Severity.NOTE for finding in chosen))


def _diagnosed(spec: str, args: argparse.Namespace, *, test_databases: bool) -> Diagnosis:
    decimal_mark = DECIMAL_MARKS.get(args.decimal)
    stated = Stated(DATE_ORDERS.get(args.dates), decimal_mark, args.pivot_year, args.encoding)
    with _progress() as progress:
        return diagnose(
            spec,
            default_cache_dir(),
            answer_mode=args.answer_mode,
            test_databases=test_databases,
            stated=stated,
            db_id=args.db,
            progress=progress,
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    with reported("reading the data") as progress:
        yield lambda what, done, total: progress.update(done, total, what)


def _refuse_idle_flags(args: argparse.Namespace) -> None:
    for flag in ("out", "yes"):
        if getattr(args, flag) and not args.fix:
            raise DataError(f"--{flag} says how to fix, and nothing is fixed without --fix. Add it")
    if args.json and args.samples:
        raise DataError("--json lists each question. Leave --samples out")
    if args.only and args.samples:
        raise DataError("--only shows issues alone. Leave --samples out")
    if not args.fix:
        return
    if not is_folder(args.data):
        raise DataError(f"--fix needs a custom folder, and {args.data} is none. Leave it out")
    if args.db:
        raise DataError("--fix copies the whole folder. Leave --db out")
    if not args.yes and not sys.stdin.isatty():
        raise DataError("--fix asks before each fix, and there is no terminal to ask at. Add --yes to make them all")
    if problem := unwritable_folder(_target(args).parent):
        raise DataError(f"{_target(args)} cannot be written: {problem}. Choose another place with --out")


def _kinds(only: str | None) -> set[Kind] | None:
    if only is None:
        return None
    names = [name.strip() for name in only.split(",")]
    known = [kind.value for kind in Kind]
    if unknown := next((name for name in names if name not in known), None):
        close = get_close_matches(unknown, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
        raise DataError(f"--only: there is no kind of issue {unknown!r}. {hint}")
    return {kind for kind in Kind if kind.value in names}


def summary(diagnosis: Diagnosis, answer_mode: AnswerMode, findings: Sequence[Finding]) -> dict[str, object]:
    """Return everything as JSON: counts, each finding, and what became of each question."""
    dataset = diagnosis.dataset or Dataset("", (), {})
    usable, excluded = dataset.questions, dataset.excluded
    return {
        "data": diagnosis.spec,
        "answer_mode": answer_mode.value,
        "databases": len(diagnosis.surveys),
        "usable": len(usable),
        "excluded": {reason.value: count for reason, count in _reasons(dataset).items()},
        "splits": dict(Counter(question.split.value for question in usable)),
        "hardness": dict(Counter(question.hardness.value for question in usable)),
        "counts": dict(Counter(finding.kind.value for finding in findings)),
        "findings": [
            {
                "kind": finding.kind.value,
                "severity": finding.severity.value,
                "where": diagnosis.where(finding),
                "database": finding.place.db_id,
                "table": finding.place.table,
                "column": finding.place.column,
                "question_id": finding.place.question_id,
                "lines": diagnosis.lines_of(finding),
                "message": finding.message,
                "hint": finding.hint,
                "fixable": diagnosis.is_fixable(finding),
            }
            for finding in findings
        ],
        "questions": [
            *(_record(diagnosis, question) for question in usable),
            *(
                {
                    "question_id": each.question_id,
                    "db_id": each.db_id,
                    "usable": False,
                    "reason": each.reason.value,
                    "detail": each.detail,
                }
                for each in excluded
            ),
        ],
    }


def _record(diagnosis: Diagnosis, question: Question) -> dict[str, object]:
    trial = diagnosis.trials[question.question_id]
    mutants = trial.mutants
    return {
        "question_id": question.question_id,
        "db_id": question.db_id,
        "usable": True,
        "split": question.split.value,
        "hardness": question.hardness.value,
        "family": question.family,
        "duplicate_of": question.duplicate_of,
        **({} if mutants is None else {"mutants": mutants.different, "agreeing_mutants": mutants.agreeing}),
    }


def _reasons(dataset: Dataset) -> Counter[ExclusionReason]:
    return Counter(exclusion.reason for exclusion in dataset.excluded)


def overview(diagnosis: Diagnosis, answer_mode: AnswerMode, shown: int | None, *, columns: bool = False) -> Group:
    """Return the accounts of a data set: its questions and databases. `columns`: show each database's columns."""
    parts: list[RenderableType] = []
    dataset = diagnosis.dataset
    if dataset is not None:
        parts += _question_counts(diagnosis.spec, dataset, answer_mode)
    parts += _databases(diagnosis, shown)
    if columns:
        tables = [table for survey in diagnosis.surveys.values() for table in survey.schema.tables]
        parts += [Text(describe_table(table) + "\n") for table in tables]
    return Group(*parts)


def _question_counts(spec: str, dataset: Dataset, answer_mode: AnswerMode) -> Iterator[RenderableType]:
    questions = dataset.questions
    by = "a value" if answer_mode is AnswerMode.VALUE else "a query"
    total = counted(len(questions) + len(dataset.excluded), "question")
    excluded = ", ".join(f"{count:,} {reason.value}" for reason, count in _reasons(dataset).most_common())
    copies = sum(bool(question.duplicate_of) for question in questions)
    parts = [f"{len(questions):,} usable", f"{len(dataset.excluded):,} excluded{f' ({excluded})' if excluded else ''}"]
    parts += [f"{counted(copies, 'duplicate')} (the SQL of an earlier question, up to formatting)"] if copies else []
    yield Text.assemble((spec, "bold"), f": {total}, answered with {by}: {', '.join(parts)}")
    if not questions:
        return
    levels = [level for level in Hardness if any(question.hardness is level for question in questions)]
    table = _table("split", "databases", *levels, "questions")
    for split in (Split.TRAIN, Split.EVAL, Split.ALL):
        chosen = dataset.select(split)
        hardness = Counter(question.hardness for question in chosen)
        databases = len({question.db_id for question in chosen})
        numbers = (databases, *(hardness[level] for level in levels), len(chosen))
        table.add_row(split.value, *(f"{number:,}" for number in numbers))
    yield table


def _databases(diagnosis: Diagnosis, shown: int | None) -> Iterator[RenderableType]:
    table = _table("database", "questions", "tables", "columns", "rows")
    table.add_column("split")
    dataset = diagnosis.dataset or Dataset("", (), {})
    questions = Counter(question.db_id for question in dataset.questions)
    splits = dataset.splits()
    for name, survey in list(diagnosis.surveys.items())[:shown]:
        columns = sum(len(each.columns) for each in survey.tables)
        numbers = (questions[name], len(survey.tables), columns, sum(each.rows for each in survey.tables))
        table.add_row(Text(name), *(f"{number:,}" for number in numbers), " and ".join(splits.get(name, ())))
    yield table
    if shown is not None and len(diagnosis.surveys) > shown:
        yield Text(f"and {len(diagnosis.surveys) - shown:,} more databases (--all shows them)\n", style="dim")


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _evenly_spaced(diagnosis: Diagnosis, count: int) -> list[Question]:
    questions = diagnosis.dataset.questions if diagnosis.dataset else ()
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def _sample(question: Question) -> Text:
    lines = [f"{question.text}{f' ({question.evidence})' if question.evidence else ''}"]
    lines += [" ".join(question.gold_sql.split())] if question.gold_sql else []
    title = (question.question_id, question.split, question.hardness, question.family, question.db_id)
    body = "".join(f"  {line}\n" for line in (*lines, f"answer: {_shown(question.gold)}"))
    return Text.assemble((", ".join(filter(None, title)), "bold"), "\n", body)


def findings_text(diagnosis: Diagnosis, findings: Sequence[Finding], shown: int | None = SHOWN) -> Group:
    """Return the findings for a person, the worst kind first; `shown` of each kind, None for all."""
    counts = Counter(finding.severity for finding in findings)
    found = ", ".join(counted(counts[severity], severity.value) for severity in Severity if counts[severity])
    parts = [Text(f"{diagnosis.spec}: {found or 'no issues found'}", style="bold")]
    for kind, group in groupby(findings, key=lambda finding: finding.kind):
        parts.append(Text.assemble("\n", (kind.severity.value, _STYLES[kind.severity]), f" {kind}: {kind.description}"))
        of_kind = list(group)
        parts += [Text(f"  {diagnosis.where(each)}: {each.message}\n    {each.hint}") for each in of_kind[:shown]]
        if shown is not None and len(of_kind) > shown:
            parts.append(Text(f"  and {len(of_kind) - shown:,} more (--all shows them)", style="dim"))
    count = sum(map(diagnosis.is_fixable, findings))
    if count and is_folder(diagnosis.spec):
        fixable = "One of them can be fixed" if count == 1 else f"{count:,} of them can be fixed"
        parts.append(Text(f"\n{fixable}, in a copy: sqlenv data doctor {diagnosis.spec} --fix"))
    return Group(*parts)


def _fix(console: Console, diagnosis: Diagnosis, findings: Sequence[Finding], args: argparse.Namespace) -> None:
    offered = [finding for finding in findings if diagnosis.is_fixable(finding)]
    left = [each for each in offered if args.yes and not args.only and each.kind in _UNCERTAIN]
    certain = [each for each in offered if each not in left]
    chosen = certain if args.yes else list(_asked(console, diagnosis, offered))

    def tell(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if left:
        kinds = ",".join(sorted({each.kind.value for each in left}))
        tell(f"\n{len(left):,} left as they are, for they may be meant so: fix them with --only {kinds}")
    if not chosen:
        tell("\nNothing was fixed, and nothing written.")
        return
    target = _target(args)
    cells = fix_folder(diagnosis, chosen, target)
    again = _diagnosed(str(target), args, test_databases=False)
    tell(f"\n{len(chosen):,} fixed in {target}; {args.data} is as it was.")
    tell(f"{counted(cells, 'cell')} changed, each listed in {changes_file(target)}")
    if lines := list(_changed_answers(diagnosis.dataset, again.dataset)):
        console.print("\nQuestions whose answer changed:", style="bold")
        tell("\n".join(f"  {line}" for line in lines))
    issues = any(each.severity is not Severity.NOTE for each in again.findings)
    tell(f"\n{'Look at what is left' if issues else 'Nothing but notes is left'}: sqlenv data doctor {target}")


def _target(args: argparse.Namespace) -> Path:
    folder = Path(args.data).expanduser()
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return args.out or named.parent / "fixed" / named.name


def _asked(console: Console, diagnosis: Diagnosis, offered: Sequence[Finding]) -> Iterator[Finding]:
    """Ask before each fix."""
    for done, finding in enumerate(offered):
        where = diagnosis.where(finding)
        console.print(f"\n{where}: {finding.message}\n  {finding.hint}", markup=False, soft_wrap=True)
        reply = ""
        while reply not in ("y", "n", "a", "q"):
            reply = ask(console, _KEYS, default="q").lower()[:1]
        if reply == "a":
            yield from offered[done:]
        if reply in ("a", "q"):
            return
        if reply == "y":
            yield finding


def _changed_answers(before: Dataset | None, after: Dataset | None) -> Iterator[str]:
    """Say which questions have another answer after the fixes, or none any more."""
    if before is None or after is None:
        return
    golds = {question.text: question.gold for question in after.questions}
    lost = {exclusion.text: exclusion.detail for exclusion in after.excluded}
    times = Counter(question.text for question in before.questions)
    for question in before.questions:
        now = golds.get(question.text)
        if times[question.text] > 1:  # which is which is open
            continue
        if now is not None and now.rows != question.gold.rows:
            yield f"{question.text} It was {_shown(question.gold)}, it is {_shown(now)}"
        elif now is None and question.text in lost:
            yield f"{question.text} It was {_shown(question.gold)}; now {lost[question.text]}"


def _shown(gold: Gold) -> str:
    cells = [["NULL" if cell is None else str(cell) for cell in row] for row in gold.rows[:SHOWN]]
    rows = [row[0] if gold.width == 1 else f"({', '.join(row)})" for row in cells]
    return ", ".join(rows) + (", ..." if len(gold.rows) > len(rows) else "")
