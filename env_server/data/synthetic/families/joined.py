"""Families over two or three tables: join, join3."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from env_server.data.synthetic import wording as w
from env_server.data.synthetic.conditions import any_condition
from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.families.common import Candidate, draw_columns, draw_measure, select
from env_server.data.synthetic.model import Column, Database, Table, literal


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
    who = w.entity(link.child, name, value, rng)
    text = w.fill("join_lookup", rng, **w.asked(columns), parent=link.parent.singular, entity=who)
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
    text = w.fill("join_parents", rng, **nouns, columns=name.phrase, where=f" {condition.text(rng)}")
    return Candidate(text, f"SELECT DISTINCT T2.{name.sql} {_pair(link)} WHERE {condition.sql('T1.')}")


def _most(link: Link, rng: Random) -> Candidate | None:
    columns = draw_columns(link.parent, rng, most=2)
    phrases = {"parent": link.parent.singular, "plural": link.child.plural, "most": "most"}
    text = w.fill("join_most", rng, **phrases, **w.asked(columns))
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
    text = w.fill("star_parents", rng, **phrases, columns=name.phrase, verb=second.column.verb, target=words)
    return Candidate(text, f"SELECT DISTINCT T2.{name.sql} {path} WHERE {where}")


def _about_rows(table: Table, verb: str, target: str, source: str, rng: Random) -> Candidate | None:
    """Ask for columns, the number or an aggregate of the rows of T1 that `source` leaves."""
    phrases = {**w.noun(table), "verb": verb, "target": target}
    roll = rng.random()
    if roll < 0.4:
        return Candidate(w.fill("join_count", rng, **phrases), f"SELECT COUNT(*) {source}")
    value = draw_measure(table, rng) if roll < 0.65 else None
    if value is not None:
        text = w.fill("join_measure", rng, **phrases, measure=value.words, rounding=value.rounding)
        return Candidate(text, f"SELECT {value.sql('T1.')} {source}")
    columns = draw_columns(table, rng, most=2)
    text = w.fill("join_filter", rng, **phrases, **w.asked(columns))
    return Candidate(text, f"SELECT {select(columns, 'T1.')} {source}")


def _target(parent: Table, prefix: str, rng: Random) -> tuple[str, str] | None:
    """Draw which parents: "the owner named Anna" or "owners with city Oslo"; its SQL and its words."""
    if parent.name is not None and rng.random() < 0.5:
        value = rng.choice(parent.cells[parent.name])
        words = f"the {w.entity(parent, parent.name, value, rng)}"
        return f"{prefix}{parent.name.sql} = {literal(value)}", words
    condition = any_condition(parent, rng, pairs=0.0)
    if condition is None:
        return None
    return condition.sql(prefix), f"{parent.plural} {condition.text(rng)}"
