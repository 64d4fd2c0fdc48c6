"""The rows of one candidate variant: random, but shaped by the query and true to the schema's keys.

A candidate is a function of the profile, the hints and a seed. Its *style* decides what it is good at telling
apart: few parents with many children (large groups), many parents with few (empty groups), small tables, values
with many ties or none, rows like the original ones or rows drawn from small pools. Keys are numbered afresh, so that
a join on the wrong columns does not come out right. Primary keys, UNIQUE, NOT NULL and foreign keys hold, and NULL
stands only where the original has it: a query that differs from the gold only on data that the database
rules out is no neighbour.

The method is the fuzzing of Zhong, Yu and Klein (EMNLP 2020), with sizes of tens of rows instead of hundreds, and
with the constants of one question at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env_server.dataset import Row, SQLValue
from env_server.test_suites.constants import Hints, Place
from env_server.test_suites.database_profile import ColumnPlan, DatabaseProfile, Reference, TablePlan
from env_server.test_suites.values import Pool, make_pool, neighbours, rounded, unused

MAX_ROWS = 60
_LINK_SHARE = 0.8
_NULL_SHARE = 0.15
_SPECIAL_KEY_SHARE = 0.6

Insert = Callable[[TablePlan, Sequence[Row]], Sequence[Row]]
"""Stores a table's rows and returns those that it took; a CHECK may refuse some."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a candidate's rows come about.

    `parents` and `children`: rows of tables without and with references, at least and at most. `pool`: values of
    a column, at least and at most. `resampled`: how likely a row begins as one of the original rows.
    `distinct`: how likely a column of numbers has no ties. `skew`: exponent of how uneven children are.
    `most`: rows of a table at most, which bounds the group sizes that can be met and missed. `others`: rows of a table
    that the query does not name, at most. `near`: values near to the query's constants, at least.
    """

    parents: tuple[int, int]
    children: tuple[int, int]
    pool: tuple[int, int]
    resampled: float
    distinct: float
    skew: float
    most: int = MAX_ROWS
    others: int = 6
    near: int = 2


STYLES = (
    Style(parents=(3, 8), children=(12, 30), pool=(2, 5), resampled=0.0, distinct=0.5, skew=1.0),
    Style(parents=(8, 20), children=(4, 15), pool=(3, 10), resampled=0.5, distinct=0.3, skew=1.0),
    Style(parents=(2, 4), children=(10, 40), pool=(1, 3), resampled=0.0, distinct=0.2, skew=0.5),
    Style(parents=(10, 30), children=(10, 30), pool=(8, 20), resampled=0.8, distinct=0.8, skew=2.0),
    Style(parents=(1, 5), children=(1, 6), pool=(1, 4), resampled=0.2, distinct=0.3, skew=1.0),
    Style(parents=(6, 15), children=(25, 60), pool=(2, 4), resampled=0.1, distinct=0.9, skew=3.0),
)

AIMED_STYLES = (
    Style(parents=(1, 3), children=(20, 60), pool=(1, 3), resampled=0.0, distinct=0.3, skew=1.0, most=450),
    Style(parents=(3, 12), children=(12, 40), pool=(2, 6), resampled=0.2, distinct=0.3, skew=2.0),
    Style(parents=(2, 6), children=(4, 15), pool=(1, 4), resampled=0.5, distinct=0.5, skew=0.5),
    Style(parents=(5, 25), children=(30, 60), pool=(4, 12), resampled=0.1, distinct=0.6, skew=3.0, most=450),
)
"""Styles for a clause that the others leave untested: larger tables, and smaller ones with few values."""

CLOSE_STYLES = (
    Style(parents=(2, 6), children=(3, 12), pool=(1, 1), resampled=0.0, distinct=0.0, skew=1.0, near=8),
    Style(parents=(3, 9), children=(8, 25), pool=(1, 3), resampled=0.2, distinct=0.1, skew=2.0, others=30),
    Style(parents=(1, 3), children=(1, 4), pool=(1, 2), resampled=0.3, distinct=0.0, skew=1.0),
    Style(parents=(6, 15), children=(10, 30), pool=(2, 3), resampled=0.0, distinct=0.0, skew=0.5, near=6),
)
"""Styles for mutants that the others leave alive: few values but the query's and their neighbours, and many ties."""


def generate(profile: DatabaseProfile, hints: Hints, seed: str, style: Style, insert: Insert) -> None:
    """Make every table's rows and hand them to `insert`, parents first."""
    rng = random.Random(seed)
    made: dict[str, Sequence[Row]] = {}
    for table in profile.tables:
        made[table.name] = insert(table, _Filler(profile, hints, rng, style, made, table).rows())


def is_single(table: TablePlan, reference: Reference) -> bool:
    """Tell whether a key of the table lies in the reference, so that no two rows have the same parent."""
    return any(key <= set(reference.columns) for key in table.unique)


class _Filler:
    """Makes the rows of one table, given those of the tables before it."""

    def __init__(
        self,
        profile: DatabaseProfile,
        hints: Hints,
        rng: random.Random,
        style: Style,
        made: dict[str, Sequence[Row]],
        table: TablePlan,
    ) -> None:
        self._profile = profile
        self._hints = hints
        self._rng = rng
        self._style = style
        self._made = made
        self._table = table
        self._referring = {i for reference in table.references for i in reference.columns}
        self._single = [is_single(table, reference) for reference in table.references]
        self._alone_unique = {i for key in table.unique if len(key) == 1 for i in key} - self._referring
        self._distinct = {i for i in range(len(table.columns)) if rng.random() < style.distinct}
        self._pools = [self._pool(i, column) for i, column in enumerate(table.columns)]
        self._special = [self._special_keys(pool) for pool in self._pools]
        self._links = [self._linked_values(i) for i in range(len(table.columns))]
        self._weights: dict[int, list[float]] = {}
        self._waiting: dict[int, list[Row]] = {}

    def rows(self) -> list[Row]:
        """Return rows that hold the table's keys."""
        count = self._size()
        numbers = self._rng.sample(range(1, 3 * count + 10), count)
        seen: list[set[Row]] = [set() for _ in self._table.unique]
        rows: list[Row] = []
        self._made[self._table.name] = rows  # for references to the table itself
        for number in numbers:
            row = self._row(number)
            if row is None:
                continue
            keys = [tuple(row[i] for i in sorted(key)) for key in self._table.unique]
            if any(key in known for key, known in zip(keys, seen, strict=True)):
                continue
            for key, known in zip(keys, seen, strict=True):
                known.add(key)
            rows.append(row)
        return rows

    def _size(self) -> int:
        low, high = self._style.children if self._table.references else self._style.parents
        if self._table.name.casefold() not in self._hints.tables:
            return self._rng.randint(1, min(high, self._style.others))
        if self._is_extended() and self._rng.random() < 0.5:
            low, high = self._style.children
        wanted = self._rng.randint(low, high)
        sizes = [size for size in self._hints.sizes if 3 * size <= 2 * self._style.most]
        if sizes and self._rng.random() < 0.5:
            wanted = max(wanted, sizes[-1] * self._rng.randint(1, 3) + 1)
        return min(wanted, self._style.most)

    def _is_extended(self) -> bool:
        """Whether the query names a table that has one row at most for each of this table's rows."""
        return any(
            reference.parent == self._table.name and is_single(table, reference)
            for table in self._profile.tables
            if table is not self._table and table.name.casefold() in self._hints.tables
            for reference in table.references
        )

    def _row(self, number: int) -> Row | None:
        """Make one row; None where a reference finds no parent and may not be NULL."""
        columns = self._table.columns
        satisfy = self._rng.choice((0.2, 0.6, 0.9))
        original = self._rng.choice(self._table.rows) if self._resample() else None
        row: list[SQLValue] = []
        for i, column in enumerate(columns):
            if i in self._alone_unique:
                row.append(self._key(i, number))
            elif column.has_null and not column.required and self._rng.random() < _NULL_SHARE:
                row.append(None)
            elif original is not None and self._rng.random() < 0.7:
                row.append(rounded(original[i]))
            else:
                row.append(self._cell(i, satisfy))
        for place, reference in enumerate(self._table.references):
            values = self._parent_values(place, reference)
            full = self._single[place] and not all(columns[i].has_null for i in reference.columns)
            if values is None and (full or any(columns[i].required for i in reference.columns)):
                return None
            for i, value in zip(reference.columns, values or [None] * len(reference.columns), strict=True):
                row[i] = value if row[i] is not None or not columns[i].has_null else None
        return tuple(row)

    def _key(self, i: int, number: int) -> SQLValue:
        """Return a value that no other row has: one that the query speaks of, or one made up."""
        special = self._special[i]
        if special and self._rng.random() < _SPECIAL_KEY_SHARE:
            return special.pop()
        return unused(self._rng, self._table.columns[i], number)

    def _resample(self) -> bool:
        if not self._table.rows:
            return False
        return self._table.checked or self._rng.random() < self._style.resampled

    def _cell(self, i: int, satisfy: float) -> SQLValue:
        linked = self._links[i]
        if linked and self._rng.random() < _LINK_SHARE:
            return self._rng.choice(linked)
        return self._pools[i].draw(self._rng, satisfy)

    def _parent_values(self, place: int, reference: Reference) -> list[SQLValue] | None:
        """Return the key of a parent row, some parents being more popular than others, some without children.

        None where there is no parent, or none is left for a reference that takes each parent once.
        """
        parent = self._profile.table(reference.parent)
        rows = self._made.get(reference.parent, ())
        if parent is None or not rows:
            return None
        if reference.parent == self._table.name:
            row = self._rng.choice(rows)
        elif self._single[place]:
            if place not in self._waiting:
                self._waiting[place] = self._rng.sample(rows, len(rows) - len(rows) // 4)
            if not self._waiting[place]:
                return None
            row = self._waiting[place].pop()
        else:
            (row,) = self._rng.choices(rows, self._popularity(place, len(rows)))
        indexes = [parent.index(column) for column in reference.parent_columns]
        return [None if i is None else row[i] for i in indexes]

    def _popularity(self, place: int, parents: int) -> list[float]:
        if place not in self._weights:
            weights = [self._rng.random() ** self._style.skew + 1e-9 for _ in range(parents)]
            for lonely in self._rng.sample(range(parents), parents // 4):
                weights[lonely] = 1e-9
            self._weights[place] = weights
        return self._weights[place]

    def _pool(self, i: int, column: ColumnPlan) -> Pool:
        place = self._place(column)
        low, high = self._style.pool
        size = MAX_ROWS if i in self._distinct else self._rng.randint(low, high)
        constants = self._hints.constants.get(place, ())
        return make_pool(self._rng, column, constants, self._hints.patterns.get(place, ()), size, self._style.near)

    def _special_keys(self, pool: Pool) -> list[SQLValue]:
        most = self._style.near
        near = [each for value in pool.exact for each in neighbours(self._rng, value)[:most]]
        self._rng.shuffle(near)
        return [*near[: most * len(pool.exact) // 2], *pool.exact]

    def _linked_values(self, i: int) -> list[SQLValue]:
        """Return the values of columns made before that the query equates with this one."""
        own = self._place(self._table.columns[i])
        found: list[SQLValue] = []
        for left, right in self._hints.links:
            for here, there in ((left, right), (right, left)):
                other = self._profile.table(there[0])
                index = other.index(there[1]) if other is not None else None
                if here == own and other is not None and index is not None:
                    found += [row[index] for row in self._made.get(other.name, ())]
        return [value for value in dict.fromkeys(found) if value is not None]

    def _place(self, column: ColumnPlan) -> Place:
        return self._table.name.casefold(), column.name.casefold()
