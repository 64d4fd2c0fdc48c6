"""What is wrong with the questions: golds that fail, are empty, depend on a tie, or are easily answered by luck.

`try_gold` runs the queries beside a gold that tell; the rest is pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from sqlglot import exp

from env_server.data.raw import RawQuestion
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Question, Split
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.sql.lexer import tokens
from env_server.sql.pool import Databases
from env_server.sql.schema import Schema
from env_server.sql.statements import MISSING_NAME
from env_server.test_suites.constants import QueryConstants, parse, read_constants
from env_server.test_suites.mutants import mutants, read_clauses
from env_server.test_suites.store import Suites
from env_server.test_suites.suite import reordered
from env_server.tools.findings import Finding, Kind, Place, QuestionFix
from env_server.tools.survey import DatabaseSurvey

FEW_TO_TRAIN = 8
"""A step of the shipped configs plays as many different questions."""
_COMPUTED = (exp.Sum, exp.Avg, exp.Max, exp.Min, exp.Ordered, exp.Add, exp.Sub, exp.Mul, exp.Div)
_COMPARED = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ, exp.NEQ, exp.Between)
_EXCLUDED = {
    ExclusionReason.GOLD_FAILS: (Kind.GOLD_FAILS, "Correct the query"),
    ExclusionReason.GOLD_TOO_SLOW: (Kind.GOLD_FAILS, "Correct the query"),
    ExclusionReason.GOLD_EMPTY: (Kind.GOLD_EMPTY, "Correct the query, or ask for something that is there"),
    ExclusionReason.GOLD_NULL: (Kind.GOLD_EMPTY, "Correct the query, or ask for something that is there"),
    ExclusionReason.GOLD_TOO_LARGE: (Kind.GOLD_TOO_LARGE, "Ask for less, such as a count or the first few"),
    ExclusionReason.NO_DATABASE: (Kind.NO_DATABASE, "Correct the files, or name another database"),
    ExclusionReason.NO_SQL: (Kind.NO_SQL, "Write its SQL, or use --answer_mode value"),
}


TRIVIAL_SHARE = 1 / 2
"""A question is trivially answerable when this share of the mutants give its answer."""


@dataclass(frozen=True, slots=True)
class MutantCounts:
    """Mutants of a gold that a test database tells from it, and those that give its answer on the database itself.

    In `value` mode nothing but the answer is judged, so an agent that asks like these is right by luck.
    """

    different: int
    agreeing: int

    def __str__(self) -> str:
        return f"{self.agreeing} of {self.different} mutants of the query"

    @property
    def share(self) -> float:
        """The share that agrees; 0 where there is no mutant."""
        return self.agreeing / self.different if self.different else 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What a usable question's gold does on its database and its test databases.

    `tied`: the same query, read in another order, gives another answer. `redundant`: clauses without which the answer
    is the same. `untested`: clauses that no test database tests. `problem`: why there are no test databases. `mutants`:
    None where none were made.
    """

    tied: bool = False
    redundant: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    problem: str = ""
    mutants: MutantCounts | None = None


def try_gold(question: Question, databases: Databases, suites: Suites | None) -> Trial:
    """Try a gold query. `suites`: None where no test databases are to be made. Raises DataError."""
    if not question.gold_sql:
        return Trial()

    def agrees(sql: str) -> bool | None:
        """Tell whether a query gives the gold's answer; None where it cannot be run."""
        try:
            result = databases.query(question.db_id, sql, len(question.gold.rows) + 1)
        except SQLError:
            return None
        return not result.more and judge_rows(result.rows, question.gold).correct

    schema = databases.schema(question.db_id)
    tree = parse(question.gold_sql, schema)
    tied = tree is not None and any(agrees(sql) is False for sql in reordered(tree, schema))
    clauses = () if tree is None else read_clauses(tree)
    redundant = tuple(clause.text for clause in clauses if any(agrees(probe) for probe in clause.probes))
    if suites is None:
        return Trial(tied, redundant)
    suite = suites.of(question)
    asked = () if tree is None else mutants(tree, schema)
    different = {sql for database in suite.databases for sql in database.rejected(asked)}
    counts = MutantCounts(len(different), sum(bool(agrees(sql)) for sql in different))
    return Trial(tied, redundant, suite.untested, suite.problem, counts)


def check_exclusion(exclusion: Exclusion, question: RawQuestion, survey: DatabaseSurvey | None) -> Finding:
    """Say why a question is left out, and how its query may be meant."""
    kind, hint = _EXCLUDED[exclusion.reason]
    sql, correction = "", ""
    if survey is not None and kind is Kind.GOLD_FAILS:
        sql, correction = _known_name(question.sql, exclusion.detail, survey.schema)
    if survey is not None and kind is Kind.GOLD_EMPTY:
        sql, correction = _known_text(question.sql, survey)
    place = Place(exclusion.db_id, question_id=exclusion.question_id)
    message = f"{exclusion.text!r}: {exclusion.detail}"
    return Finding(kind, message, correction if sql else hint, QuestionFix(sql) if sql else None, place=place)


def check_question(
    question: Question, trial: Trial, text_numbers: Mapping[tuple[str, str], str], schema: Schema
) -> Iterator[Finding]:
    """Yield what is wrong with a usable question. `text_numbers`: the columns of numbers that are text."""

    def finding(kind: Kind, message: str, hint: str) -> Finding:
        place = Place(question.db_id, question_id=question.question_id)
        return Finding(kind, f"{question.text!r}: {message}", hint, place=place)

    for column in _computed_columns(question.gold_sql, schema, text_numbers) if text_numbers else ():
        message = f"it computes with {column}, whose numbers are text; its answer is {_answer(question)}"
        yield finding(Kind.GOLD_TEXT_NUMBERS, message, "Make the column numbers, then look at the answer again")
    if trial.tied:
        what = "the order of the rows" if question.gold.ordered and not _is_limited(question.gold_sql) else "the result"
        message = f"{what} depends on a tie, and so on the order in which rows are stored ({question.gold_sql})"
        yield finding(Kind.GOLD_TIE, message, "Break the tie in the query and in the question, or ask for all that tie")
    if question.gold.is_zero:
        yield finding(Kind.GOLD_ZERO, "the answer is 0", "Ask for something that is there")
    elif trial.mutants is not None and trial.mutants.share >= TRIVIAL_SHARE:
        message = f"{trial.mutants} give {_answer(question)} as well"
        yield finding(Kind.TRIVIAL, message, "Ask for something that fewer queries give, or use --answer_mode sql")
    elif trial.redundant:
        message = f"the answer is the same without {trial.redundant[0]}"
        hint = "Choose a condition that leaves something out, or use --answer_mode sql"
        yield finding(Kind.REDUNDANT_CLAUSE, message, hint)
    if trial.problem:
        hint = "In sql mode a wrong query may pass for right. Choose another query"
        yield finding(Kind.NO_TEST_DATABASES, trial.problem, hint)
    for clause in trial.untested:
        hint = "In sql mode a query without it passes. Leave it out, if it never changes the answer"
        yield finding(Kind.UNTESTED_CLAUSE, f"no test database tests {clause}", hint)


def check_together(questions: Sequence[Question]) -> Iterator[Finding]:
    """Yield the questions that are asked twice."""
    asked: dict[tuple[str, str], list[Question]] = defaultdict(list)
    for question in questions:
        words = " ".join(re.findall(r"[\w'%.,-]+", f"{question.text} {question.evidence}".casefold())).strip(" .,")
        asked[question.db_id, words].append(question)
    for first, *others in asked.values():
        for other in others:
            place = Place(other.db_id, question_id=other.question_id)
            if judge_rows(other.gold.rows, first.gold).correct:
                message = f"{other.text!r} is asked by {first.question_id} already"
                yield Finding(Kind.SAME_QUESTION, message, "Leave one of them out", QuestionFix(""), place=place)
            else:
                answers = f"its answer is {_answer(other)}, and that of {first.question_id} is {_answer(first)}"
                hint = "Correct one of them, or say in the question what differs"
                yield Finding(Kind.CONTRADICTION, f"{other.text!r}: {answers}", hint, place=place)


def check_number(dataset: Dataset, spec: str) -> Iterator[Finding]:
    """Tell whether there are enough questions, and enough of them for evaluation."""
    train, evaluation = (len(dataset.select(split)) for split in (Split.TRAIN, Split.EVAL))
    if train < FEW_TO_TRAIN or not evaluation:
        hint = f"A step plays {FEW_TO_TRAIN} different ones. Have more proposed: sqlenv data suggest {spec}"
        yield Finding(Kind.FEW_QUESTIONS, f"{train} for training and {evaluation} for evaluation", hint)


def check_unasked(questions: Sequence[RawQuestion], survey: DatabaseSurvey, spec: str) -> Iterator[Finding]:
    """Yield the tables that no query of a database's questions names; none where a question comes without its query."""
    if not all(question.sql for question in questions):
        return
    named = [token for q in questions for token in tokens(q.sql) if token.lastgroup in ("word", "quoted")]
    words = {token[0].strip('"`[]').casefold() for token in named}
    for table in survey.tables:
        if table.rows and table.name.casefold() not in words:
            message, hint = (
                f"none of {len(questions)} questions is about it",
                f"Ask about it: sqlenv data suggest {spec}",
            )
            yield Finding(Kind.UNASKED_TABLE, message, hint, place=Place(survey.db_id, table.name))


def _known_name(sql: str, detail: str, schema: Schema) -> tuple[str, str]:
    """Return the query with the name that was meant, and a sentence about it; "" where none is near."""
    missing = MISSING_NAME.search(detail)
    if missing is None:
        return "", ""
    wrong = missing["name"].rpartition(".")[2]
    columns = missing["kind"] == "column"
    named = [each.name for table in schema.tables for each in (table.columns if columns else (table,))]
    close = get_close_matches(wrong.casefold(), [name.casefold() for name in named], n=1, cutoff=0.7)
    if not close:
        return "", ""
    right = next(name for name in named if name.casefold() == close[0])
    written = _with(sql, ("word", "quoted"), wrong, right)
    return written, f"Did you mean {right}? {written}"


def _known_text(sql: str, survey: DatabaseSurvey) -> tuple[str, str]:
    """Return the query with the text that a column has, where it compares with one that the column has not."""
    tree = parse(sql, survey.schema)
    constants = QueryConstants() if tree is None else read_constants(tree, survey.schema)
    for (table, column), values in constants.values.items():
        found = survey.table(table)
        surveyed = found.column(column) if found else None
        texts = [text for text, _ in surveyed.texts] if surveyed else []
        folded = {text.strip().casefold(): text for text in reversed(texts)}
        for value in values:
            if isinstance(value, str) and value not in texts:
                close = get_close_matches(value.strip().casefold(), list(folded), n=1, cutoff=0.75)
                written = _with(sql, ("literal", "quoted"), value, folded[close[0]]) if close else sql
                if written != sql:
                    return written, f"{table}.{column} has {folded[close[0]]!r}, not {value!r}: {written}"
    return "", ""


def _with(sql: str, kinds: Sequence[str], old: str, new: str) -> str:
    """Return the query with each such token that says `old` saying `new`, in its quotes."""
    parts = []
    for token in tokens(sql):
        text, inner = token[0], token[0].strip("'\"`[]")
        same = token.lastgroup in kinds and inner.replace("''", "'").casefold() == old.casefold()
        quotes = (text[0], text[-1]) if text[:1] in "'\"`[" else ("", "")
        parts.append(quotes[0] + new.replace("'", "''") + quotes[1] if same else text)
    return "".join(parts)


def _computed_columns(sql: str, schema: Schema, wanted: Mapping[tuple[str, str], str]) -> list[str]:
    """Return the wanted columns that a query computes with, compares with a number or sorts by."""
    tree = parse(sql, schema)
    if tree is None:
        return []
    tables = {each.name.casefold() for each in tree.find_all(exp.Table)}
    found: dict[str, None] = {}
    for column in tree.find_all(exp.Column):
        name = next((wanted[key] for table in tables if (key := (table, column.name.casefold())) in wanted), None)
        if name is not None and _is_computed(column):
            found[name] = None
    return list(found)


def _is_computed(column: exp.Column) -> bool:
    above = column.parent
    while isinstance(above, exp.Paren | exp.Cast | exp.Distinct):
        above = above.parent
    if isinstance(above, _COMPARED):
        return any(not each.is_string for each in above.find_all(exp.Literal))
    return isinstance(above, _COMPUTED)


def _is_limited(sql: str) -> bool:
    return any(token.lastgroup == "word" and token[0].casefold() == "limit" for token in tokens(sql))


def _answer(question: Question) -> str:
    rows = question.gold.rows
    text = "; ".join(", ".join("NULL" if cell is None else str(cell) for cell in row) for row in rows[:3])
    more = f" and {len(rows) - 3} more rows" if len(rows) > 3 else ""
    return (text if len(text) <= 60 else text[:60] + "...") + more
