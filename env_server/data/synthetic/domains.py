"""All domains, and the pools of words that random-name databases are drawn from."""

from __future__ import annotations

from env_server.data.synthetic.domains_business import BUSINESS
from env_server.data.synthetic.domains_leisure import LEISURE
from env_server.data.synthetic.spec import ColumnSpec, Kind, Label, Noun

DOMAINS = BUSINESS + LEISURE

_COLUMNS: tuple[ColumnSpec, ...] = tuple(c for d in DOMAINS for t in d.tables for c in t.columns)


def all_nouns() -> tuple[Noun, ...]:
    """Return every table name of every domain, once."""
    return tuple(dict.fromkeys(n for d in DOMAINS for t in d.tables for n in t.nouns))


def all_labels(kind: Kind | None = None) -> tuple[Label, ...]:
    """Return every column name of every domain, once; of one kind if `kind` is given."""
    return tuple(dict.fromkeys(x for c in _COLUMNS for x in c.labels if kind in (None, c.kind)))


def all_verbs() -> tuple[str, ...]:
    """Return every phrase that joins two tables, once."""
    return tuple(dict.fromkeys(link.verb for d in DOMAINS for t in d.tables for link in t.links))


def all_values() -> tuple[str, ...]:
    """Return every word that occurs in a text cell, once."""
    return tuple(dict.fromkeys(word for c in _COLUMNS for word in c.values.first + c.values.second))


def all_columns(kind: Kind) -> tuple[ColumnSpec, ...]:
    """Return every column of every domain that is of `kind`."""
    return tuple(c for c in _COLUMNS if c.kind is kind)
