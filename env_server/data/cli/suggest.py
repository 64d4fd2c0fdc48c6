"""`sqlenv data suggest`: proposed questions, for a person to accept, edit or reject; the accepted ones in a file.

Each accepted question is written at once, so that nothing is lost when the person leaves. What is proposed, and how it
is verified: `env_server.data.suggest.proposals`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rich.console import Console

from env_server.cache import default_cache_dir
from env_server.data.cli.asking import typed
from env_server.data.database_files import is_database_name
from env_server.data.folder import find_sources, read_places
from env_server.data.loading import is_folder
from env_server.data.question_files import SUGGESTED_FILE, question_files
from env_server.data.raw import RawQuestion
from env_server.data.suggest.proposals import Proposer, Source
from env_server.dataset import Question, Split
from env_server.errors import DataError
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.sandbox import limit_memory
from sqlenv.parser import unwritable_file, whole_number
from sqlenv.progress import reported

DESCRIPTION = """\
Propose questions about the databases of a folder of your own, with SQL that is verified: it runs, its answer can be
typed, is no matter of chance and not easily guessed, and variants of the database test it. Accept, edit or reject each;
the accepted ones are written to questions-suggested.jsonl in the folder, which is read beside your own questions. Edit
that file as you like: a line that you delete is a question less.
"""
EPILOG = """\
examples:
  sqlenv data suggest my-shop                          asks about each of 50 questions
  sqlenv data suggest my-shop --count 200 --yes        all of them, to look through in an editor
  sqlenv data suggest my-shop --yes --out drafts.jsonl
"""
_KEYS = "[y]es, [n]o, edit the [w]ords, edit the [s]ql, [a]ll that are left, [q]uit: "


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sqlenv data suggest`."""
    parser.add_argument("data", help="a folder of your own; it needs no questions yet")
    parser.add_argument("--count", type=whole_number(1), default=50, help="questions proposed (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="accept all without asking")
    parser.add_argument("--seed", type=int, default=0, help="another seed proposes others (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where to add the accepted ones (default: {SUGGESTED_FILE} there)"
    )


def run(args: argparse.Namespace) -> int:
    """Propose, ask and write; 0 when something was written, else 1. Raises DataError."""
    if not is_folder(args.data):
        raise DataError(f"{args.data} is no folder of your own. Give the folder that holds your tables")
    if not args.yes and not sys.stdin.isatty():
        raise DataError("there is no terminal to ask at. Add --yes to accept all, and look through the file afterwards")
    folder = Path(args.data).expanduser()
    target = args.out or folder / SUGGESTED_FILE
    if problem := unwritable_file(target):
        raise DataError(f"{target} cannot be written: {problem}. Choose another place with --out")
    settings = EnvSettings()
    limit_memory(settings.sandbox)
    sources, asked = _sources(folder)
    extra = _extra(asked)
    console = Console(highlight=False)
    written = 0
    with closing(Proposer(sources, settings, default_cache_dir(), args.seed)) as proposer:
        proposals = proposer.proposals(args.count)
        accepted = _reported(proposals, args.count) if args.yes else _asked(console, proposer, proposals, args.count)
        for question in accepted:
            _add(target, question, named=len(sources) > 1, extra=extra)
            written += 1
    if not written:
        console.print("Nothing was accepted, and nothing written." if not args.yes else _none(folder), soft_wrap=True)
        return 1
    few = "" if written >= args.count or not args.yes else f" There is no more to ask with --seed {args.seed}."
    console.print(f"{written:,} added to {target}.{few}", markup=False, soft_wrap=True)
    console.print(f"next: sqlenv data validate {args.data}", markup=False, soft_wrap=True)
    return 0


def _sources(folder: Path) -> tuple[list[Source], list[RawQuestion]]:
    """Return the databases, and the questions that are there; none where there is no file of them."""
    sources = find_sources(folder)
    asked = read_places(folder, sources)[1] if question_files(folder) else []
    cache = default_cache_dir()
    found = [
        Source(
            db_id=name,
            path=source.path(cache),
            imported=not is_database_name(source.files[0]),
            asked=tuple(question for question in asked if question.db_id == name),
        )
        for name, source in sources.usable.items()
    ]
    return found, asked


def _extra(asked: list[RawQuestion]) -> dict[str, str]:
    """Return what else each question must state: a split, where all others do."""
    return {"split": Split.TRAIN.value} if asked and all(q.split is not Split.ALL for q in asked) else {}


def _add(target: Path, question: Question, *, named: bool, extra: dict[str, str]) -> None:
    entry = {"question": question.text, "sql": question.gold_sql}
    if named:
        entry["database"] = question.db_id
    # Not read again: for whoever looks through the file.
    entry |= {**extra, "answer": format_answer(question.gold.rows)}
    try:
        with target.open("a+", encoding="utf-8") as file:
            file.seek(0)
            begun = file.read()
            gap = "\n" if begun and not begun.endswith("\n") else ""
            file.write(gap + json.dumps(entry, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}. Choose another place with --out") from error


def _reported(proposals: Iterator[Question], count: int) -> Iterator[Question]:
    with reported("verifying questions", count) as progress:
        for question in proposals:
            progress.advance()
            yield question


def _asked(console: Console, proposer: Proposer, proposals: Iterator[Question], count: int) -> Iterator[Question]:
    """Yield the questions that the person accepts, as they are or edited."""
    for number, proposed in enumerate(proposals, start=1):
        question = proposed
        reply = ""
        while reply not in ("y", "n", "a", "q"):
            _show(console, question, f"{number} of {count}")
            reply = typed(console, _KEYS, otherwise="q").lower()[:1]
            if reply in ("w", "s"):
                question = _edited(console, proposer, question, reply)
        if reply in ("y", "a"):
            yield question
        if reply == "a":
            yield from proposals
        if reply in ("a", "q"):
            return


def _show(console: Console, question: Question, title: str) -> None:
    console.print(f"\n{title}, {question.db_id}, {question.hardness.value}", style="dim", markup=False)
    console.print(question.text, style="bold", markup=False, soft_wrap=True)
    console.print(question.gold_sql, markup=False, soft_wrap=True)
    console.print(f"answer: {format_answer(question.gold.rows)}", markup=False, soft_wrap=True)


def _edited(console: Console, proposer: Proposer, question: Question, what: str) -> Question:
    """Ask for other words or another query; what cannot be asked so is told, and the question stays as it was."""
    text = typed(console, "question: ") if what == "w" else question.text
    sql = typed(console, "sql: ") if what == "s" else question.gold_sql
    if not text or not sql:
        return question
    try:
        return proposer.verified(question.db_id, text, sql, question.family)
    except DataError as error:
        console.print(f"That cannot be asked: {error}.", markup=False, soft_wrap=True)
        return question


def _none(folder: Path) -> str:
    return f"There is nothing to ask about {folder} that could be verified: its tables are too small, or in trouble."
