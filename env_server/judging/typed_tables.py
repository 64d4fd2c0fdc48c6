"""Is a typed table the gold table, when a typed cell may stand for several values of a gold column?

`3.1` may be 3.12 or 3.13, so the rows of an answer are matched with those of the gold, under one permutation of the
columns for the whole table. Ordered tables: a perfect matching of columns, polynomial. Unordered: depth first over
the gold columns, the identity first; a partial assignment is dropped as soon as the multisets of the row prefixes
differ, which leaves few branches unless columns are interchangeable, and then the first branch succeeds. Tables of
unambiguous cells, which SQL returns, have a search of their own (`tables`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Generic, Protocol, TypeVar

from env_server.judging.tables import Work

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class GoldColumn(Protocol[T_contra]):
    """A gold column. Its distinct values are numbered; `ids` holds one number per row."""

    ids: list[int]

    def candidates(self, cell: T_contra) -> tuple[int, ...]:
        """Return the values that an answer's cell may stand for, the closest first."""


def stands_for(gold: Sequence[GoldColumn[T]], answer: Sequence[Sequence[T]], work: Work, *, ordered: bool) -> bool:
    """Tell whether the answer can be the gold table, both of one shape and by columns; raises TooCostlyError.

    A unit of work is a reading of a cell, a comparison of two rows or an edge of a matching.
    """
    return _Search(gold, answer, work).exists(ordered=ordered)


_Candidates = list[tuple[int, ...]]


class _Search(Generic[T]):
    """Looks for a permutation of the answer's columns (and, unordered, of its rows) that gives the gold table."""

    def __init__(self, gold: Sequence[GoldColumn[T]], answer: Sequence[Sequence[T]], work: Work) -> None:
        self._gold = gold
        self._answer = answer
        self._height = len(answer[0]) if answer else 0
        self._spend = work.spend
        self._cache: dict[tuple[int, int], _Candidates | None] = {}

    def exists(self, *, ordered: bool) -> bool:
        """Tell whether the tables are the same; raises TooCostlyError."""
        width = len(self._gold)
        if ordered:
            return _perfect_matching(width, lambda j: (i for i in range(width) if self._same_column(i, j)), self._spend)
        return self._extend([], [0] * self._height, [0] * self._height)

    def _candidates(self, i: int, j: int) -> _Candidates | None:
        """Read the answer's column i as the gold column j; None when a cell matches nothing there."""
        if (i, j) not in self._cache:
            self._cache[i, j] = self._read_column(i, j)
        return self._cache[i, j]

    def _read_column(self, i: int, j: int) -> _Candidates | None:
        found: _Candidates = []
        for cell in self._answer[i]:
            options = self._gold[j].candidates(cell)
            self._spend(1 + len(options))
            if not options:
                return None
            found.append(options)
        return found

    def _same_column(self, i: int, j: int) -> bool:
        options = self._candidates(i, j)
        return options is not None and all(
            value in option for value, option in zip(self._gold[j].ids, options, strict=True)
        )

    def _extend(self, used: list[int], gold: list[int], answer: list[int]) -> bool:
        """Assign the remaining gold columns, `used` holding the answer's columns assigned so far.

        `gold` and `answer` number the row prefixes; the answer's cells are taken as their closest values.
        """
        j = len(used)
        if j == len(self._gold):
            return True
        number: dict[tuple[int, int], int] = {}
        longer = [number.setdefault(key, len(number)) for key in zip(gold, self._gold[j].ids, strict=True)]
        for i in sorted(set(range(len(self._gold))) - set(used), key=lambda i: i != j):
            options = self._candidates(i, j)
            if options is None:
                continue
            self._spend(self._height)
            closest = zip(answer, (option[0] for option in options), strict=True)
            rows = [number.setdefault(key, len(number)) for key in closest]
            same = sorted(rows) == sorted(longer) or self._same_rows([*used, i])
            if same and self._extend([*used, i], longer, rows):
                return True
        return False

    def _same_rows(self, used: list[int]) -> bool:
        """Tell whether the answer's row prefixes can stand for the gold's, one for one, whatever is closest."""
        columns = [self._candidates(i, j) or [] for j, i in enumerate(used)]
        if all(len(option) == 1 for column in columns for option in column):
            return False
        answer = list(zip(*columns, strict=True))
        where: dict[tuple[int, ...], list[int]] = {}
        for index, key in enumerate(zip(*(self._gold[j].ids for j in range(len(used))), strict=True)):
            where.setdefault(key, []).append(index)

        def neighbours(index: int) -> Iterable[int]:
            row = answer[index]
            if math.prod(len(option) for option in row) <= len(where):
                keys: Iterable[tuple[int, ...]] = product(*row)
            else:
                self._spend(len(where))
                keys = (key for key in where if all(v in o for v, o in zip(key, row, strict=True)))
            return (found for key in keys for found in where.get(key, ()))

        self._spend(self._height)
        return _perfect_matching(self._height, neighbours, self._spend)


def _perfect_matching(size: int, neighbours: Callable[[int], Iterable[int]], spend: Callable[[int], None]) -> bool:
    """Tell whether `size` left nodes can be matched to `size` right nodes (augmenting paths, breadth first)."""
    owner: dict[int, int] = {}
    mate: dict[int, int] = {}
    for start in range(size):
        reached_from: dict[int, int] = {}
        free = _free_node(start, neighbours, owner, reached_from, spend)
        if free is None:
            return False
        while True:
            left = reached_from[free]
            owner[free] = left
            previous = mate.get(left)
            mate[left] = free
            if previous is None:
                break
            free = previous
    return True


def _free_node(
    start: int,
    neighbours: Callable[[int], Iterable[int]],
    owner: dict[int, int],
    reached_from: dict[int, int],
    spend: Callable[[int], None],
) -> int | None:
    """Find a right node without owner at the end of an alternating path; fills `reached_from`."""
    queue = [start]
    for left in queue:
        for right in neighbours(left):
            spend(1)
            if right in reached_from:
                continue
            reached_from[right] = left
            if right not in owner:
                return right
            queue.append(owner[right])
    return None
