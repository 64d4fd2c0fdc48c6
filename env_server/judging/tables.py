"""Do two tables hold the same rows, up to one permutation of the columns for the whole table?

`same_table` compares the rows that queries returned. Cells are equal as Python values are: 1 equals 1.0, 1 differs from
'1', None equals None. Ordered tables are the same when they have the same columns, as a multiset: linear. For unordered
ones the gold's columns are matched one by one, those with the fewest candidates first: columns that hold the same
values, as often, and stand in the table as often.

`tables_match` compares a typed answer, of which a cell may stand for several values: `3.1` may be 3.12 or 3.13. So the
rows are matched as well. Ordered tables: a perfect matching of columns. Unordered: by columns, the identity first.

In both, after each column the two tables must have the same rows as far as they are matched, or the next candidate is
tried. Mostly the first few columns tell the rows apart, and then nothing is left to try. Tables made for it (projective
planes with a fault) take more trials than anyone would wait for; `Budget` bounds them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from itertools import product
from typing import Protocol, TypeVar

from env_server.dataset import Row, SQLValue

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
_Column = tuple[SQLValue, ...]


class TooCostlyError(Exception):
    """A comparison exceeded its bound."""


class Budget:
    """What a comparison has cost, and may cost."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.spent = 0

    def charge(self, units: int) -> None:
        """Add to the cost; raises TooCostlyError."""
        self.spent += units
        if self.spent > self.limit:
            raise TooCostlyError


def same_table(rows: Sequence[Row], gold: Sequence[Row], budget: Budget, *, ordered: bool) -> bool:
    """Tell whether two tables of the same shape, with at least one cell, are the same; raises TooCostlyError.

    A unit of work is one cell read.
    """
    budget.charge(2 * len(gold) * len(gold[0]))
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
        return _match([(column, by_kind[kinds[column]]) for column in open_columns], budget)
    except RecursionError:
        raise TooCostlyError from None


def _kind(column: _Column, times: int) -> Hashable:
    """What columns that can correspond have in common."""
    return times, frozenset(Counter(column).items())


def _match(wanted: Sequence[tuple[_Column, list[_Column]]], budget: Budget) -> bool:
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
            budget.charge(height)
            found = [number.get(key, -1) for key in zip(rows, candidate, strict=True)]
            if Counter(found) == counts:
                used.add(candidate)
                if extend(place + 1, longer, found):
                    return True
                used.remove(candidate)
        return False

    return extend(0, [0] * height, [0] * height)


class GoldColumn(Protocol[T_contra]):
    """A gold column. Its distinct values are numbered; `ids` holds one number per row."""

    ids: list[int]

    def candidates(self, cell: T_contra) -> tuple[int, ...]:
        """Return the values that an answer's cell may stand for, the closest first."""


def tables_match(
    gold: Sequence[GoldColumn[T]], answer: Sequence[Sequence[T]], budget: Budget, *, ordered: bool
) -> bool:
    """Tell whether the answer can be the gold table, both of one shape and by columns; raises TooCostlyError.

    A unit of work is a reading of a cell, a comparison of two rows or an edge of a matching.
    """
    width, height = len(gold), len(answer[0]) if answer else 0

    @cache
    def readings(i: int, j: int) -> list[tuple[int, ...]] | None:
        """Read the answer's column i as the gold column j; None when a cell matches nothing there."""
        found = []
        for cell in answer[i]:
            options = gold[j].candidates(cell)
            budget.charge(1 + len(options))
            if not options:
                return None
            found.append(options)
        return found

    def same_column(i: int, j: int) -> bool:
        found = readings(i, j)
        return found is not None and all(value in each for value, each in zip(gold[j].ids, found, strict=True))

    def same_rows(used: Sequence[int]) -> bool:
        """Tell whether the answer's row prefixes can stand for the gold's, one for one, whatever is closest."""
        columns = [readings(i, j) or [] for j, i in enumerate(used)]
        if all(len(options) == 1 for column in columns for options in column):
            return False
        rows = list(zip(*columns, strict=True))
        where: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, key in enumerate(zip(*(gold[j].ids for j in range(len(used))), strict=True)):
            where[key].append(index)

        def neighbours(index: int) -> Iterable[int]:
            row = rows[index]
            keys: Iterable[tuple[int, ...]] = product(*row)
            if math.prod(map(len, row)) > len(where):
                budget.charge(len(where))
                keys = (key for key in where if all(v in options for v, options in zip(key, row, strict=True)))
            return (found for key in keys for found in where.get(key, ()))

        budget.charge(height)
        return _perfect_matching(height, neighbours, budget)

    def extend(used: list[int], gold_rows: Sequence[int], rows: Sequence[int]) -> bool:
        """Match the remaining gold columns; `used`: the answer's columns that stand for the first ones.

        `gold_rows` and `rows` number the row prefixes; the answer's cells are taken as their closest values.
        """
        j = len(used)
        if j == width:
            return True
        number: dict[tuple[int, int], int] = {}
        longer = [number.setdefault(key, len(number)) for key in zip(gold_rows, gold[j].ids, strict=True)]
        for i in sorted(set(range(width)) - set(used), key=lambda i: i != j):
            found = readings(i, j)
            if found is None:
                continue
            budget.charge(height)
            closest = zip(rows, (options[0] for options in found), strict=True)
            extended = [number.setdefault(key, len(number)) for key in closest]
            same = sorted(extended) == sorted(longer) or same_rows([*used, i])
            if same and extend([*used, i], longer, extended):
                return True
        return False

    try:
        if ordered:
            return _perfect_matching(width, lambda j: (i for i in range(width) if same_column(i, j)), budget)
        return extend([], [0] * height, [0] * height)
    except RecursionError:
        raise TooCostlyError from None


def _perfect_matching(size: int, neighbours: Callable[[int], Iterable[int]], budget: Budget) -> bool:
    """Tell whether `size` left nodes can be matched to `size` right nodes, by augmenting paths."""
    owner: dict[int, int] = {}

    def augment(left: int, seen: set[int]) -> bool:
        for right in neighbours(left):
            budget.charge(1)
            if right not in seen:
                seen.add(right)
                if right not in owner or augment(owner[right], seen):
                    owner[right] = left
                    return True
        return False

    return all(augment(left, set()) for left in range(size))
