"""Families over one table without grouping: count, count_distinct, filter, lookup, aggregate, date, null."""

from __future__ import annotations

from random import Random

from env_server.data.synthetic import wording as w
from env_server.data.synthetic.conditions import Clause, around_day, in_year, present
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import (
    DATE_SUPERLATIVES,
    READABLE,
    Candidate,
    draw_columns,
    draw_measure,
    draw_table,
    draw_where,
    measure,
    mentioned,
    select,
)
from env_server.data.synthetic.model import Column, Database, Table, literal

_BOTH = {False: "minimum and maximum", True: "earliest and latest"}


def count(db: Database, rng: Random) -> Candidate | None:
    """How many rows there are, mostly under a condition."""
    table = draw_table(db, rng)
    where, text, _ = draw_where(table, rng) if rng.random() < 0.9 else ("", "", None)
    question = w.fill("count", rng, **w.noun(table), where=text)
    return Candidate(question, f"SELECT COUNT(*) FROM {table.sql}{where}")


def count_distinct(db: Database, rng: Random) -> Candidate | None:
    """How many different values a column has."""
    table = draw_table(db, rng)
    columns = table.of(Kind.CATEGORY, Kind.LINK) or table.of(Kind.INTEGER)
    if not columns:
        return None
    column = rng.choice(columns)
    where, text, _ = draw_where(table, rng, [column]) if rng.random() < 0.4 else ("", "", None)
    question = w.fill("count_distinct", rng, **w.noun(table), column=column.phrase, where=text)
    return Candidate(question, f"SELECT COUNT(DISTINCT {column.sql}) FROM {table.sql}{where}")


def filtered(db: Database, rng: Random) -> Candidate | None:
    """Columns of the rows that meet a condition."""
    table = draw_table(db, rng)
    where, text, condition = draw_where(table, rng)
    columns = draw_columns(table, rng, mentioned(condition))
    if condition is None:
        return None
    question = w.fill("filter", rng, **w.noun(table), **w.asked(columns), where=text)
    return Candidate(question, f"SELECT {select(columns)} FROM {table.sql}{where}")


def lookup(db: Database, rng: Random) -> Candidate | None:
    """Columns of the row with a given name, or now and then with a given id."""
    table = draw_table(db, rng)
    if table.name is None and not table.identified:
        return None
    by_name = table.name is not None and (rng.random() < 0.9 or not table.identified)
    key = table.name if by_name and table.name is not None else table.key
    value = rng.choice(table.cells[key])
    columns = draw_columns(table, rng, [key], named=0.2)
    question = w.fill("lookup", rng, **w.asked(columns), entity=w.entity(table, key, value, rng))
    sql = f"SELECT {select(columns)} FROM {table.sql} WHERE {key.sql} = {literal(value)}"
    return Candidate(question, sql)


def aggregate(db: Database, rng: Random) -> Candidate | None:
    """An aggregate of a column, half of the time under a condition; now and then minimum and maximum at once."""
    table = draw_table(db, rng)
    drawn = draw_measure(table, rng)
    if drawn is None:
        return None
    where, text, _ = draw_where(table, rng, [drawn.column]) if rng.random() < 0.55 else ("", "", None)
    sql, words, be = drawn.sql(), drawn.words, drawn.column.be
    if drawn.function == "MIN" and rng.random() < 0.4:
        upper = measure("MAX", drawn.column, rng)
        sql, words, be = f"{sql}, {upper.sql()}", f"{_BOTH[drawn.column.is_year]} {drawn.column.phrase}", "are"
    question = w.fill("aggregate", rng, **w.noun(table), measure=words, where=text, rounding=drawn.rounding, be=be)
    return Candidate(question, f"SELECT {sql} FROM {table.sql}{where}")


def dated(db: Database, rng: Random) -> Candidate | None:
    """Rows in a year, or before or after a day; the earliest or latest date."""
    tables = [t for t in db.tables if t.of(Kind.DATE)]
    if not tables:
        return None
    table = rng.choice(tables)
    column = rng.choice(table.of(Kind.DATE))
    if rng.random() < 0.3:
        return _extreme_date(table, column, rng)
    drawn = in_year(table, column, rng) if rng.random() < 0.6 else around_day(table, column, rng)
    return None if drawn is None else _dated_rows(table, drawn, rng)


def _extreme_date(table: Table, column: Column, rng: Random) -> Candidate:
    function, direction = rng.choice((("MAX", "DESC"), ("MIN", "ASC")))
    superlative = rng.choice(DATE_SUPERLATIVES[direction])
    where, text, _ = draw_where(table, rng, [column]) if rng.random() < 0.5 else ("", "", None)
    question = w.fill("extreme_date", rng, **w.noun(table), column=column.phrase, superlative=superlative, where=text)
    return Candidate(question, f"SELECT {function}({column.sql}) FROM {table.sql}{where}")


def _dated_rows(table: Table, drawn: Clause, rng: Random) -> Candidate | None:
    text = " " + (drawn.whose if rng.random() < 0.5 else f"with {drawn.attribute}")
    where = f" WHERE {drawn.sql()}"
    if rng.random() < 0.5:
        question = w.fill("count", rng, **w.noun(table), where=text)
        return Candidate(question, f"SELECT COUNT(*) FROM {table.sql}{where}")
    columns = draw_columns(table, rng, [drawn.column])
    question = w.fill("filter", rng, **w.noun(table), **w.asked(columns), where=text)
    return Candidate(question, f"SELECT {select(columns)} FROM {table.sql}{where}")


def missing(db: Database, rng: Random) -> Candidate | None:
    """Rows that lack a value; the number of them only where it is not too small to guess."""
    tables = [t for t in db.tables if any(c.nullable for c in t.columns)]
    if not tables:
        return None
    table = rng.choice(tables)
    column = rng.choice([c for c in table.columns if c.nullable])
    where = f"WHERE {column.sql} IS NULL"
    absent = len(table.rows) - len(present(table, column))
    if absent > 2 and rng.random() < 0.5:
        question = w.fill("missing_count", rng, **w.noun(table), column=column.phrase)
        return Candidate(question, f"SELECT COUNT(*) FROM {table.sql} {where}")
    options = [c for c in (table.key, *table.of(*READABLE)) if not c.nullable]
    if table.name is None and not options:
        return None
    asked = [rng.choice(options)] if table.name is None else [table.name]
    question = w.fill("missing", rng, **w.noun(table), **w.asked(asked), column=column.phrase)
    return Candidate(question, f"SELECT {select(asked)} FROM {table.sql} {where}")
