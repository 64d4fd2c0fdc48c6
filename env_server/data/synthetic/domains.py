"""What a database is drawn from: the domains of `domains.toml`, which says what they are made of.

All databases of a domain are in one split. The pools of words are deliberately small: a whole-word tokenizer over
everything that the generator can write must stay below about 1,300 words. No pool holds a word twice.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from env_server.dataset import Split


class Kind(StrEnum):
    """What a column holds, which decides what can be asked about it."""

    ID = "id"
    LINK = "link"
    NAME = "name"
    CATEGORY = "category"
    INTEGER = "integer"
    REAL = "real"
    DATE = "date"
    FLAG = "flag"


KEEP = {Kind.NAME: 1.0, Kind.CATEGORY: 0.85, Kind.DATE: 0.85, Kind.FLAG: 0.35, Kind.INTEGER: 0.8, Kind.REAL: 0.8}
"""The probability that a database has a column, where the column does not state it."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A source of text values: a word of `first`, in a share `both` of the columns followed by one of `second`."""

    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    both: float = 0.0


@dataclass(frozen=True, slots=True)
class Label:
    """A column's identifier in SQL and its phrase in a question."""

    identifier: str
    phrase: str
    awkward: bool = False


@dataclass(frozen=True, slots=True)
class Noun:
    """A table's identifier in SQL and the words for one and for several of its rows."""

    identifier: str
    singular: str
    plural: str
    awkward: bool = False


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """A column that a table may have.

    Numbers lie in [low, high] in multiples of `step`; for a date these are years. `sums` and `averages` say which
    aggregates mean something. `keep` is the probability that a database has the column.
    """

    kind: Kind
    labels: tuple[Label, ...]
    values: Pool
    low: int
    high: int
    step: int
    sums: bool
    averages: bool
    keep: float


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A foreign key to the table `target`; `verb` joins the two plurals ("pets" "belong to" "owners")."""

    target: str
    verb: str


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of a domain; `rows` bounds its row count. Tables are listed parents first."""

    key: str
    nouns: tuple[Noun, ...]
    rows: tuple[int, int]
    links: tuple[LinkSpec, ...]
    columns: tuple[ColumnSpec, ...]
    optional: bool


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """A subject; all its databases are in one split."""

    name: str
    split: Split
    tables: tuple[TableSpec, ...]


@cache
def all_domains() -> tuple[DomainSpec, ...]:
    """Read the domains, in the order of the file."""
    read = tomllib.loads(Path(__file__).with_name("domains.toml").read_text(encoding="utf-8"))
    pools = {name: _pool(**fields) for name, fields in read["pools"].items()}
    return tuple(
        DomainSpec(each["name"], Split(each["split"]), tuple(_table(table, pools) for table in each["tables"]))
        for each in read["domains"]
    )


def _pool(words: str, second: str = "", both: float = 0.0) -> Pool:
    return Pool(tuple(words.split()), tuple(second.split()), both)


def _table(fields: Mapping[str, Any], pools: Mapping[str, Pool]) -> TableSpec:
    nouns = [Noun(name, one, several) for name, (one, several) in fields["names"].items()]
    nouns += [Noun(name, one, several, True) for name, (one, several) in fields.get("odd_names", {}).items()]
    low, high = fields["rows"]
    return TableSpec(
        key=fields["key"],
        nouns=tuple(nouns),
        rows=(low, high),
        links=tuple(LinkSpec(target, verb) for target, verb in fields.get("links", {}).items()),
        columns=tuple(_column(column, pools) for column in fields["columns"]),
        optional=fields.get("optional", False),
    )


def _column(fields: Mapping[str, Any], pools: Mapping[str, Pool]) -> ColumnSpec:
    kind = Kind(fields["kind"])
    labels = [Label(name, phrase) for name, phrase in fields["labels"].items()]
    labels += [Label(name, phrase, True) for name, phrase in fields.get("odd_labels", {}).items()]
    low, high, *step = fields.get("range", (0, 0))
    aggregates = fields.get("aggregates", ())
    return ColumnSpec(
        kind,
        tuple(labels),
        pools[fields["pool"]] if "pool" in fields else _pool(fields.get("words", "")),
        low,
        high,
        step[0] if step else 1,
        sums="sum" in aggregates,
        averages="average" in aggregates,
        keep=fields.get("keep", KEEP[kind]),
    )


@cache
def all_nouns() -> tuple[Noun, ...]:
    """Return every table name of every domain, once."""
    return tuple(dict.fromkeys(n for d in all_domains() for t in d.tables for n in t.nouns))


@cache
def all_labels(kind: Kind | None = None) -> tuple[Label, ...]:
    """Return every column name of every domain, once; of one kind if `kind` is given."""
    return tuple(dict.fromkeys(x for c in _columns() for x in c.labels if kind in (None, c.kind)))


@cache
def all_verbs() -> tuple[str, ...]:
    """Return every phrase that joins two tables, once."""
    return tuple(dict.fromkeys(link.verb for d in all_domains() for t in d.tables for link in t.links))


@cache
def all_values() -> tuple[str, ...]:
    """Return every word that occurs in a text cell, once."""
    return tuple(dict.fromkeys(word for c in _columns() for word in c.values.first + c.values.second))


@cache
def all_columns(kind: Kind) -> tuple[ColumnSpec, ...]:
    """Return every column of every domain that is of `kind`."""
    return tuple(c for c in _columns() if c.kind is kind)


def _columns() -> tuple[ColumnSpec, ...]:
    return tuple(c for d in all_domains() for t in d.tables for c in t.columns)
