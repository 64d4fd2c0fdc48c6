"""Do two tables hold the same rows, up to one permutation of the columns for the whole table?

Cells are equal as Python values are: 1 equals 1.0, 1 differs from '1', None equals None.

Ordered tables are the same when they have the same columns, as a multiset: linear. For unordered ones the gold's
columns are matched one by one, those with the fewest candidates first: columns that hold the same values, as often, and
stand in the table as often. After each column both tables must have the same rows as far as they are matched, or the
next candidate is tried. Mostly the first few columns tell the rows apart, and then nothing is left to try.

Tables made for it (projective planes with a fault) take more trials than anyone would wait for; `Work` bounds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from env_server.dataset import Row, SQLValue

_Column = tuple[SQLValue, ...]


class TooCostlyError(Exception):
    """A comparison exceeded its bound."""


class Work:
    """What a comparison has cost, and may cost."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0

    def spend(self, units: int) -> None:
        """Add to the cost; raises TooCostlyError."""
        self.spent += units
        if self.spent > self.limit:
            raise TooCostlyError


def same_table(rows: Sequence[Row], gold: Sequence[Row], work: Work, *, ordered: bool) -> bool:
    """Tell whether two tables of the same shape, with at least one cell, are the same; raises TooCostlyError.

    A unit of work is one cell read.
    """
    work.spend(2 * len(gold) * len(gold[0]))
    candidates, columns = Counter(zip(*rows, strict=True)), Counter(zip(*gold, strict=True))
    if ordered:
        return candidates == columns
    if Counter(rows) == Counter(gold):
        return True
    by_kind: defaultdict[Hashable, list[_Column]] = defaultdict(list)
    for column, times in candidates.items():
        by_kind[_kind(column, times)].append(column)
    kinds = {column: _kind(column, times) for column, times in columns.items()}
    if Counter(kinds.values()) != {kind: len(found) for kind, found in by_kind.items()}:
        return False
    open_columns = sorted(columns, key=lambda column: len(by_kind[kinds[column]]))
    try:
        return _match([(column, by_kind[kinds[column]]) for column in open_columns], work)
    except RecursionError:
        raise TooCostlyError from None


def _kind(column: _Column, times: int) -> Hashable:
    """What columns that can correspond have in common."""
    return times, frozenset(Counter(column).items())


def _match(wanted: Sequence[tuple[_Column, list[_Column]]], work: Work) -> bool:
    """Tell whether each gold column can have a candidate of its own so that the rows are the same."""
    height = len(wanted[0][0])
    used: set[_Column] = set()

    def extend(place: int, gold: Sequence[int], rows: Sequence[int]) -> bool:
        """`gold` and `rows` number the rows of both tables by what the columns before `place` hold in them."""
        if place == len(wanted):
            return True
        column, candidates = wanted[place]
        number: dict[tuple[int, SQLValue], int] = {}
        longer = [number.setdefault(key, len(number)) for key in zip(gold, column, strict=True)]
        counts = Counter(longer)
        for candidate in candidates:
            if candidate in used:
                continue
            work.spend(height)
            found = [number.get(key, -1) for key in zip(rows, candidate, strict=True)]
            if Counter(found) == counts:
                used.add(candidate)
                if extend(place + 1, longer, found):
                    return True
                used.remove(candidate)
        return False

    return extend(0, [0] * height, [0] * height)
