"""Families over several tables, and with a query inside or beside another one: join, join3, nested, set."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from env_server.data.synthetic.conditions import any_condition
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import (
    NUMBERS,
    Candidate,
    asked,
    draw_columns,
    draw_measure,
    draw_table,
    entity,
    fill,
    noun,
    select,
)
from env_server.data.synthetic.model import Column, Database, Table, literal

_SIDES = ((">", ("above", "greater than", "higher than")), ("<", ("below", "less than", "lower than")))


@dataclass(frozen=True, slots=True)
class Link:
    """A foreign key from `child` to `parent`."""

    child: Table
    column: Column
    parent: Table

    def on(self, child: str, parent: str) -> str:
        """The join condition, given the two aliases."""
        return f"{child}.{self.column.sql} = {parent}.{self.parent.key.sql}"


def links(db: Database) -> list[Link]:
    """Return every foreign key of a database."""
    return [Link(t, c, db.table(c.target)) for t in db.tables for c in t.of(Kind.LINK)]


def joined(db: Database, rng: Random) -> Candidate | None:
    """Two tables: a lookup, a list, a number, an aggregate, parents with some child, the parent with most."""
    every = links(db)
    if not every:
        return None
    draw = rng.choice((_lookup, _lookup, _children, _children, _children, _parents, _most))
    return draw(rng.choice(every), rng)


def joined_three(db: Database, rng: Random) -> Candidate | None:
    """Three tables: a chain of foreign keys, or two parents of one child."""
    every = links(db)
    chains = [(a, b) for a in every for b in every if a.parent is b.child]
    stars = [(a, b) for a in every for b in every if a.child is b.child and a is not b]
    if chains and (not stars or rng.random() < 0.5):
        return _chain(*rng.choice(chains), rng)
    return _star(*rng.choice(stars), rng) if stars else None


def _pair(link: Link) -> str:
    return f"FROM {link.child.sql} AS T1 JOIN {link.parent.sql} AS T2 ON {link.on('T1', 'T2')}"


def _lookup(link: Link, rng: Random) -> Candidate | None:
    if link.child.name is None and not link.child.identified:
        return None
    name = link.child.name or link.child.key
    value = rng.choice(link.child.cells[name])
    columns = draw_columns(link.parent, rng, most=2)
    who = entity(link.child, name, value, rng)
    text = fill("join_lookup", rng, **asked(columns), parent=link.parent.singular, entity=who)
    where = f"T1.{name.sql} = {literal(value)}"
    return Candidate(text, f"SELECT {select(columns, 'T2.')} {_pair(link)} WHERE {where}")


def _children(link: Link, rng: Random) -> Candidate | None:
    target = _target(link.parent, "T2.", rng)
    if target is None:
        return None
    where, words = target
    return _about_rows(link.child, link.column.verb, words, f"{_pair(link)} WHERE {where}", rng)


def _parents(link: Link, rng: Random) -> Candidate | None:
    condition = any_condition(link.child, rng, pairs=0.0)
    name = link.parent.name
    if condition is None or name is None:
        return None
    nouns = {"parent": link.parent.singular, "plural_parents": link.parent.plural, "singular": link.child.singular}
    text = fill("join_parents", rng, **nouns, columns=name.phrase, where=f" {condition.text(rng)}")
    return Candidate(text, f"SELECT DISTINCT T2.{name.sql} {_pair(link)} WHERE {condition.sql('T1.')}")


def _most(link: Link, rng: Random) -> Candidate | None:
    columns = draw_columns(link.parent, rng, most=2)
    phrases = {"parent": link.parent.singular, "plural": link.child.plural, "most": "most"}
    text = fill("join_most", rng, **phrases, **asked(columns))
    tail = f"{_pair(link)} GROUP BY T2.{link.parent.key.sql} ORDER BY COUNT(*) DESC"
    return Candidate(text, f"SELECT {select(columns, 'T2.')} {tail} LIMIT 1", f"SELECT COUNT(*) {tail}", 1)


def _chain(first: Link, second: Link, rng: Random) -> Candidate | None:
    target = _target(second.parent, "T3.", rng)
    if target is None:
        return None
    where, words = target
    path = f"{_pair(first)} JOIN {second.parent.sql} AS T3 ON {second.on('T2', 'T3')}"
    middle = f"{first.parent.plural} that {second.column.verb} {words}"
    return _about_rows(first.child, first.column.verb, middle, f"{path} WHERE {where}", rng)


def _star(first: Link, second: Link, rng: Random) -> Candidate | None:
    target = _target(second.parent, "T3.", rng)
    if target is None:
        return None
    where, words = target
    path = f"{_pair(first)} JOIN {second.parent.sql} AS T3 ON {second.on('T1', 'T3')}"
    name = first.parent.name
    if name is None or rng.random() < 0.4:
        other = _target(first.parent, "T2.", rng)
        if other is None:
            return None
        both = f"{other[1]} and {second.column.verb} {words}"
        where = f"{other[0]} AND {where}"
        return _about_rows(first.child, first.column.verb, both, f"{path} WHERE {where}", rng)
    phrases = {"plural_parents": first.parent.plural, "plural": first.child.plural}
    text = fill("star_parents", rng, **phrases, columns=name.phrase, verb=second.column.verb, target=words)
    return Candidate(text, f"SELECT DISTINCT T2.{name.sql} {path} WHERE {where}")


def _about_rows(table: Table, verb: str, target: str, source: str, rng: Random) -> Candidate | None:
    """Ask for columns, the number or an aggregate of the rows of T1 that `source` leaves."""
    phrases = {**noun(table), "verb": verb, "target": target}
    roll = rng.random()
    if roll < 0.4:
        return Candidate(fill("join_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    value = draw_measure(table, rng) if roll < 0.65 else None
    if value is not None:
        text = fill("join_measure", rng, **phrases, measure=value.words, rounding=value.rounding)
        return Candidate(text, f"SELECT {value.sql('T1.')} {source}")
    columns = draw_columns(table, rng, most=2)
    text = fill("join_filter", rng, **phrases, **asked(columns))
    return Candidate(text, f"SELECT {select(columns, 'T1.')} {source}")


def _target(parent: Table, prefix: str, rng: Random) -> tuple[str, str] | None:
    """Draw which parents: "the owner named Anna" or "owners with city Oslo"; its SQL and its words."""
    if parent.name is not None and rng.random() < 0.5:
        value = rng.choice(parent.cells[parent.name])
        words = f"the {entity(parent, parent.name, value, rng)}"
        return f"{prefix}{parent.name.sql} = {literal(value)}", words
    condition = any_condition(parent, rng, pairs=0.0)
    if condition is None:
        return None
    return condition.sql(prefix), f"{parent.plural} {condition.text(rng)}"


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
        return Candidate(fill("without_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(link.parent, rng, most=2, named=0.9)
    return Candidate(fill("without", rng, **phrases, **asked(columns)), f"SELECT {select(columns)} {source}")


def _above_average(table: Table, column: Column, rng: Random) -> Candidate | None:
    sign, words = rng.choice(_SIDES)
    source = f"FROM {table.sql} WHERE {column.sql} {sign} (SELECT AVG({column.sql}) FROM {table.sql})"
    phrases = {**noun(table), "column": column.phrase, "be_column": column.be, "side": rng.choice(words)}
    if rng.random() < 0.6:
        return Candidate(fill("above_average_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(table, rng, [column], most=1)
    return Candidate(fill("above_average", rng, **phrases, **asked(columns)), f"SELECT {select(columns)} {source}")


def _compared(table: Table, column: Column, rng: Random) -> Candidate | None:
    if table.name is None and not table.identified:
        return None
    key = table.name or table.key
    value = rng.choice(table.cells[key])
    sign, words = rng.choice(_SIDES)
    inner = f"SELECT {column.sql} FROM {table.sql} WHERE {key.sql} = {literal(value)}"
    source = f"FROM {table.sql} WHERE {column.sql} {sign} ({inner})"
    phrases = {**noun(table), "column": column.phrase, "be_column": column.be, "side": rng.choice(words)}
    phrases["entity"] = entity(table, key, value, rng)
    if rng.random() < 0.5:
        return Candidate(fill("compared_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    columns = draw_columns(table, rng, [column], most=1)
    return Candidate(fill("compared", rng, **phrases, **asked(columns)), f"SELECT {select(columns)} {source}")


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
    phrases = {**noun(table), "category": category.phrase, "first": first.text(rng), "second": second.text(rng)}
    return Candidate(fill(operation.lower(), rng, **phrases), f" {operation} ".join(parts))
