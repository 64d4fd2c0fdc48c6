"""Turns a draft into a database: keys are named, rows are drawn, some cells are left empty.

Every parent table keeps at least one row that no child refers to, so that "without any" questions have an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from env_server.data.synthetic.domains import ColumnSpec, Kind, Pool
from env_server.data.synthetic.model import Cell, Column, Database, Table
from env_server.data.synthetic.schema import ColumnDraft, TableDraft

_NULLABLE = (Kind.CATEGORY, Kind.INTEGER, Kind.REAL, Kind.DATE)
_SHARE_OF_TABLES_WITH_NULLS = 0.75


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
