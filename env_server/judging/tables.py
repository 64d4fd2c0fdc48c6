"""Do two tables hold the same rows, up to one permutation of the columns for the whole table?

Cells are equal as Python values are: 1 equals 1.0, 1 differs from '1', None equals None.

Ordered tables are the same when they have the same columns, as a multiset: linear. Unordered ones are matched as graphs
are. Repeated columns, and repeated rows, are one with a multiplicity. Then:

1. *Refinement*: the rows of both tables are put into common classes, and so are the columns; a class is split where its
   columns hold different values in a class of rows, or its rows in a class of columns. A class with more of one table
   than of the other proves the tables different. Mostly, every column ends in a class with its partner alone.
2. *Parts*: where a class of rows meets a class of columns, one value is the usual one. Rows and columns that no other
   values connect are independent: each part of one table is matched with the first part of the other that is the same.
3. *Trial*: what refinement leaves together within a part is nearly always interchangeable. One of its columns is tried
   with each of its class.

A table of n rows and w columns takes a few times n * w units of work, and each trial as much at most. Tables made for
it (projective planes with a fault) take more trials than anyone would wait for; `Work` bounds them. Tables are called
the same only after all their cells were compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from env_server.dataset import Row

_Line = tuple[int, ...]
"""A row or a column."""


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
    if ordered:
        return Counter(zip(*rows, strict=True)) == Counter(zip(*gold, strict=True))
    if Counter(rows) == Counter(gold):
        return True
    number: dict[Hashable, int] = {}
    for row in gold:
        for cell in row:
            number.setdefault(cell, len(number))
    if any(cell not in number for row in rows for cell in row):
        return False
    # Sums of these tell multisets of values apart. Where they do not, that costs time, not correctness.
    mark = {cell: hash((index,)) for cell, index in number.items()}
    left, right = (_Grid.of([tuple(mark[cell] for cell in row) for row in table]) for table in (gold, rows))
    try:
        return left.shape == right.shape and _same(left, right, work)
    except RecursionError:
        raise TooCostlyError from None


class _Grid:
    """Rows and columns, none of them twice. Those of different kinds do not correspond."""

    def __init__(self, rows: Sequence[_Line], row_kinds: Sequence[int], column_kinds: Sequence[int]) -> None:
        self.rows = rows
        self.columns: Sequence[_Line] = list(zip(*rows, strict=True))
        self.row_kinds = row_kinds
        self.column_kinds = column_kinds

    @classmethod
    def of(cls, rows: Sequence[_Line]) -> _Grid:
        """Return a table's grid; the kind of a row or column is how often it occurs."""
        columns = Counter(zip(*rows, strict=True))
        # By distinct columns; a row is repeated there if and only if it is repeated in the whole table.
        distinct = Counter(zip(*columns, strict=True))
        return cls(list(distinct), list(distinct.values()), list(columns.values()))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.row_kinds), len(self.column_kinds)

    def part(self, lines: Iterable[int], row_kinds: _Line, column_kinds: _Line) -> _Grid:
        """Return the grid of some lines, which are numbered rows first; the kinds are given for all."""
        height = len(row_kinds)
        ordered = sorted(lines)
        rows = [line for line in ordered if line < height]
        columns = [line - height for line in ordered if line >= height]
        cells = [tuple(self.rows[row][column] for column in columns) for row in rows]
        return _Grid(cells, [row_kinds[row] for row in rows], [column_kinds[column] for column in columns])


@dataclass(slots=True)
class _Partition:
    """Classes of the rows, or of the columns, of both grids: the members below `half` are the gold's.

    `pending` names the classes that the other partition has yet to be split by. The lists of members are never
    changed, so copies share them.
    """

    half: int
    classes: list[list[int]]
    pending: list[int]

    @classmethod
    def of(cls, kinds: Sequence[int], other: Sequence[int]) -> _Partition | None:
        """Return the classes of equal kind; None when the grids differ in them."""
        whole = cls(len(kinds), [list(range(2 * len(kinds)))], [0])
        return whole if whole.split([*kinds, *other]) else None

    def copy(self) -> _Partition:
        """Return an independent copy."""
        return _Partition(self.half, self.classes.copy(), self.pending.copy())

    def split(self, signatures: Sequence[int]) -> bool:
        """Split every class by a signature of its members; False when that leaves one with unequal halves."""
        for index, members in enumerate(self.classes[:]):
            groups: dict[int, list[int]] = {}
            for member in members:
                groups.setdefault(signatures[member], []).append(member)
            if len(groups) == 1:
                continue
            if any(2 * sum(member < self.half for member in group) != len(group) for group in groups.values()):
                return False
            # Splitting by the whole and by all groups but one is splitting by that one too: the largest is spared.
            largest, *others = sorted(groups.values(), key=len, reverse=True)
            self.classes[index] = largest
            for group in others:
                self._add(group)
        return True

    def pair(self, index: int, first: int, second: int) -> None:
        """Make two members of a class a class of their own."""
        self.classes[index] = [member for member in self.classes[index] if member not in (first, second)]
        self._add([first, second])

    def is_paired(self) -> bool:
        """Tell whether every class is one member of each grid."""
        return len(self.classes) == self.half

    def kinds(self) -> tuple[_Line, _Line]:
        """Return the class of each member, for the gold and for the other grid."""
        found = [0] * (2 * self.half)
        for index, members in enumerate(self.classes):
            for member in members:
                found[member] = index
        return tuple(found[: self.half]), tuple(found[self.half :])

    def _add(self, members: list[int]) -> None:
        self.pending.append(len(self.classes))
        self.classes.append(members)


def _same(gold: _Grid, other: _Grid, work: Work) -> bool:
    """Tell whether two grids of one shape are the same, up to the order of rows and columns."""
    rows = _Partition.of(gold.row_kinds, other.row_kinds)
    columns = _Partition.of(gold.column_kinds, other.column_kinds)
    return rows is not None and columns is not None and _Pairing(gold, other, rows, columns, work).same()


@dataclass(frozen=True, slots=True)
class _Pairing:
    """Two grids of one shape, and what may still correspond to what."""

    gold: _Grid
    other: _Grid
    rows: _Partition
    columns: _Partition
    work: Work

    def same(self) -> bool:
        """Tell whether some choice of what is open makes the grids the same."""
        if not self._refine():
            return False
        if self.columns.is_paired():
            return self._holds()
        gold, other = self._parts()
        if {shape: len(parts) for shape, parts in gold.items()} != {
            shape: len(parts) for shape, parts in other.items()
        }:
            return False
        if sum(map(len, gold.values())) == 1:
            return any(branch.same() for branch in self._branches())
        return all(self._match(parts, other[shape]) for shape, parts in gold.items())

    def _refine(self) -> bool:
        """Split by one another until all columns are paired or nothing is left to split by; False: they differ."""
        while not self.columns.is_paired():
            if self.rows.pending:
                members = self.rows.classes[self.rows.pending.pop()]
                possible = self.columns.split(self._sums(members, self.gold.rows, self.other.rows))
            elif self.columns.pending:
                members = self.columns.classes[self.columns.pending.pop()]
                possible = self.rows.split(self._sums(members, self.gold.columns, self.other.columns))
            else:
                return True
            if not possible:
                return False
        return True

    def _sums(self, members: Sequence[int], gold: Sequence[_Line], other: Sequence[_Line]) -> list[int]:
        """Add up the lines of a class, for each grid: signatures of the lines that cross them."""
        half = len(gold)
        sums: list[int] = []
        for lines in ([gold[i] for i in members if i < half], [other[i - half] for i in members if i >= half]):
            self.work.spend(len(lines) * len(lines[0]))
            sums += lines[0] if len(lines) == 1 else map(sum, zip(*lines, strict=True))
        return sums

    def _holds(self) -> bool:
        """Tell whether the pairs of columns, when all are paired, make the grids the same."""
        height, width = self.gold.shape
        self.work.spend(2 * height * width)
        partner = {min(pair): max(pair) - width for pair in self.columns.classes}
        columns = [self.other.columns[partner[i]] for i in range(width)]
        gold_rows = Counter(zip(self.gold.row_kinds, *self.gold.columns, strict=True))
        return gold_rows == Counter(zip(self.other.row_kinds, *columns, strict=True))

    def _parts(self) -> tuple[_Parts, _Parts]:
        """Return the parts of both grids."""
        gold_rows, other_rows = self.rows.kinds()
        gold_columns, other_columns = self.columns.kinds()
        # All rows of a class hold the same values in a class of columns, only elsewhere, so one of them tells the rest.
        usual: list[_Line] = []
        for members in self.rows.classes:
            counts: list[Counter[int]] = [Counter() for _ in self.columns.classes]
            for kind, value in zip(gold_columns, self.gold.rows[min(members)], strict=True):
                counts[kind][value] += 1
            usual.append(tuple(max(count, key=lambda value: (count[value], value)) for count in counts))
        height, width = self.gold.shape
        self.work.spend(3 * height * width)
        return (
            _connected(self.gold, gold_rows, gold_columns, usual),
            _connected(self.other, other_rows, other_columns, usual),
        )

    def _match(self, gold: Sequence[_Grid], other: Sequence[_Grid]) -> bool:
        """Match the parts of one shape. A part of a single row or column is like any other of its kind."""
        left = list(other)
        for part in gold:
            height, width = part.shape
            self.work.spend(height * width)
            found = next(
                (i for i, each in enumerate(left) if not height or not width or _same(part, each, self.work)), -1
            )
            if found < 0:
                return False
            del left[found]
        return True

    def _branches(self) -> Iterator[_Pairing]:
        """Yield the ways to pair one of the columns that are not, the one in the same place first.

        One of the largest class: it is the least likely to be decided by columns that are paired already.
        """
        width = self.columns.half
        classes = self.columns.classes
        index = max(range(len(classes)), key=lambda i: len(classes[i]))
        first = min(classes[index])
        others = (member for member in classes[index] if member >= width)
        for second in sorted(others, key=lambda member: member != first + width):
            self.work.spend(self.rows.half + width)
            columns = self.columns.copy()
            columns.pair(index, first, second)
            yield _Pairing(self.gold, self.other, self.rows.copy(), columns, self.work)


_Parts = dict[tuple[_Line, _Line], list[_Grid]]
"""Parts by shape: the kinds of their rows and columns."""


def _connected(grid: _Grid, row_kinds: _Line, column_kinds: _Line, usual: Sequence[_Line]) -> _Parts:
    """Return the parts of a grid that values connect which are not usual where those kinds meet."""
    height, width = grid.shape
    crossing: list[list[int]] = [[] for _ in range(height + width)]
    for row, (cells, kind) in enumerate(zip(grid.rows, row_kinds, strict=True)):
        for column, value in enumerate(cells):
            if value != usual[kind][column_kinds[column]]:
                crossing[row].append(height + column)
                crossing[height + column].append(row)
    parts: _Parts = {}
    seen = [False] * (height + width)
    for start in range(height + width):
        lines = [] if seen[start] else [start]
        seen[start] = True
        for line in lines:
            fresh = [other for other in crossing[line] if not seen[other]]
            for other in fresh:
                seen[other] = True
            lines += fresh
        if lines:
            part = grid.part(lines, row_kinds, column_kinds)
            shape = tuple(sorted(part.row_kinds)), tuple(sorted(part.column_kinds))
            parts.setdefault(shape, []).append(part)
    return parts
