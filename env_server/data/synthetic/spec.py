"""What a domain is made of, before names and rows are drawn: tables, columns, their possible names and ranges.

A domain offers alternatives; a database of the domain picks among them. The notation for names is
`identifier`, or `identifier:phrase` where the words of a question differ from the words of the identifier;
alternatives are separated by `|`, and a leading `!` marks an awkward one (capitals, a reserved word, a space, an
abbreviation, a singular among plurals) that is to stay a minority. Table names are `identifier:singular` or
`identifier:singular:plural`. Foreign keys are `target:verb`, separated by `|`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from env_server.data.synthetic.words import Pool
from env_server.dataset import Split

NO_WORDS = Pool()


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
    values: Pool = NO_WORDS
    low: int = 0
    high: int = 0
    step: int = 1
    sums: bool = False
    averages: bool = False
    keep: float = 0.8


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
    optional: bool = False


@dataclass(frozen=True, slots=True)
class DomainSpec:
    """A subject; all its databases are in one split."""

    name: str
    split: Split
    tables: tuple[TableSpec, ...]


def labels(text: str) -> tuple[Label, ...]:
    """Parse the notation for column names."""
    return tuple(_label(part) for part in text.split("|"))


def nouns(text: str) -> tuple[Noun, ...]:
    """Parse the notation for table names."""
    return tuple(_noun(part) for part in text.split("|"))


def _label(part: str) -> Label:
    identifier, _, phrase = part.removeprefix("!").partition(":")
    return Label(identifier, phrase or _words(identifier), part.startswith("!"))


def _noun(part: str) -> Noun:
    identifier, singular, *rest = part.removeprefix("!").split(":")
    return Noun(identifier, singular, rest[0] if rest else _words(identifier), part.startswith("!"))


def _words(identifier: str) -> str:
    return identifier.replace("_", " ").lower()


def name(names: str, values: Pool) -> ColumnSpec:
    """Return a column whose values tell the rows apart; always kept."""
    return ColumnSpec(Kind.NAME, labels(names), values, keep=1.0)


def category(names: str, values: Pool, keep: float = 0.85) -> ColumnSpec:
    """Return a text column with few values."""
    return ColumnSpec(Kind.CATEGORY, labels(names), values, keep=keep)


def amount(names: str, low: int, high: int, step: int = 1) -> ColumnSpec:
    """Return an integer column that can be added up."""
    return ColumnSpec(Kind.INTEGER, labels(names), NO_WORDS, low, high, step, sums=True, averages=True)


def measure(names: str, low: int, high: int, step: int = 1) -> ColumnSpec:
    """Return an integer column that has an average but no meaningful sum, such as an age."""
    return ColumnSpec(Kind.INTEGER, labels(names), NO_WORDS, low, high, step, averages=True)


def ordinal(names: str, low: int, high: int) -> ColumnSpec:
    """Return an integer column that only has an order, such as a year."""
    return ColumnSpec(Kind.INTEGER, labels(names), NO_WORDS, low, high)


def real(names: str, low: int, high: int, sums: bool = True) -> ColumnSpec:
    """Return a column of numbers with one decimal."""
    return ColumnSpec(Kind.REAL, labels(names), NO_WORDS, low, high, sums=sums, averages=True)


def date(names: str, low: int = 2018, high: int = 2024, keep: float = 0.85) -> ColumnSpec:
    """Return a column of ISO dates between two years."""
    return ColumnSpec(Kind.DATE, labels(names), NO_WORDS, low, high, keep=keep)


def flag(names: str) -> ColumnSpec:
    """Return a column of 0 and 1."""
    return ColumnSpec(Kind.FLAG, labels(names), keep=0.35)


def table(
    key: str, names: str, low: int, high: int, *, links: str = "", optional: bool = False
) -> Callable[[*tuple[ColumnSpec, ...]], TableSpec]:
    """Return what makes a table of its columns. It has `low` to `high` rows; `links` are in the notation for them."""
    refers = tuple(LinkSpec(*link.split(":")) for link in links.split("|") if link)
    return lambda *columns: TableSpec(key, nouns(names), (low, high), refers, columns, optional)


def domain(name: str, split: Split) -> Callable[[*tuple[TableSpec, ...]], DomainSpec]:
    """Return what makes a domain of its tables."""
    return lambda *tables: DomainSpec(name, split, tables)
