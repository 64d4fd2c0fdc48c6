"""Families over one table that order or group its rows: order, group, having, argmax_group."""

from __future__ import annotations

from random import Random

from env_server.data.synthetic import wording as w
from env_server.data.synthetic.conditions import any_condition, present
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import (
    COUNT_SUPERLATIVES,
    DATE_SUPERLATIVES,
    NUMBERS,
    SUPERLATIVES,
    Candidate,
    draw_columns,
    draw_measure,
    draw_table,
    draw_where,
    mentioned,
    rankable,
    select,
)
from env_server.data.synthetic.model import Column, Database, Table


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
    phrases = {**w.noun(table), **w.asked(columns), "superlative": superlative, "column": by.phrase}
    if condition is None:
        text, where = w.fill("top_one", rng, **phrases), ""
    else:
        text = w.fill("top_one_where", rng, **phrases, where=f" {condition.text(rng)}")
        where = f" WHERE {condition.sql()}"
    return _ranking(table, columns, where, by, direction, 1, text)


def _top_several(table: Table, by: Column, direction: str, rng: Random) -> Candidate | None:
    superlative = _superlative(by, direction, rng)
    columns = draw_columns(table, rng, [by], most=2)
    k = rng.choice((2, 3, 3, 4, 5))
    phrases = {**w.noun(table), **w.asked(columns), "superlative": superlative, "column": by.phrase}
    text = w.fill("top_several", rng, **phrases, k=rng.choice((w.NUMERALS[k], k)))
    return _ranking(table, columns, "", by, direction, k, text)


def _sorted(table: Table, by: Column, direction: str, rng: Random) -> Candidate | None:
    where, words, condition = draw_where(table, rng, [by])
    columns = draw_columns(table, rng, [by, *mentioned(condition)], most=1)
    if condition is None:
        return None
    phrases = {**w.noun(table), **w.asked(columns), "column": by.phrase, "where": words}
    text = w.fill("sorted", rng, **phrases, superlative=_superlative(by, direction, rng))
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
        text = w.fill("group_count", rng, **w.noun(table), category=category.phrase, where=words)
        return Candidate(text, f"{head}, COUNT(*) FROM {table.sql}{where} {tail}")
    value = draw_measure(table, rng)
    if value is None:
        return None
    phrases = {"category": category.phrase, "measure": value.words, "rounding": value.rounding}
    text = w.fill("group_measure", rng, **w.noun(table), **phrases)
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
        return Candidate(w.fill("having_count", rng, **w.noun(table), **phrases), f"{head} COUNT(*) {sign} {n}")
    value = draw_measure(table, rng, ("AVG", "MAX", "MIN"))
    if value is None:
        return None
    sign, word = rng.choice(((">", "above"), ("<", "below")))
    bound = rng.choice(present(table, value.column))
    phrases = {"category": category.phrase, "measure": value.words, "amount": f"{word} {bound}"}
    inner = f"{value.function}({value.column.sql})"
    return Candidate(w.fill("having_measure", rng, **w.noun(table), **phrases), f"{head} {inner} {sign} {bound}")


def best_group(db: Database, rng: Random) -> Candidate | None:
    """The category with the most or fewest rows, or with the highest or lowest average or total."""
    drawn = _category(db, rng)
    if drawn is None:
        return None
    table, category = drawn
    direction = rng.choice(("DESC", "DESC", "ASC"))
    if rng.random() < 0.6:
        most = "most" if direction == "DESC" else "fewest"
        text = w.fill("most_common", rng, **w.noun(table), category=category.phrase, most=most)
        inner = "COUNT(*)"
    else:
        value = draw_measure(table, rng, ("AVG", "SUM"))
        if value is None:
            return None
        superlative = "highest" if direction == "DESC" else "lowest"
        phrases = {"category": category.phrase, "superlative": superlative, "measure": value.words}
        text = w.fill("best_group", rng, **w.noun(table), **phrases)
        inner = f"{value.function}({value.column.sql})"
    tail = f"FROM {table.sql} GROUP BY {category.sql} ORDER BY {inner} {direction}"
    return Candidate(text, f"SELECT {category.sql} {tail} LIMIT 1", f"SELECT {inner} {tail}", 1)


def _category(db: Database, rng: Random) -> tuple[Table, Column] | None:
    """Draw a column to group by: no NULLs, so that there is no nameless group."""
    pairs = [(t, c) for t in db.tables for c in t.of(Kind.CATEGORY) if not c.nullable]
    return rng.choice(pairs) if pairs else None
