"""Draws the shape of a database: which tables and columns of a domain it has, and what they are called.

`draft` picks among a domain's alternatives, so that the variants of a domain differ in tables, columns and names.
`scramble` keeps the structure of a draft and replaces every name and every value by words of all domains: a policy
that has learnt such databases has seen every word in every role, and none in a fixed one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from env_server.data.synthetic import domains
from env_server.data.synthetic.domains import ColumnSpec, DomainSpec, Kind, Label, LinkSpec, Noun, Pool, TableSpec

_Named = TypeVar("_Named", Label, Noun)

_AWKWARD_TABLE = 0.12
_AWKWARD_COLUMN = 0.2
"""Of the columns that have an awkward alternative, about half of all."""
_MIN_TABLES = 3
_MIN_OWN_COLUMNS = 3
_NUMBERS = (Kind.INTEGER, Kind.REAL)


@dataclass(frozen=True, slots=True)
class ColumnDraft:
    """A chosen column and its name."""

    label: Label
    spec: ColumnSpec


@dataclass(frozen=True, slots=True)
class TableDraft:
    """A chosen table, its noun, the foreign keys that remain and its own columns."""

    key: str
    noun: Noun
    rows: tuple[int, int]
    links: tuple[LinkSpec, ...]
    columns: tuple[ColumnDraft, ...]


def draft(domain: DomainSpec, rng: Random) -> tuple[TableDraft, ...]:
    """Return the shape of one database of a domain, tables parents first."""
    tables = _chosen_tables(domain, rng)
    nouns: dict[str, Noun] = {}
    for spec in tables:
        used = {n.singular for n in nouns.values()}
        nouns[spec.key] = _pick(rng, [n for n in spec.nouns if n.singular not in used], _AWKWARD_TABLE)
    taken = _taken(nouns)
    drafts = []
    for spec in tables:
        links = tuple(link for link in spec.links if link.target in nouns)
        columns = _own_columns(spec, set(taken), rng)
        drafts.append(TableDraft(spec.key, nouns[spec.key], spec.rows, links, columns))
    return tuple(drafts)


def scramble(drafts: Sequence[TableDraft], rng: Random) -> tuple[TableDraft, ...]:
    """Return the same structure with names, verbs and value ranges drawn from all domains."""
    nouns = dict(zip((d.key for d in drafts), _scrambled_nouns(len(drafts), rng), strict=True))
    return tuple(_scramble_table(d, nouns, rng) for d in drafts)


def _taken(nouns: Mapping[str, Noun]) -> set[str]:
    """Return the phrases that no column may have: "the owner with the most pets" must mean rows of a table."""
    return {"id"} | {n.singular for n in nouns.values()} | {n.plural for n in nouns.values()}


def _claims(label: Label) -> set[str]:
    """Return the phrase and the identifier, which no other column of the table may have; SQL ignores case."""
    return {label.phrase, label.identifier.lower()}


def _chosen_tables(domain: DomainSpec, rng: Random) -> list[TableSpec]:
    tables = list(domain.tables)
    for spec in domain.tables:
        if spec.optional and len(tables) > _MIN_TABLES and rng.random() < 0.4:
            tables.remove(spec)
    return tables


def _pick(rng: Random, options: Sequence[_Named], awkward: float) -> _Named:
    odd = [o for o in options if o.awkward]
    plain = [o for o in options if not o.awkward]
    return rng.choice(odd if odd and (not plain or rng.random() < awkward) else plain)


def _own_columns(spec: TableSpec, taken: set[str], rng: Random) -> tuple[ColumnDraft, ...]:
    kept = [c for c in spec.columns if rng.random() < c.keep]
    missing = [c for c in spec.columns if c not in kept]
    rng.shuffle(missing)
    while missing and not (len(kept) >= _MIN_OWN_COLUMNS and any(c.kind in _NUMBERS for c in kept)):
        kept.append(missing.pop())
    kept = [c for c in spec.columns if c in kept]
    if rng.random() < 0.3:
        kept = [*kept[:1], *rng.sample(kept[1:], len(kept) - 1)]
    drafts = []
    for column in kept:
        options = [x for x in column.labels if taken.isdisjoint(_claims(x))]
        if options:
            label = _pick(rng, options, _AWKWARD_COLUMN)
            taken.update(_claims(label))
            drafts.append(ColumnDraft(label, column))
    return tuple(drafts)


def _scrambled_nouns(count: int, rng: Random) -> list[Noun]:
    nouns: list[Noun] = []
    singulars: set[str] = set()
    while len(nouns) < count:
        noun = _pick(rng, domains.all_nouns(), _AWKWARD_TABLE)
        if noun.singular not in singulars:
            singulars.add(noun.singular)
            nouns.append(noun)
    return nouns


def _scramble_table(table: TableDraft, nouns: Mapping[str, Noun], rng: Random) -> TableDraft:
    taken = _taken(nouns)
    columns = []
    for column in table.columns:
        label = _scrambled_label(column.spec.kind, taken, rng)
        taken.update(_claims(label))
        columns.append(ColumnDraft(label, _scrambled_spec(column.spec, rng)))
    links = tuple(replace(link, verb=rng.choice(domains.all_verbs())) for link in table.links)
    return replace(table, noun=nouns[table.key], links=links, columns=tuple(columns))


def _scrambled_label(kind: Kind, taken: set[str], rng: Random) -> Label:
    while True:
        roll = rng.random()
        if roll < 0.4:
            label = _pick(rng, domains.all_labels(kind), _AWKWARD_COLUMN)
        elif roll < 0.75:
            label = _pick(rng, domains.all_labels(), _AWKWARD_COLUMN)
        elif roll < 0.9:
            word = rng.choice(domains.all_values())
            label = Label(word, word)
        else:
            first, second = rng.choice(domains.all_nouns()).singular, _pick(rng, domains.all_labels(), 0.0)
            label = Label(f"{first}_{second.identifier}", f"{first} {second.phrase}")
        if taken.isdisjoint(_claims(label)):
            return label


def _scrambled_spec(spec: ColumnSpec, rng: Random) -> ColumnSpec:
    values = domains.all_values()
    if spec.kind is Kind.NAME:
        return replace(spec, values=Pool(tuple(rng.sample(values, 60)), tuple(rng.sample(values, 30)), both=0.25))
    if spec.kind is Kind.CATEGORY:
        return replace(spec, values=Pool(tuple(rng.sample(values, rng.randint(3, 8)))))
    return rng.choice(domains.all_columns(spec.kind))
