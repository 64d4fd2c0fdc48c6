"""Conditions on the rows of one table, in SQL and in two styles of English.

A drawn condition holds for at least one row and fails for at least one, and its values are values of the table, so
that it always restricts and is never empty. Comparisons with NULL count as failed, as in SQL.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Any

from env_server.data.synthetic.domains import Kind
from env_server.data.synthetic.model import Cell, Column, Table, literal

_MORE = ("greater than", "more than", "above", "over")
_LESS = ("less than", "below", "under")
_COMPARISONS: dict[str, tuple[Callable[[Any, Any], bool], tuple[str, ...]]] = {
    ">": (operator.gt, _MORE),
    "<": (operator.lt, _LESS),
    ">=": (operator.ge, ("at least",)),
    "<=": (operator.le, ("at most",)),
}
_YEAR_WORDS = {">": ("after", "greater than"), "<": ("before", "less than")}
_OPERATORS = (">", ">", ">", "<", "<", "<", ">=", "<=")


@dataclass(frozen=True, slots=True)
class Clause:
    """One comparison: its SQL after the column, the words after "is", and the rows (by index) it holds for."""

    column: Column
    tail: str
    words: str
    rows: frozenset[int]

    def sql(self, prefix: str = "") -> str:
        """The comparison, the column qualified by `prefix` (such as `T1.`)."""
        return f"{prefix}{self.column.sql} {self.tail}"

    @property
    def whose(self) -> str:
        """ "whose age is above 5"."""
        return f"whose {self.column.phrase} {self.column.be} {self.words}"

    @property
    def attribute(self) -> str:
        """ "age above 5"."""
        return f"{self.column.phrase} {self.words}"


@dataclass(frozen=True, slots=True)
class Condition:
    """One clause, or two joined by AND or OR."""

    clauses: tuple[Clause, ...]
    connective: str = "AND"

    @property
    def rows(self) -> frozenset[int]:
        """The indices of the rows that it holds for."""
        first, *rest = (c.rows for c in self.clauses)
        for rows in rest:
            first = first & rows if self.connective == "AND" else first | rows
        return first

    @property
    def columns(self) -> frozenset[Column]:
        """The columns that it is about."""
        return frozenset(c.column for c in self.clauses)

    def sql(self, prefix: str = "") -> str:
        """The condition as it follows WHERE."""
        return f" {self.connective} ".join(c.sql(prefix) for c in self.clauses)

    def text(self, rng: Random) -> str:
        """Return "whose age is above 5" or "with age above 5", to follow a noun."""
        joint = f" {self.connective.lower()} "
        if rng.random() < 0.5:
            return joint.join(c.whose for c in self.clauses)
        return "with " + joint.join(c.attribute for c in self.clauses)


def any_condition(table: Table, rng: Random, without: Collection[Column] = (), pairs: float = 0.2) -> Condition | None:
    """Draw a condition that does not mention `without`; a share `pairs` has two clauses."""
    options = [c for c in table.of(Kind.CATEGORY, Kind.INTEGER, Kind.REAL, Kind.FLAG) if c not in without]
    rng.shuffle(options)
    clauses = [c for c in (clause(table, column, rng) for column in options[:2]) if c is not None]
    if not clauses:
        return None
    if len(clauses) < 2 or rng.random() >= pairs:
        return Condition((clauses[0],))
    condition = Condition(tuple(clauses), rng.choice(("AND", "AND", "OR")))
    is_real = 0 < len(condition.rows) < len(table.rows) and all(condition.rows != c.rows for c in clauses)
    return condition if is_real else Condition((clauses[0],))


def clause(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw a comparison on a column; None if none is found that holds for some rows and not for others."""
    if column.kind in (Kind.CATEGORY, Kind.FLAG, Kind.NAME):
        return equals(table, column, rng)
    for _ in range(4):
        roll = rng.random()
        if roll < 0.15:
            drawn = between(table, column, rng)
        elif roll < 0.3 and column.kind is Kind.INTEGER:
            drawn = equals(table, column, rng)
        else:
            drawn = comparison(table, column, rng)
        if drawn is not None:
            return drawn
    return None


def equals(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw "is dog"."""
    value = rng.choice(present(table, column))
    counted = column.kind is Kind.FLAG or (column.kind is Kind.INTEGER and column.plural)
    words = f"equal to {value}" if counted else str(value)
    return _restricting(table, column, f"= {literal(value)}", words, lambda cell: cell == value)


def comparison(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw "is above 5"."""
    sign = rng.choice(_OPERATORS)
    holds, words = _COMPARISONS[sign]
    bound = rng.choice(present(table, column))
    if column.is_year and sign in _YEAR_WORDS:
        words = _YEAR_WORDS[sign]
    text = f"{rng.choice(words)} {bound}"
    return _restricting(table, column, f"{sign} {literal(bound)}", text, lambda cell: holds(cell, bound))


def between(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw "is between 3 and 7" for a number, both included as in SQL."""
    values = sorted({cell for cell in present(table, column) if isinstance(cell, int | float)})
    if len(values) < 4:
        return None
    i, j = sorted(rng.sample(range(len(values)), 2))
    low, high = values[i], values[j]
    tail = f"BETWEEN {literal(low)} AND {literal(high)}"
    inside = frozenset(values[i : j + 1])
    return _restricting(table, column, tail, f"between {low} and {high}", lambda cell: cell in inside)


def in_year(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw "is in 2021" for a date."""
    year = str(rng.choice(present(table, column)))[:4]
    return _restricting(table, column, f"LIKE '{year}%'", f"in {year}", lambda cell: str(cell).startswith(year))


def around_day(table: Table, column: Column, rng: Random) -> Clause | None:
    """Draw "is after 2021-05-01" or "is before 2021-05-01" for a date."""
    sign, word = rng.choice(((">", "after"), ("<", "before")))
    holds = _COMPARISONS[sign][0]
    day = rng.choice(present(table, column))
    return _restricting(table, column, f"{sign} {literal(day)}", f"{word} {day}", lambda cell: holds(cell, day))


def present(table: Table, column: Column) -> list[Cell]:
    """Return the cells of a column that are not NULL, in the order of the rows."""
    return [cell for cell in table.cells[column] if cell is not None]


def _restricting(
    table: Table,
    column: Column,
    tail: str,
    words: str,
    holds: Callable[[Cell], bool],
) -> Clause | None:
    cells = table.cells[column]
    rows = frozenset(i for i, cell in enumerate(cells) if cell is not None and holds(cell))
    return Clause(column, tail, words, rows) if 0 < len(rows) < len(cells) else None
