"""What is wrong with the questions: golds that fail, are empty, depend on a tie, are trivially answerable. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from sqlglot import exp

from env_server.data.raw import RawQuestion
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Question, Row, Split
from env_server.judging.verdict import judge_rows
from env_server.sql.lexer import tokens
from env_server.sql.schema import Schema
from env_server.sql.statements import MISSING_NAME
from env_server.test_suites.queries import QueryConstants, parse, read_constants
from env_server.tools.findings import Finding, Kind, Place, QuestionFix
from env_server.tools.golds import TRIVIAL_SHARE, Trial
from env_server.tools.survey import UNKNOWN_COLLATION, DatabaseSurvey

FEW_TO_TRAIN = 8
"""A step of the shipped configs plays as many different questions."""
_COMPUTED = (
    *(exp.Sum, exp.Avg, exp.Max, exp.Min, exp.Ordered, exp.Add, exp.Sub, exp.Mul, exp.Div),
    *(exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between),
)
_EXCLUDED = {
    ExclusionReason.GOLD_FAILS: (Kind.GOLD_FAILS, "Correct the query"),
    ExclusionReason.GOLD_TOO_SLOW: (Kind.GOLD_FAILS, "Correct the query"),
    ExclusionReason.GOLD_EMPTY: (Kind.GOLD_EMPTY, "Correct the query, or ask for something that is there"),
    ExclusionReason.GOLD_NULL: (Kind.GOLD_EMPTY, "Correct the query, or ask for something that is there"),
    ExclusionReason.GOLD_TOO_LARGE: (Kind.GOLD_TOO_LARGE, "Ask for less, such as a count or the first few"),
    ExclusionReason.NO_DATABASE: (Kind.NO_DATABASE, "Correct the files, or name another database"),
    ExclusionReason.NO_SQL: (Kind.NO_SQL, "Write its SQL, or use --answer_mode value"),
}


def check_exclusion(exclusion: Exclusion, question: RawQuestion, survey: DatabaseSurvey | None) -> Finding:
    """Say why a question is left out, and how its query may be meant."""
    kind, hint = _EXCLUDED[exclusion.reason]
    if UNKNOWN_COLLATION.search(exclusion.detail):
        hint = "The query may be right: copy the database without that order of texts"
    sql, correction = "", ""
    if survey is not None and kind is Kind.GOLD_FAILS:
        sql, correction = _known_name(question.sql, exclusion.detail, survey.schema)
    if survey is not None and kind is Kind.GOLD_EMPTY:
        sql, correction = _known_text(question.sql, survey)
    place = Place(exclusion.db_id, question_id=exclusion.question_id)
    message = f"{exclusion.text!r}: {exclusion.detail}"
    return Finding(kind, message, correction if sql else hint, QuestionFix(sql) if sql else None, place=place)


def check_question(
    question: Question, trial: Trial, written: Mapping[tuple[str, str], str], schema: Schema
) -> Iterator[Finding]:
    """Yield what is wrong with a usable question. `written`: columns of numbers that SQLite does not read as such."""

    def finding(kind: Kind, message: str, hint: str) -> Finding:
        place = Place(question.db_id, question_id=question.question_id)
        return Finding(kind, f"{question.text!r}: {message}", hint, place=place)

    for column in _computed_columns(question.gold_sql, schema, written) if written else ():
        message = f"it computes with {column}, whose numbers are text; its answer is {_answer(question)}"
        yield finding(Kind.GOLD_TEXT_NUMBERS, message, "Make the column numbers, then look at the answer again")
    if trial.in_numbers:
        message = f"it reads {trial.in_numbers.cause} as text: its answer is {_answer(question)}, "
        message += f"and {_shown(trial.in_numbers.rows)} with numbers"
        yield finding(Kind.GOLD_TEXT_NUMBERS, message, "CAST it to a number in the query, or make the column numbers")
    if trial.lacking:
        message = f"it keeps rows without {trial.lacking.cause}, which it sorts by: its answer is {_answer(question)}, "
        message += f"and {_shown(trial.lacking.rows)} without them"
        hint = f"Add: {trial.lacking.cause} IS NOT NULL"
        yield finding(Kind.GOLD_LACKS_KEY, message, hint)
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
    if isinstance(above, exp.EQ | exp.NEQ):
        return any(not each.is_string for each in above.find_all(exp.Literal))
    return isinstance(above, _COMPUTED)


def _is_limited(sql: str) -> bool:
    return any(token.lastgroup == "word" and token[0].casefold() == "limit" for token in tokens(sql))


def _answer(question: Question) -> str:
    return _shown(question.gold.rows)


def _shown(rows: Sequence[Row]) -> str:
    if not rows:
        return "nothing"
    text = "; ".join(", ".join("NULL" if cell is None else str(cell) for cell in row) for row in rows[:3])
    more = f" and {len(rows) - 3} more rows" if len(rows) > 3 else ""
    return (text if len(text) <= 60 else text[:60] + "...") + more
