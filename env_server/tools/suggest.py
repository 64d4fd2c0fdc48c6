"""`sqlenv data suggest`: proposed questions, for a person to accept, edit or reject; the accepted ones in a file.

A proposal is drawn by one of the generator's families (`env_server.data.synthetic.families`) over the user's schema.
Guarantees, of each one:
- Its gold runs under the agent's limits and gives an answer that can be typed: no NULL, no repeated row, few cells.
- No tie decides the answer, no clause is redundant, and few mutants give the same answer.
- It has test databases, which test each of its clauses, so that it can be judged in `sql` mode as well.
- Neither its words nor its SQL are those of a question that exists already.
- The same files and seed give the same proposals.

Each accepted question is written at once, so that nothing is lost when the person leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console

from env_server.cache import default_cache_dir
from env_server.data.curation import max_gold_rows, unusable
from env_server.data.database_files import is_database_name
from env_server.data.folder import find_sources, read_places
from env_server.data.loading import is_folder
from env_server.data.question_files import SUGGESTED_FILE, question_files
from env_server.data.raw import RawQuestion
from env_server.data.synthetic.builder import FAMILIES, Judge, draw
from env_server.data.synthetic.families.common import Candidate
from env_server.data.synthetic.model import Database
from env_server.dataset import Gold, Question, Row, Split
from env_server.errors import DataError, SQLError
from env_server.judging.answers import format_answer
from env_server.reward import normalize_action
from env_server.settings import EnvSettings
from env_server.sql.hardness import hardness, orders_at_top_level
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox, limit_memory
from env_server.test_suites.profile import read_sample
from env_server.test_suites.store import Suites
from env_server.tools.columns import check_tables
from env_server.tools.custom_schema import custom_schema
from env_server.tools.findings import Severity, Stated
from env_server.tools.golds import try_gold
from env_server.tools.keys import check_keys, likely_references
from env_server.tools.survey import SURVEY_LIMITS, TableSurvey, read_references, read_survey
from env_server.tools.terminal import ask
from env_server.types import ActionType, AnswerMode
from sqlenv.parser import unwritable_file, whole_number
from sqlenv.progress import reported

MAX_GUESS_RATE = 0.34
"""How often a random cell may be the answer: users' tables are small, and test databases tell more than this does."""
MAX_AGREEING_SHARE = 1 / 3
"""Of the mutants: another proposal costs nothing, so it is stricter than where somebody wrote the question."""
PATIENCE = 60
"""Draws in a row without a proposal, after which a database has no more."""
DESCRIPTION = """\
Propose questions about the databases of a custom folder, with SQL that is verified: it runs, its answer can be typed,
does not depend on a tie and is not easily guessed, and test databases test it. Accept, edit or reject each; the
accepted ones are written to questions-suggested.jsonl in the folder, which is read beside your own questions. Edit that
file as you like: a line that you delete is a question less.
"""
EPILOG = """\
examples:
  sqlenv data suggest my-shop                          asks about each of 50 questions
  sqlenv data suggest my-shop --count 200 --yes        all of them, to look through in an editor
  sqlenv data suggest my-shop --yes --out drafts.jsonl
"""
_KEYS = "[y]es, [n]o, edit the [w]ords, edit the [s]ql, [a]ll that are left, [q]uit: "


@dataclass(frozen=True, slots=True)
class Source:
    """A database to ask about, and the questions that exist. `imported`: it was made from files of tables."""

    db_id: str
    path: Path
    imported: bool
    asked: tuple[RawQuestion, ...]


class UnaskableError(DataError):
    """A question cannot be asked: its query fails, its answer cannot be typed, depends on a tie, is guessed."""


class Proposer:
    """Proposes and verifies; one database after the other."""

    def __init__(self, sources: Sequence[Source], settings: EnvSettings, cache_dir: Path, seed: int) -> None:
        self._sources = sources
        self._settings = settings
        self._seed = seed
        databases = {source.db_id: source.path for source in sources}
        self._pool = DatabasePool(databases, settings.sandbox)
        self._suites = Suites(databases, settings.sandbox, cache_dir)
        self.refused: Counter[str] = Counter()
        """Why drafts could not be asked, and how often."""

    def close(self) -> None:
        """Close the databases."""
        self._pool.close()

    def proposals(self, count: int) -> Iterator[Question]:
        """Yield up to `count` questions, in turn about each database as long as it has some. Raises DataError."""
        drawing = [self._about(source) for source in self._sources]
        done = 0
        while drawing and done < count:
            for each in list(drawing):
                question = next(each, None)
                if question is None:
                    drawing.remove(each)
                elif done < count:
                    done += 1
                    yield question

    def verified(self, db_id: str, text: str, sql: str, family: str = "") -> Question:
        """Return the question with its answer; raises UnaskableError that says why it cannot be asked."""
        try:
            result = self._pool.query(db_id, sql, max_gold_rows(AnswerMode.VALUE, self._settings.display))
        except SQLError as error:
            raise UnaskableError(f"the query fails: {error}") from error
        problem = unusable(result, AnswerMode.VALUE, self._settings.display)
        if problem is not None:
            raise UnaskableError(problem.detail)
        gold = Gold(result.rows, orders_at_top_level(sql))
        question = Question(f"{db_id}-{text}", text, db_id, sql, hardness(sql), Split.TRAIN, gold, family)
        trial = try_gold(question, self._pool, None)
        if trial.tied:
            raise UnaskableError("the result depends on a tie")
        if trial.lacking:
            raise UnaskableError(f"it keeps rows without {trial.lacking.cause}, which it sorts by")
        if trial.redundant:
            raise UnaskableError(f"the answer is the same without {trial.redundant[0]}")
        trial = try_gold(question, self._pool, self._suites)
        if trial.problem:
            raise UnaskableError(trial.problem)
        if trial.mutants is not None and trial.mutants.share >= MAX_AGREEING_SHARE:
            raise UnaskableError(f"{trial.mutants} give the same answer")
        if trial.untested:
            raise UnaskableError(f"no test database tests {trial.untested[0]}")
        return question

    def _about(self, source: Source) -> Iterator[Question]:
        database = read_custom_schema(source)
        if database is None:
            return
        rng = Random(f"suggest/{self._seed}/{source.db_id}")
        judge = Judge(database, lambda sql: self._rows(source.db_id, sql), rng, MAX_GUESS_RATE)
        known = {normalize_action(ActionType.QUERY, question.sql) for question in source.asked}
        known |= {_bare(question.text) for question in source.asked}
        names = list(FAMILIES)
        idle = 0
        while idle < PATIENCE:
            family = rng.choices(names, [FAMILIES[name].share for name in names])[0]
            candidate = draw(FAMILIES[family], database, judge, rng)
            question = None if candidate is None else self._accepted(source.db_id, candidate, family, known)
            idle = idle + 1 if question is None else 0
            if question is not None:
                yield question

    def _accepted(self, db_id: str, candidate: Candidate, family: str, known: set[str]) -> Question | None:
        """Return the candidate as a question; None where it cannot be asked, or exists among the `known`."""
        sql, words = normalize_action(ActionType.QUERY, candidate.sql), _bare(candidate.text)
        if sql in known or words in known:
            return None
        known.add(sql)
        try:
            question = self.verified(db_id, candidate.text, candidate.sql, family)
        except UnaskableError as error:
            self.refused[str(error)] += 1
            return None
        known.add(words)
        return question

    def _rows(self, db_id: str, sql: str) -> list[Row]:
        """Run a query; a query that fails has no rows, which no question may have."""
        try:
            return list(self._pool.query(db_id, sql, max_gold_rows(AnswerMode.SQL, self._settings.display)).rows)
        except SQLError:
            return []


def read_custom_schema(source: Source) -> Database | None:
    """Describe a database as the families need it. Raises DataError when it cannot be read."""
    with closing(Sandbox(source.path, SURVEY_LIMITS)) as sandbox:
        try:
            survey = read_survey(sandbox, source.db_id, imported=source.imported)
            references = read_references(sandbox, likely_references(survey))
            rows = {table.name: _sample(sandbox, table) for table in survey.tables}
        except SQLError as error:
            raise DataError(f"{source.path} cannot be read: {error}. Copy or export it again") from error
    found = [*check_tables(survey, Stated()), *check_keys(survey)]
    faulty = {(f.place.table, f.place.column) for f in found if f.severity is not Severity.NOTE and f.place.column}
    return custom_schema(survey, rows, references, faulty)


def _sample(sandbox: Sandbox, table: TableSurvey) -> tuple[Row, ...]:
    """Return some rows; none where SQLite lacks what the table needs, such as a collation. Raises SQLError."""
    try:
        return read_sample(sandbox, table.name, [column.name for column in table.columns], table.rows)
    except SQLError as error:
        if error.kind != "missing":
            raise
        return ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sqlenv data suggest`."""
    parser.add_argument("data", help="a custom folder; it needs no questions yet")
    parser.add_argument("--count", type=whole_number(1), default=50, help="questions proposed (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="accept all without asking")
    parser.add_argument("--seed", type=int, default=0, help="another seed proposes others (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where to add the accepted ones (default: {SUGGESTED_FILE} there)"
    )


def run(args: argparse.Namespace) -> int:
    """Propose, ask and write; 0 when something was written, else 1. Raises DataError."""
    if not is_folder(args.data):
        raise DataError(f"{args.data} is no custom folder. Give the folder that holds your tables")
    if not args.yes and not sys.stdin.isatty():
        raise DataError("there is no terminal to ask at. Add --yes to accept all, and look through the file afterwards")
    folder = Path(args.data).expanduser()
    target = args.out or folder / SUGGESTED_FILE
    if problem := unwritable_file(target):
        raise DataError(f"{target} cannot be written: {problem}. Choose another place with --out")
    settings = EnvSettings()
    limit_memory(settings.sandbox)
    sources, asked = _sources(folder)
    # Where all other questions state a split, so must each new one.
    states_split = asked and all(question.split is not Split.ALL for question in asked)
    extra = {"split": Split.TRAIN.value} if states_split else {}
    console = Console(highlight=False)
    written = 0
    with closing(Proposer(sources, settings, default_cache_dir(), args.seed)) as proposer:
        proposals = proposer.proposals(args.count)
        accepted = _reported(proposals, args.count) if args.yes else _asked(console, proposer, proposals, args.count)
        for question in accepted:
            _add(target, question, extra | ({"database": question.db_id} if len(sources) > 1 else {}))
            written += 1
    if not written:
        why = next((reason for reason, _ in proposer.refused.most_common(1)), "its tables are too small, or faulty")
        nothing = f"There is nothing to ask about {folder} that could be verified: {why}."
        console.print(nothing if args.yes else "Nothing was accepted, and nothing written.", soft_wrap=True)
        return 1
    few = "" if written >= args.count or not args.yes else f" There is no more to ask with --seed {args.seed}."
    console.print(f"{written:,} added to {target}.{few}", markup=False, soft_wrap=True)
    console.print(f"next: sqlenv data doctor {args.data}", markup=False, soft_wrap=True)
    return 0


def _sources(folder: Path) -> tuple[list[Source], list[RawQuestion]]:
    """Return the databases, and the questions that exist; none where there is no file of them."""
    sources = find_sources(folder)
    asked = read_places(folder, sources)[1] if question_files(folder) else []
    found = [
        Source(
            db_id=name,
            path=source.path(default_cache_dir()),
            imported=not is_database_name(source.files[0]),
            asked=tuple(question for question in asked if question.db_id == name),
        )
        for name, source in sources.usable.items()
    ]
    return found, asked


def _add(target: Path, question: Question, extra: dict[str, str]) -> None:
    # The answer is not read again: it is for whoever looks through the file.
    answer = format_answer(question.gold.rows)
    entry = {"question": question.text, "sql": question.gold_sql, **extra, "answer": answer}
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
            title = f"{number} of {count}, {question.db_id}, {question.hardness.value}"
            console.print(f"\n{title}", style="dim", markup=False)
            console.print(question.text, style="bold", markup=False, soft_wrap=True)
            answer = f"answer: {format_answer(question.gold.rows)}"
            console.print(f"{question.gold_sql}\n{answer}", markup=False, soft_wrap=True)
            reply = ask(console, _KEYS, default="q").lower()[:1]
            if reply in ("w", "s"):
                question = _edited(console, proposer, question, reply)
        if reply in ("y", "a"):
            yield question
        if reply == "a":
            yield from proposals
        if reply in ("a", "q"):
            return


def _edited(console: Console, proposer: Proposer, question: Question, what: str) -> Question:
    """Ask for other words or another query; where it cannot be asked so, say why and return the question as it was."""
    text = ask(console, "question: ") if what == "w" else question.text
    sql = ask(console, "sql: ") if what == "s" else question.gold_sql
    if not text or not sql:
        return question
    try:
        return proposer.verified(question.db_id, text, sql, question.family)
    except UnaskableError as error:
        console.print(f"That cannot be asked: {error}.", markup=False, soft_wrap=True)
        return question


def _bare(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .?!")
