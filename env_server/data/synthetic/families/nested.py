"""Families with a query inside, or beside, another one: nested, set."""

from __future__ import annotations

from random import Random

from env_server.data.synthetic import wording as w
from env_server.data.synthetic.conditions import any_condition
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import NUMBERS, Candidate, draw_columns, draw_table, select
from env_server.data.synthetic.families.joined import links
from env_server.data.synthetic.model import Column, Database, Table, literal

_SIDES = ((">", ("above", "greater than", "higher than")), ("<", ("below", "less than", "lower than")))


def nested(db: Database, rng: Random) -> Candidate | None:
    """Rows above or below the average, or one row's value; parents without any child."""
    if rng.random() < 0.4:
        return _without(db, rng)
    table = draw_table(db, rng)
    columns = [c for c in table.of(*NUMBERS) if c.averages]
    if not columns:
        return None
    column = rng.choice(columns)
    return _above_average(table, column, rng) if rng.random() < 0.6 else _compared(table, column, rng)


def _without(db: Database, rng: Random) -> Candidate | None:
    every = links(db)
    if not every:
        return None
    link = rng.choice(every)
    source = (
        f"FROM {link.parent.sql} WHERE {link.parent.key.sql} NOT IN (SELECT {link.column.sql} FROM {link.child.sql})"
    )
    phrases = {
        "parent": link.parent.singular,
        "plural_parents": link.parent.plural,
        "plural": link.child.plural,
    }
    if rng.random() < 0.3:
        return Candidate(w.fill("without_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(link.parent, rng, most=2, named=0.9)
    return Candidate(w.fill("without", rng, **phrases, **w.asked(columns)), f"SELECT {select(columns)} {source}")


def _above_average(table: Table, column: Column, rng: Random) -> Candidate | None:
    sign, words = rng.choice(_SIDES)
    source = f"FROM {table.sql} WHERE {column.sql} {sign} (SELECT AVG({column.sql}) FROM {table.sql})"
    phrases = {**w.noun(table), "column": column.phrase, "be_column": column.be, "side": rng.choice(words)}
    if rng.random() < 0.6:
        return Candidate(w.fill("above_average_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(table, rng, [column], most=1)
    return Candidate(w.fill("above_average", rng, **phrases, **w.asked(columns)), f"SELECT {select(columns)} {source}")


def _compared(table: Table, column: Column, rng: Random) -> Candidate | None:
    if table.name is None and not table.identified:
        return None
    key = table.name or table.key
    value = rng.choice(table.cells[key])
    sign, words = rng.choice(_SIDES)
    inner = f"SELECT {column.sql} FROM {table.sql} WHERE {key.sql} = {literal(value)}"
    source = f"FROM {table.sql} WHERE {column.sql} {sign} ({inner})"
    phrases = {**w.noun(table), "column": column.phrase, "be_column": column.be, "side": rng.choice(words)}
    phrases["entity"] = w.entity(table, key, value, rng)
    if rng.random() < 0.5:
        return Candidate(w.fill("compared_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(table, rng, [column], most=1)
    return Candidate(w.fill("compared", rng, **phrases, **w.asked(columns)), f"SELECT {select(columns)} {source}")


def combined(db: Database, rng: Random) -> Candidate | None:
    """Categories of one set of rows and, but not, or of another set of rows of the same table."""
    pairs = [(t, c) for t in db.tables for c in t.of(Kind.CATEGORY) if not c.nullable]
    if not pairs:
        return None
    table, category = rng.choice(pairs)
    first = any_condition(table, rng, [category], pairs=0.0)
    second = any_condition(table, rng, [category], pairs=0.0)
    if first is None or second is None:
        return None
    if first.rows <= second.rows or second.rows <= first.rows:  # one query alone would do
        return None
    operation = rng.choice(("INTERSECT", "INTERSECT", "EXCEPT", "EXCEPT", "UNION"))
    parts = [f"SELECT {category.sql} FROM {table.sql} WHERE {c.sql()}" for c in (first, second)]
    phrases = {**w.noun(table), "category": category.phrase, "first": first.text(rng), "second": second.text(rng)}
    return Candidate(w.fill(operation.lower(), rng, **phrases), f" {operation} ".join(parts))
