"""What is wrong with the questions: golds that fail, are empty, left to chance, guessable or lucky. Pure.

What only the database can tell is asked by `env_server.data.doctor.trials`, which hands in the outcome.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from sqlglot import exp

from env_server.data.doctor.findings import DropQuestion, Finding, Kind, Place, ReplaceSQL
from env_server.data.doctor.survey import DatabaseSurvey
from env_server.data.raw import RawQuestion
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Question, Split
from env_server.judging.verdict import judge_rows
from env_server.sql.lexer import tokens
from env_server.sql.schema import Schema
from env_server.sql.statements import MISSING_NAME
from env_server.test_suites.constants import QueryConstants, parse, read_constants
from env_server.test_suites.guessability import Guessability

FEW_TO_TRAIN = 8
"""A step of the shipped configs plays as many different questions."""
_COMPUTED = (exp.Sum, exp.Avg, exp.Max, exp.Min, exp.Ordered, exp.Add, exp.Sub, exp.Mul, exp.Div)
_COMPARED = (exp.GT, exp.GTE, exp.LT, exp.LTE, exp.EQ, exp.NEQ, exp.Between)
_REASONS = {
    ExclusionReason.GOLD_FAILS: Kind.GOLD_FAILS,
    ExclusionReason.GOLD_TOO_SLOW: Kind.GOLD_FAILS,
    ExclusionReason.GOLD_EMPTY: Kind.GOLD_EMPTY,
    ExclusionReason.GOLD_NULL: Kind.GOLD_EMPTY,
    ExclusionReason.GOLD_TOO_LARGE: Kind.GOLD_TOO_LARGE,
    ExclusionReason.NO_DATABASE: Kind.NO_DATABASE,
    ExclusionReason.NO_SQL: Kind.NO_SQL,
}
_ADVICE = {
    Kind.GOLD_FAILS: "Correct the query",
    Kind.GOLD_EMPTY: "Correct the query, or ask for something that is there",
    Kind.GOLD_TOO_LARGE: "Ask for less, such as a count or the first few",
    Kind.NO_SQL: "Write its SQL, or use --answer_mode value",
    Kind.NO_DATABASE: "Correct the files, or name another database",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What a usable question's gold does on its database.

    `other_order`: the same query, read in another order, gives another answer. `idle`: clauses without which the answer
    is the same. `guessability` and `no_variants` are known only where variants were made.
    """

    other_order: bool = False
    idle: tuple[str, ...] = ()
    guessability: Guessability | None = None
    no_variants: str = ""


def check_exclusion(exclusion: Exclusion, question: RawQuestion, survey: DatabaseSurvey | None) -> Finding:
    """Say why a question is left out, and how its query may be meant."""
    kind = _REASONS[exclusion.reason]
    place = Place(exclusion.db_id, question_id=exclusion.question_id)
    said = f"{exclusion.text!r}: {exclusion.detail}"
    if survey is not None and kind is Kind.GOLD_FAILS:
        sql, said_instead = _known_name(question.sql, exclusion.detail, survey.schema)
        if sql:
            return Finding(kind, place, said, said_instead, ReplaceSQL(sql))
    if survey is not None and kind is Kind.GOLD_EMPTY:
        sql, said_instead = _known_text(question.sql, survey)
        if said_instead:
            return Finding(kind, place, said, said_instead, ReplaceSQL(sql))
    return Finding(kind, place, said, _ADVICE[kind])


def check_question(
    question: Question, trial: Trial, text_numbers: Mapping[tuple[str, str], str], schema: Schema
) -> Iterator[Finding]:
    """Yield what is wrong with a usable question. `text_numbers`: the columns of numbers that are text."""
    place = Place(question.db_id, question_id=question.question_id)
    if text_numbers:
        for column in _computed_columns(question.gold_sql, schema, text_numbers):
            said = (
                f"{question.text!r} computes with {column}, whose numbers are text; its answer is {_answer(question)}"
            )
            yield Finding(Kind.GOLD_TEXT_NUMBERS, place, said, "Make the column numbers, then look at the answer again")
    if trial.other_order:
        what = "the order of the rows" if question.gold.ordered and not _limited(question.gold_sql) else "the answer"
        said = f"{question.text!r}: {what} depends on the order in which rows are stored ({question.gold_sql})"
        advice = (
            "Several rows are equally first. Break the tie in the query and in the question, or ask for all of them"
        )
        yield Finding(Kind.GOLD_CHANCE, place, said, advice)
    if question.gold.is_zero:
        said = f"{question.text!r}: the answer is 0"
        yield Finding(Kind.GOLD_ZERO, place, said, "Ask for something that is there")
    elif trial.guessability is not None and trial.guessability.guessable:
        said = f"{question.text!r}: {trial.guessability} give {_answer(question)} as well"
        yield Finding(
            Kind.GUESSABLE, place, said, "Ask for something that fewer queries give, or use --answer_mode sql"
        )
    elif trial.idle:
        said = f"{question.text!r}: the answer is the same without {trial.idle[0]}"
        yield Finding(Kind.LUCKY, place, said, "Choose a condition that leaves something out, or use --answer_mode sql")
    if trial.no_variants:
        said = f"{question.text!r}: {trial.no_variants}"
        advice = "In sql mode a wrong query may pass for right. Choose another query"
        yield Finding(Kind.NO_VARIANTS, place, said, advice)


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
                said = f"{other.text!r} is asked by {first.question_id} already"
                yield Finding(Kind.SAME_QUESTION, place, said, "Leave one of them out", DropQuestion())
            else:
                answers = f"its answer is {_answer(other)}, and that of {first.question_id} is {_answer(first)}"
                said = f"{other.text!r}: {answers}"
                yield Finding(
                    Kind.CONTRADICTION, place, said, "Correct one of them, or say in the question what differs"
                )


def check_number(dataset: Dataset, spec: str) -> Iterator[Finding]:
    """Tell whether there are enough questions, and enough of them for evaluation."""
    train, evaluation = (len(dataset.select(split)) for split in (Split.TRAIN, Split.EVAL))
    if train < FEW_TO_TRAIN or not evaluation:
        said = f"{train} for training and {evaluation} for evaluation"
        advice = f"A step plays {FEW_TO_TRAIN} different ones. Have more proposed: sqlenv data suggest {spec}"
        yield Finding(Kind.FEW_QUESTIONS, Place(), said, advice)


def check_unasked(questions: Sequence[RawQuestion], survey: DatabaseSurvey, spec: str) -> Iterator[Finding]:
    """Yield the tables that no query of a database's questions names; none where a question comes without its query."""
    if not all(question.sql for question in questions):
        return
    words = {
        token[0].strip('"`[]').casefold()
        for q in questions
        for token in tokens(q.sql)
        if token.lastgroup in ("word", "quoted")
    }
    for table in survey.tables:
        if table.rows and table.name.casefold() not in words:
            advice = f"Ask about it, too: sqlenv data suggest {spec}"
            yield Finding(
                Kind.UNASKED_TABLE,
                Place(survey.db_id, table.name),
                f"none of {len(questions)} questions is about it",
                advice,
            )


def _known_name(sql: str, detail: str, schema: Schema) -> tuple[str, str]:
    """Return the query with the name that was meant, and the words that say so; "" where none is near."""
    missing = MISSING_NAME.search(detail)
    if missing is None:
        return "", ""
    wrong = missing["name"].rpartition(".")[2]
    named = [table.name for table in schema.tables]
    if missing["kind"] == "column":
        named = [column.name for table in schema.tables for column in table.columns]
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
        looked_at = found.column(column) if found else None
        texts = [text for text, _ in looked_at.texts] if looked_at else []
        for value in values:
            if isinstance(value, str) and texts and value not in texts:
                folded = {text.strip().casefold(): text for text in reversed(texts)}
                close = get_close_matches(value.strip().casefold(), list(folded), n=1, cutoff=0.75)
                if close:
                    right = folded[close[0]]
                    written = _with(sql, ("literal", "quoted"), value, right)
                    if written != sql:
                        return written, f"{table}.{column} has {right!r}, not {value!r}: {written}"
    return "", ""


def _with(sql: str, kinds: Sequence[str], old: str, new: str) -> str:
    """Return the query with each such token that says `old` saying `new`, in its quotes."""
    parts = []
    for token in tokens(sql):
        text, inner = token[0], token[0].strip("'\"`[]")
        same = inner.replace("''", "'").casefold() == old.casefold() if token.lastgroup in kinds else False
        quotes = (text[0], text[-1]) if text[:1] in "'\"`[" else ("", "")
        parts.append(quotes[0] + new.replace("'", "''") + quotes[1] if same else text)
    return "".join(parts)


def _computed_columns(sql: str, schema: Schema, wanted: Mapping[tuple[str, str], str]) -> list[str]:
    """Return the wanted columns that a query computes with, compares with a number or sorts by."""
    tree = parse(sql, schema)
    if tree is None:
        return []
    tables = {each.name.casefold() for each in tree.find_all(exp.Table)}
    found = []
    for column in tree.find_all(exp.Column):
        names = [(table, column.name.casefold()) for table in tables if (table, column.name.casefold()) in wanted]
        if names and _is_computed(column):
            found.append(wanted[names[0]])
    return list(dict.fromkeys(found))


def _is_computed(column: exp.Column) -> bool:
    above = column.parent
    while isinstance(above, exp.Paren | exp.Cast | exp.Distinct):
        above = above.parent
    if isinstance(above, _COMPARED):
        return any(isinstance(each, exp.Literal) and not each.is_string for each in above.find_all(exp.Literal))
    return isinstance(above, _COMPUTED)


def _limited(sql: str) -> bool:
    return any(token.lastgroup == "word" and token[0].casefold() == "limit" for token in tokens(sql))


def _answer(question: Question) -> str:
    rows = question.gold.rows
    text = "; ".join(", ".join("NULL" if cell is None else str(cell) for cell in row) for row in rows[:3])
    return (text if len(text) <= 60 else text[:60] + "...") + (
        f" and {len(rows) - 3} more rows" if len(rows) > 3 else ""
    )
