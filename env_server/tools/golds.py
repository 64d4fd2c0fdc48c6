"""What a gold query does: by the queries beside it that tell whether its answer is what the question means.

`try_gold` runs on the question's database: the same query over rows in other orders (a tie decides its answer), without
each clause (one is redundant), without the rows that lack the key they are sorted by (NULL comes first), and over
numbers in the place of texts that say numbers ('9' is more than '10'). On the test databases it runs the mutants.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from sqlglot import exp

from env_server.data.cells import CERTAIN_NULL_WORDS, is_missing
from env_server.data.curation import SQL_MODE_ROWS
from env_server.data.source_table import ColumnType
from env_server.dataset import Gold, Question, Row, SQLValue
from env_server.errors import SQLError
from env_server.judging.verdict import judge_rows
from env_server.sql.lexer import fold
from env_server.sql.pool import Databases
from env_server.sql.schema import Schema, Table, quote_identifier, quote_text
from env_server.test_suites.queries import Place, mutants, parse, place_of, read_clauses, reordered, replace_tables
from env_server.test_suites.store import Suites
from env_server.tools.survey import DatabaseSurvey

TRIVIAL_SHARE = 1 / 2
"""A question is trivially answerable when this share of the mutants give its answer."""
_EQUATED = (exp.EQ, exp.NEQ, exp.In, exp.Is)
_OF_TEXT = (exp.Like, exp.Glob, exp.DPipe, exp.Length, exp.Substring, exp.GroupConcat, exp.Concat)
"""What depends on how a number is written."""
_NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?\s*", re.IGNORECASE)
"""A text of which SQLite makes the number that it says."""
_CODE = re.compile(r"\s*[+-]?(?:0\d|\d{16})")
"""One that is no quantity: it has leading zeros, or more digits than a REAL holds."""


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
class OtherAnswer:
    """What a gold would answer if it were not for `cause`: a key that rows lack, or columns of numbers as text."""

    cause: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a usable question's gold does on its database and its test databases.

    `tied`: the same query, read in another order, gives another answer. `lacking`: the answer without the rows that
    lack the key of an ORDER BY with a LIMIT, where that differs; `in_numbers`: the answer where texts of numbers are
    numbers, where that differs. `redundant`: clauses without which the answer is the same. `untested`: clauses that no
    test database tests. `problem`: why there are no test databases. `mutants`: None where none were made.
    """

    tied: bool = False
    lacking: OtherAnswer | None = None
    in_numbers: OtherAnswer | None = None
    redundant: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    problem: str = ""
    mutants: MutantCounts | None = None


@dataclass(frozen=True, slots=True)
class TextNumbers:
    """A column whose texts SQLite reads as numbers of a type. `missing`: those that stand for none, such as n/a.

    `exact`: the others are written as SQLite writes numbers of the type.
    """

    type: ColumnType
    missing: tuple[str, ...]
    exact: bool


def text_numbers(survey: DatabaseSurvey) -> dict[Place, TextNumbers]:
    """Return the columns of a database whose texts are numbers as SQLite reads them."""
    found = {}
    for table in survey.tables:
        for column in table.columns:
            texts = [text for text, _ in column.texts]
            missing = tuple(text for text in texts if is_missing(text.strip()))
            said = [text for text in texts if text not in missing]
            numbers = {float(text) for text in said if _NUMBER.fullmatch(text) and not _CODE.match(text)}
            # Two texts that would be one number are no numbers: versions 1.1 and 1.10.
            if said and len(numbers) == len(said):
                whole = not column.number_cells and all(re.fullmatch(r"-?\d+", text) for text in said)
                place = (fold(table.name), fold(column.name))
                type_ = ColumnType.INTEGER if whole else ColumnType.REAL
                found[place] = TextNumbers(type_, missing, whole or all(text == repr(float(text)) for text in said))
    return found


def try_gold(
    question: Question, databases: Databases, suites: Suites | None, numbers: Mapping[Place, TextNumbers] | None = None
) -> Trial:
    """Try a gold query. `suites`: None where no test databases are to be made. Raises DataError."""
    schema = databases.schema(question.db_id)
    tree = parse(question.gold_sql, schema) if question.gold_sql else None
    if tree is None:
        suite = suites.of(question) if suites is not None and question.gold_sql else None
        return Trial() if suite is None else Trial(problem=suite.problem, mutants=MutantCounts(0, 0))

    def other(sql: str) -> tuple[Row, ...] | None:
        """Return what a query gives other than the gold's answer; None where it cannot be run, or gives the same."""
        try:
            rows = databases.query(question.db_id, sql, SQL_MODE_ROWS).rows
        except SQLError:
            return None
        return None if judge_rows(rows, question.gold).correct else rows

    def agrees(sql: str) -> bool:
        try:
            result = databases.query(question.db_id, sql, len(question.gold.rows) + 1)
        except SQLError:
            return False
        return not result.more and judge_rows(result.rows, question.gold).correct

    tied = any(other(sql) is not None for sql in reordered(tree, schema))
    without = ((key, rows) for key, sql in _without_lacking(tree) if (rows := other(sql)) is not None)
    lacking = next((OtherAnswer(key, rows) for key, rows in without), None)
    in_numbers = _in_numbers(question, tree, databases, numbers or {})
    clauses = read_clauses(tree)
    redundant = tuple(clause.text for clause in clauses if any(agrees(probe) for probe in clause.probes))
    if suites is None:
        return Trial(tied, lacking, in_numbers, redundant)
    suite = suites.of(question)
    asked = mutants(tree, schema)
    different = {sql for database in suite.databases for sql in database.rejected(asked)}
    counts = MutantCounts(len(different), sum(map(agrees, different)))
    return Trial(tied, lacking, in_numbers, redundant, suite.untested, suite.problem, counts)


def _without_lacking(tree: exp.Query) -> Iterator[tuple[str, str]]:
    """Yield each key of an ORDER BY with a LIMIT, or in a nested window, and the query without the rows that lack it.

    Of a key that only breaks ties, such rows come last instead.
    """
    for number, order in enumerate(tree.find_all(exp.Order)):
        for place in range(len(order.expressions)):
            copy = tree.copy()
            again = list(copy.find_all(exp.Order))[number]
            window = isinstance(again.parent, exp.Window)
            query = again.find_ancestor(exp.Select) if window else again.parent
            if not isinstance(query, exp.Query) or not (query.parent if window else query.args.get("limit")):
                continue
            if isinstance(query, exp.SetOperation):
                query = _as_select(query)
                copy = query.root()
            key = _key(query, again.expressions[place].this)
            lacks = _lacks(key)
            if place:
                again.set("expressions", [*again.expressions[:place], lacks, *again.expressions[place:]])
            elif query.args.get("group") or any(each.find(exp.AggFunc) for each in (key, *query.selects)):
                query.having(exp.not_(lacks), copy=False)
            else:
                query.where(exp.not_(lacks), copy=False)
            yield key.sql(dialect="sqlite"), copy.sql(dialect="sqlite")


def _as_select(operation: exp.SetOperation) -> exp.Select:
    """Put a SELECT around a set operation, in its place, with its ORDER BY and LIMIT."""
    names = [exp.column(each.alias_or_name, quoted=True) for each in operation.selects]
    inner, parts = operation.copy(), ("order", "limit", "offset")
    for part in parts:
        inner.set(part, None)
    outer = exp.select(*names).from_(inner.subquery("q"))
    for part in parts:
        outer.set(part, operation.args.get(part))
    if operation.parent is not None:
        operation.replace(outer)
    return outer


def _key(query: exp.Query, key: exp.Expression) -> exp.Expression:
    """Return what a key means: a column of the result by its number or name, or itself."""
    if isinstance(key, exp.Literal) and key.is_int and 0 < int(key.name) <= len(query.selects):
        key = query.selects[int(key.name) - 1]
    elif isinstance(key, exp.Column) and not key.table:
        key = next((each for each in query.selects if fold(each.alias) == fold(key.name)), key)
    return key.unalias().copy()


def _lacks(key: exp.Expression) -> exp.Paren:
    """Return a condition: the key is NULL, or a text that stands for nothing, or computed from one."""
    columns = [] if key.find(exp.AggFunc, exp.Query) else key.find_all(exp.Column)
    texts = dict.fromkeys(each.sql(dialect="sqlite") for each in (key, *columns))
    words = ", ".join(quote_text(word) for word in sorted(CERTAIN_NULL_WORDS))
    stand_for_nothing = " OR ".join(f"LOWER(TRIM({text})) IN ({words})" for text in texts)
    condition = f"({next(iter(texts))}) IS NULL OR {stand_for_nothing}"
    return exp.paren(exp.condition(condition, dialect="sqlite"), copy=False)


def _in_numbers(
    question: Question, tree: exp.Query, databases: Databases, numbers: Mapping[Place, TextNumbers]
) -> OtherAnswer | None:
    """Return the answer over numbers in the place of texts, where it differs: it compares or sorts the texts.

    CAST, + 0, SUM and AVG give the same over both.
    """
    schema = databases.schema(question.db_id)
    converted = _compared(tree, schema, numbers)
    if not converted:
        return None

    def rows(convert: Collection[Place]) -> tuple[Row, ...]:
        def select(table: Table) -> str:
            places = [(fold(table.name), fold(column.name)) for column in table.columns]
            cells = [
                _as_number(column.name, numbers[place]) if place in convert else quote_identifier(column.name)
                for column, place in zip(table.columns, places, strict=True)
            ]
            return f"SELECT {', '.join(cells)} FROM {quote_identifier(table.name)}"

        copy = tree.copy()
        replace_tables(copy, schema, select)
        return databases.query(question.db_id, copy.sql(dialect="sqlite"), SQL_MODE_ROWS).rows

    missing = {text for place in converted for text in numbers[place].missing}
    try:
        before, after = rows(()), rows(converted)
    except SQLError:
        return None
    texts, found = ([tuple(_value(cell, missing) for cell in row) for row in each] for each in (before, after))
    if judge_rows(found, Gold(tuple(texts), question.gold.ordered)).correct:
        return None
    places = {
        (fold(table.name), fold(c.name)): f"{table.name}.{c.name}" for table in schema.tables for c in table.columns
    }
    return OtherAnswer(" and ".join(sorted(places[place] for place in converted)), after)


def _compared(tree: exp.Query, schema: Schema, numbers: Mapping[Place, TextNumbers]) -> set[Place]:
    """Return the columns of numbers as text that a query may name, where numbers in their place mean the same."""
    tables = {fold(table.name): table for table in schema.tables}
    named = {fold(table.name) for table in tree.find_all(exp.Table)}
    columns = {fold(column.name) for column in tree.find_all(exp.Column)}
    literals = {each.name for node in tree.find_all(*_EQUATED) for each in node.find_all(exp.Literal) if each.is_string}
    # What a set operation compares must stay what the other side is.
    kept = {
        place_of(shown, tables)
        for operation in tree.find_all(exp.SetOperation)
        for each in (*operation.left.selects, *operation.right.selects)
        if isinstance(shown := each.unalias(), exp.Column)
    }
    as_written = tree.find(*_OF_TEXT) is not None
    return {
        place
        for place, each in numbers.items()
        if place[0] in named
        and place[1] in columns
        and place not in kept
        and literals.isdisjoint(each.missing)
        and (each.exact or not as_written)
    }


def _as_number(column: str, numbers: TextNumbers) -> str:
    name = value = quote_identifier(column)
    for text in numbers.missing:
        value = f"NULLIF({value}, {quote_text(text)})"
    return f"CAST({value} AS {numbers.type}) AS {name}"


def _value(cell: SQLValue, missing: Collection[str]) -> SQLValue:
    if not isinstance(cell, str):
        return cell
    return None if cell in missing else float(cell) if _NUMBER.fullmatch(cell) else cell
