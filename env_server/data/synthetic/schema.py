"""Draws a database of a domain: its shape, which tables and columns it has and what they are called; then its rows.

`draft` picks among a domain's alternatives, so that the variants of a domain differ in tables, columns and names.
`scramble` keeps the structure of a draft and replaces every name and every value by words of all domains: a policy
that has learned such databases has seen every word in every role, and none in a fixed one. `populate` names the keys,
draws the rows and leaves some cells empty. Every parent table keeps at least one row that no child refers to, so that
"without any" questions have an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from random import Random
from typing import TypeVar

from env_server.data.synthetic import domains
from env_server.data.synthetic.domains import ColumnSpec, DomainSpec, Kind, Label, LinkSpec, Noun, Pool, TableSpec
from env_server.data.synthetic.model import Cell, Column, Database, Table

_Named = TypeVar("_Named", Label, Noun)

_AWKWARD_TABLE = 0.12
_AWKWARD_COLUMN = 0.2
"""Of the columns that have an awkward alternative, about half of all."""
_MIN_TABLES = 3
_MIN_OWN_COLUMNS = 3
_NUMBERS = (Kind.INTEGER, Kind.REAL)
_NULLABLE = (Kind.CATEGORY, Kind.INTEGER, Kind.REAL, Kind.DATE)
_SHARE_OF_TABLES_WITH_NULLS = 0.75


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


@dataclass(frozen=True, slots=True)
class _KeyStyle:
    """How a database names its keys."""

    long_ids: bool
    bare_links: bool

    def own(self, singular: str) -> str:
        return f"{_snake(singular)}_id" if self.long_ids else "id"

    def link(self, singular: str) -> str:
        return _snake(singular) if self.bare_links else f"{_snake(singular)}_id"


def populate(db_id: str, drafts: Sequence[TableDraft], rng: Random) -> Database:
    """Return the database of a draft, with rows."""
    style = _KeyStyle(long_ids=rng.random() < 0.5, bare_links=rng.random() < 0.15)
    tables: dict[str, Table] = {}
    for draft in drafts:
        tables[draft.key] = _table(draft, tables, style, rng)
    return Database(db_id, tuple(tables.values()))


def _table(draft: TableDraft, tables: dict[str, Table], style: _KeyStyle, rng: Random) -> Table:
    count = _row_count(draft, rng)
    key = style.own(draft.noun.singular)
    columns = [Column(key, "id", Kind.ID)]
    cells: list[list[Cell]] = [list(range(1, count + 1))]
    sparse = _sparse_columns(draft.columns, rng)
    for column in draft.columns:
        values = _values(column.spec, count, rng)
        if column in sparse:
            _blank(values, rng)
        columns.append(_column(column, nullable=None in values))
        cells.append(values)
    for link in draft.links:
        target = tables[link.target]
        identifier = style.link(target.singular)
        columns.append(Column(identifier, target.singular, Kind.LINK, target=target.identifier, verb=link.verb))
        cells.append(_references(len(target.rows), count, rng))
    rows = tuple(zip(*cells, strict=True))
    return Table(draft.noun.identifier, draft.noun.singular, draft.noun.plural, tuple(columns), rows)


def _row_count(draft: TableDraft, rng: Random) -> int:
    count = rng.randint(*draft.rows)
    for column in draft.columns:
        if column.spec.kind is Kind.NAME:
            count = min(count, len(column.spec.values.first))
    return count


def _column(draft: ColumnDraft, nullable: bool) -> Column:
    spec, label = draft.spec, draft.label
    return Column(label.identifier, label.phrase, spec.kind, spec.sums, spec.averages, nullable)


def _sparse_columns(columns: Sequence[ColumnDraft], rng: Random) -> list[ColumnDraft]:
    options = [c for c in columns if c.spec.kind in _NULLABLE]
    if not options or rng.random() >= _SHARE_OF_TABLES_WITH_NULLS:
        return []
    return rng.sample(options, min(len(options), rng.randint(1, 2)))


def _blank(values: list[Cell], rng: Random) -> None:
    share = rng.uniform(0.05, 0.10)
    count = max(1, round(share * len(values)))
    for index in rng.sample(range(len(values)), count):
        values[index] = None


def _values(spec: ColumnSpec, count: int, rng: Random) -> list[Cell]:
    if spec.kind is Kind.NAME:
        return _names(spec.values, count, rng)
    if spec.kind is Kind.CATEGORY:
        return _categories(spec.values, count, rng)
    if spec.kind is Kind.DATE:
        return [_date(spec.low, spec.high, rng) for _ in range(count)]
    if spec.kind is Kind.REAL:
        return [rng.randint(spec.low * 10 + 1, spec.high * 10) / 10 for _ in range(count)]
    if spec.kind is Kind.FLAG:
        return [int(rng.random() < 0.6) for _ in range(count)]
    return [rng.randrange(spec.low, spec.high + 1, spec.step) for _ in range(count)]


def _names(pool: Pool, count: int, rng: Random) -> list[Cell]:
    if rng.random() >= pool.both:
        return list(rng.sample(pool.first, count))
    pairs = [f"{a} {b}" for a in pool.first for b in pool.second if a != b]
    return list(rng.sample(pairs, count))


def _categories(pool: Pool, count: int, rng: Random) -> list[Cell]:
    words = rng.sample(pool.first, min(len(pool.first), rng.randint(4, 8)))
    weights = [rng.uniform(1, 4) for _ in words]
    return list(rng.choices(words, weights, k=count))


def _date(first_year: int, last_year: int, rng: Random) -> str:
    start = date(first_year, 1, 1)
    span = (date(last_year, 12, 31) - start).days
    return (start + timedelta(days=rng.randint(0, span))).isoformat()


def _references(targets: int, count: int, rng: Random) -> list[Cell]:
    used = rng.sample(range(1, targets + 1), max(2, targets - max(1, round(targets * rng.uniform(0.05, 0.25)))))
    return list(rng.choices(used, k=count))


def _snake(words: str) -> str:
    return words.replace(" ", "_")
