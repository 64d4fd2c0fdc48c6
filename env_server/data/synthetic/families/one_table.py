"""Families over one table: counts, filters, lookups, aggregates, dates, NULLs; rows in order and in groups."""

from __future__ import annotations

from random import Random

from env_server.data.synthetic.conditions import Clause, any_condition, around_day, in_year, present
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import (
    COUNT_SUPERLATIVES,
    DATE_SUPERLATIVES,
    NUMBERS,
    NUMERALS,
    READABLE,
    SUPERLATIVES,
    Candidate,
    asked,
    draw_columns,
    draw_measure,
    draw_table,
    draw_where,
    entity,
    fill,
    measure,
    mentioned,
    noun,
    rankable,
    select,
)
from env_server.data.synthetic.model import Column, Database, Table, literal

_BOTH = {False: "minimum and maximum", True: "earliest and latest"}


def count(db: Database, rng: Random) -> Candidate | None:
    """How many rows there are, mostly under a condition."""
    table = draw_table(db, rng)
    where, text, _ = draw_where(table, rng) if rng.random() < 0.9 else ("", "", None)
    question = fill("count", rng, **noun(table), where=text)
    return Candidate(question, f"SELECT COUNT(*) FROM {table.sql}{where}")


def count_distinct(db: Database, rng: Random) -> Candidate | None:
    """How many different values a column has."""
    table = draw_table(db, rng)
    columns = table.of(Kind.CATEGORY, Kind.LINK) or table.of(Kind.INTEGER)
    if not columns:
        return None
    column = rng.choice(columns)
    where, text, _ = draw_where(table, rng, [column]) if rng.random() < 0.4 else ("", "", None)
    question = fill("count_distinct", rng, **noun(table), column=column.phrase, where=text)
    return Candidate(question, f"SELECT COUNT(DISTINCT {column.sql}) FROM {table.sql}{where}")


def filtered(db: Database, rng: Random) -> Candidate | None:
    """Columns of the rows that meet a condition."""
    table = draw_table(db, rng)
    where, text, condition = draw_where(table, rng)
    columns = draw_columns(table, rng, mentioned(condition))
    if condition is None:
        return None
    question = fill("filter", rng, **noun(table), **asked(columns), where=text)
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
    question = fill("lookup", rng, **asked(columns), entity=entity(table, key, value, rng))
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
    question = fill("aggregate", rng, **noun(table), measure=words, where=text, rounding=drawn.rounding, be=be)
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
    question = fill("extreme_date", rng, **noun(table), column=column.phrase, superlative=superlative, where=text)
    return Candidate(question, f"SELECT {function}({column.sql}) FROM {table.sql}{where}")


def _dated_rows(table: Table, drawn: Clause, rng: Random) -> Candidate | None:
    text = " " + (drawn.whose if rng.random() < 0.5 else f"with {drawn.attribute}")
    where = f" WHERE {drawn.sql()}"
    if rng.random() < 0.5:
        question = fill("count", rng, **noun(table), where=text)
        return Candidate(question, f"SELECT COUNT(*) FROM {table.sql}{where}")
    columns = draw_columns(table, rng, [drawn.column])
    question = fill("filter", rng, **noun(table), **asked(columns), where=text)
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
        question = fill("missing_count", rng, **noun(table), column=column.phrase)
        return Candidate(question, f"SELECT COUNT(*) FROM {table.sql} {where}")
    options = [c for c in (table.key, *table.of(*READABLE)) if not c.nullable]
    if table.name is None and not options:
        return None
    columns = [rng.choice(options)] if table.name is None else [table.name]
    question = fill("missing", rng, **noun(table), **asked(columns), column=column.phrase)
    return Candidate(question, f"SELECT {select(columns)} FROM {table.sql} {where}")


def ordered(db: Database, rng: Random) -> Candidate | None:
    """The row, or the first few rows, by a number or a date; or a short list in order."""
    table = draw_table(db, rng)
    direction = rng.choice(("DESC", "DESC", "ASC"))
    columns = rankable(table, direction, (*NUMBERS, Kind.DATE))
    if not columns:
        return None
    by = rng.choice(columns)
    roll = rng.random()
    if roll < 0.65:
        return _top_one(table, by, direction, rng)
    if roll < 0.85 or by.nullable:
        return _top_several(table, by, direction, rng)
    return _sorted(table, by, direction, rng)


def _top_one(table: Table, by: Column, direction: str, rng: Random) -> Candidate | None:
    superlative = _superlative(by, direction, rng)
    condition = any_condition(table, rng, [by]) if rng.random() < 0.3 else None
    columns = draw_columns(table, rng, [by, *mentioned(condition)])
    phrases = {**noun(table), **asked(columns), "superlative": superlative, "column": by.phrase}
    if condition is None:
        text, where = fill("top_one", rng, **phrases), ""
    else:
        text = fill("top_one_where", rng, **phrases, where=f" {condition.text(rng)}")
        where = f" WHERE {condition.sql()}"
    return _ranking(table, columns, where, by, direction, 1, text)


def _top_several(table: Table, by: Column, direction: str, rng: Random) -> Candidate | None:
    superlative = _superlative(by, direction, rng)
    columns = draw_columns(table, rng, [by], most=2)
    k = rng.choice((2, 3, 3, 4, 5))
    phrases = {**noun(table), **asked(columns), "superlative": superlative, "column": by.phrase}
    text = fill("top_several", rng, **phrases, k=rng.choice((NUMERALS[k], k)))
    return _ranking(table, columns, "", by, direction, k, text)


def _sorted(table: Table, by: Column, direction: str, rng: Random) -> Candidate | None:
    where, words, condition = draw_where(table, rng, [by])
    columns = draw_columns(table, rng, [by, *mentioned(condition)], most=1)
    if condition is None:
        return None
    phrases = {**noun(table), **asked(columns), "column": by.phrase, "where": words}
    text = fill("sorted", rng, **phrases, superlative=_superlative(by, direction, rng))
    tail = f"FROM {table.sql}{where} ORDER BY {by.sql} {direction}"
    return Candidate(text, f"SELECT {select(columns)} {tail}", f"SELECT {by.sql} {tail}", len(condition.rows))


def _ranking(
    table: Table, columns: list[Column], where: str, by: Column, direction: str, k: int, text: str
) -> Candidate:
    tail = f"FROM {table.sql}{where} ORDER BY {by.sql} {direction}"
    return Candidate(text, f"SELECT {select(columns)} {tail} LIMIT {k}", f"SELECT {by.sql} {tail}", k)


def _superlative(by: Column, direction: str, rng: Random) -> str:
    if by.kind is Kind.DATE or by.is_year:
        return rng.choice(DATE_SUPERLATIVES[direction])
    words = COUNT_SUPERLATIVES if by.plural else SUPERLATIVES
    return rng.choice(words[direction])


def grouped(db: Database, rng: Random) -> Candidate | None:
    """A count or an aggregate for each category."""
    drawn = _category(db, rng)
    if drawn is None:
        return None
    table, category = drawn
    head, tail = f"SELECT {category.sql}", f"GROUP BY {category.sql}"
    if rng.random() < 0.55:
        where, words = _where_every_group(table, category, rng) if rng.random() < 0.4 else ("", "")
        text = fill("group_count", rng, **noun(table), category=category.phrase, where=words)
        return Candidate(text, f"{head}, COUNT(*) FROM {table.sql}{where} {tail}")
    value = draw_measure(table, rng)
    if value is None:
        return None
    phrases = {"category": category.phrase, "measure": value.words, "rounding": value.rounding}
    text = fill("group_measure", rng, **noun(table), **phrases)
    return Candidate(text, f"{head}, {value.sql()} FROM {table.sql} {tail}")


def _where_every_group(table: Table, category: Column, rng: Random) -> tuple[str, str]:
    """Draw a condition that leaves no group empty: whether a group of none is to be listed is open."""
    where, words, condition = draw_where(table, rng, [category])
    cells = table.cells[category]
    complete = condition is not None and {cells[i] for i in condition.rows} == set(cells)
    return (where, words) if complete else ("", "")


def having(db: Database, rng: Random) -> Candidate | None:
    """The categories whose number of rows, or whose average, is above or below a bound."""
    drawn = _category(db, rng)
    if drawn is None:
        return None
    table, category = drawn
    head = f"SELECT {category.sql} FROM {table.sql} GROUP BY {category.sql} HAVING"
    if rng.random() < 0.65:
        sign, words = rng.choice(((">", "more than"), (">=", "at least"), ("<", "fewer than")))
        n = rng.randint(2, 8)
        phrases = {"category": category.phrase, "amount": f"{words} {n}"}
        return Candidate(fill("having_count", rng, **noun(table), **phrases), f"{head} COUNT(*) {sign} {n}")
    value = draw_measure(table, rng, ("AVG", "MAX", "MIN"))
    if value is None:
        return None
    sign, word = rng.choice(((">", "above"), ("<", "below")))
    bound = rng.choice(present(table, value.column))
    phrases = {"category": category.phrase, "measure": value.words, "amount": f"{word} {bound}"}
    inner = f"{value.function}({value.column.sql})"
    return Candidate(fill("having_measure", rng, **noun(table), **phrases), f"{head} {inner} {sign} {bound}")


def best_group(db: Database, rng: Random) -> Candidate | None:
    """The category with the most or fewest rows, or with the highest or lowest average or total."""
    drawn = _category(db, rng)
    if drawn is None:
        return None
    table, category = drawn
    direction = rng.choice(("DESC", "DESC", "ASC"))
    if rng.random() < 0.6:
        most = "most" if direction == "DESC" else "fewest"
        text = fill("most_common", rng, **noun(table), category=category.phrase, most=most)
        inner = "COUNT(*)"
    else:
        value = draw_measure(table, rng, ("AVG", "SUM"))
        if value is None:
            return None
        superlative = "highest" if direction == "DESC" else "lowest"
        phrases = {"category": category.phrase, "superlative": superlative, "measure": value.words}
        text = fill("best_group", rng, **noun(table), **phrases)
        inner = f"{value.function}({value.column.sql})"
    tail = f"FROM {table.sql} GROUP BY {category.sql} ORDER BY {inner} {direction}"
    return Candidate(text, f"SELECT {category.sql} {tail} LIMIT 1", f"SELECT {inner} {tail}", 1)


def _category(db: Database, rng: Random) -> tuple[Table, Column] | None:
    """Draw a column to group by: no NULLs, so that there is no nameless group."""
    pairs = [(t, c) for t in db.tables for c in t.of(Kind.CATEGORY) if not c.nullable]
    return rng.choice(pairs) if pairs else None
