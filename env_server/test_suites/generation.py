"""The rows of one test database: random, but shaped by the gold query and true to the schema's keys.

A test database is a function of the profile, the query's constants and the random generator. Its configuration decides
what it is good at telling apart: few parents with many children (large groups), many parents with few (empty groups),
many ties or none, rows like the original ones or rows drawn from small pools of the query's constants and values near
them. Keys are numbered afresh, so that a join on the wrong columns does not come out right. Primary keys, UNIQUE, NOT
NULL and foreign keys hold, and NULL stands only where the original has it: a query that differs from the gold only on
data that the database rules out is not wrong.

The method is the fuzzing of Zhong, Yu and Klein (EMNLP 2020), with tens of rows instead of hundreds, and with the
constants of one question at a time. Pure but for `insert`.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from env_server.dataset import Row, SQLValue
from env_server.sql.lexer import fold
from env_server.test_suites.profile import ColumnProfile, DatabaseProfile, Kind, Reference, TableProfile
from env_server.test_suites.queries import QueryConstants

MAX_ROWS = 60
_LINK_SHARE = 0.8
_NULL_SHARE = 0.15
_SPECIAL_KEY_SHARE = 0.6
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUMERAL = re.compile(r"[+-]?\d{1,15}(\.\d{1,6})?")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}")
_WILDCARDS = re.compile(r"[%_]")
_MAX_INTEGER = 2**53
_LARGEST_INTEGER = 2**63 - 1

Insert = Callable[[TableProfile, Sequence[Row]], Sequence[Row]]
"""Stores a table's rows and returns those that it took; a CHECK may refuse some."""


@dataclass(frozen=True, slots=True)
class FuzzConfig:
    """How the rows of a test database come about.

    `parents` and `children`: rows of tables without and with references, at least and at most. `pool`: values of a
    column, at least and at most. `resampled`: how likely a row begins as one of the original rows. `distinct`: how
    likely a column has no ties. `near`: values near to the query's constants, at least. `most`: rows of a table, which
    bounds the group sizes that can be met and missed.
    """

    parents: tuple[int, int]
    children: tuple[int, int]
    pool: tuple[int, int]
    resampled: float
    distinct: float
    near: int = 2
    most: int = MAX_ROWS


CONFIGS = (
    FuzzConfig(parents=(6, 15), children=(10, 30), pool=(2, 3), resampled=0.0, distinct=0.0, near=6),
    FuzzConfig(parents=(10, 30), children=(10, 30), pool=(8, 20), resampled=0.8, distinct=0.8),
    FuzzConfig(parents=(3, 9), children=(8, 25), pool=(1, 3), resampled=0.2, distinct=0.1),
    FuzzConfig(parents=(5, 25), children=(30, 60), pool=(4, 12), resampled=0.1, distinct=0.6, most=450),
    FuzzConfig(parents=(1, 5), children=(1, 6), pool=(1, 4), resampled=0.2, distinct=0.3),
    FuzzConfig(parents=(8, 20), children=(4, 15), pool=(3, 10), resampled=0.5, distinct=0.3),
)


def generate(
    profile: DatabaseProfile, constants: QueryConstants, rng: random.Random, config: FuzzConfig, insert: Insert
) -> set[str]:
    """Make every table's rows and hand them to `insert`, parents first; return the tables that took none of theirs."""
    made: dict[str, Sequence[Row]] = {}
    refusing: set[str] = set()
    for table in profile.tables:
        rows = _Filler(profile, constants, rng, config, made, table).rows()
        made[table.name] = insert(table, rows)
        if rows and not made[table.name]:
            refusing.add(fold(table.name))
    return refusing


class _Filler:
    """Makes the rows of one table, given those of the tables before it."""

    def __init__(
        self,
        profile: DatabaseProfile,
        constants: QueryConstants,
        rng: random.Random,
        config: FuzzConfig,
        made: dict[str, Sequence[Row]],
        table: TableProfile,
    ) -> None:
        self._profile = profile
        self._constants = constants
        self._rng = rng
        self._config = config
        self._made = made
        self._table = table
        referring = {i for reference in table.references for i in reference.columns}
        self._keys = {i for key in table.unique if len(key) == 1 for i in key} - referring
        self._pools = [self._pool(column) for column in table.columns]
        self._special = [self._special_keys(pool) for pool in self._pools]
        self._linked = [self._linked_values(column) for column in table.columns]

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
            if not any(key in known for key, known in zip(keys, seen, strict=True)):
                for key, known in zip(keys, seen, strict=True):
                    known.add(key)
                rows.append(row)
        return rows

    def _size(self) -> int:
        config = self._config
        low, high = config.children if self._table.references else config.parents
        if fold(self._table.name) not in self._constants.tables:
            return self._rng.randint(1, min(high, 6))
        wanted = self._rng.randint(low, high)
        sizes = [size for size in self._constants.sizes if 3 * size <= 2 * config.most]
        if sizes and self._rng.random() < 0.5:
            wanted = max(wanted, sizes[-1] * self._rng.randint(1, 3) + 1)
        return min(wanted, config.most)

    def _row(self, number: int) -> Row | None:
        """Make one row; None where a reference finds no parent and may not be NULL."""
        columns = self._table.columns
        satisfy = self._rng.choice((0.2, 0.6, 0.9))
        resample = self._table.checked or self._rng.random() < self._config.resampled
        original = self._rng.choice(self._table.rows) if resample and self._table.rows else None
        row: list[SQLValue] = []
        for i, column in enumerate(columns):
            if i in self._keys:
                row.append(self._key(i, number))
            elif column.has_null and not column.required and self._rng.random() < _NULL_SHARE:
                row.append(None)
            elif original is not None and self._rng.random() < 0.7:
                row.append(rounded(original[i]))
            elif self._linked[i] and self._rng.random() < _LINK_SHARE:
                row.append(self._rng.choice(self._linked[i]))
            else:
                row.append(self._pools[i].draw(self._rng, satisfy))
        for reference in self._table.references:
            values = self._parent_values(reference)
            if values is None and not all(columns[i].has_null for i in reference.columns):
                return None
            for i, value in zip(reference.columns, values or [None] * len(reference.columns), strict=True):
                row[i] = value if row[i] is not None or not columns[i].has_null else None
        return tuple(row)

    def _key(self, i: int, number: int) -> SQLValue:
        """Return a value that no other row has: one that the query names, or one made up."""
        if self._special[i] and self._rng.random() < _SPECIAL_KEY_SHARE:
            return self._special[i].pop()
        return unused(self._rng, self._table.columns[i], number)

    def _parent_values(self, reference: Reference) -> list[SQLValue] | None:
        """Return the key of a parent row; None where there is no parent."""
        parent = self._profile.table(reference.parent)
        rows = self._made.get(reference.parent, ())
        if parent is None or not rows:
            return None
        row = self._rng.choice(rows)
        indexes = [parent.index(column) for column in reference.parent_columns]
        return [None if i is None else row[i] for i in indexes]

    def _linked_values(self, column: ColumnProfile) -> list[SQLValue]:
        """Return the values of columns made before that the query equates with this one."""
        place = fold(self._table.name), fold(column.name)
        pairs = [(pair, pair[::-1])[pair[1] == place] for pair in self._constants.links if place in pair]
        found: dict[SQLValue, None] = {}
        for _, (name, other) in pairs:
            table = self._profile.table(name)
            index = table.index(other) if table is not None else None
            if table is not None and index is not None:
                found.update(dict.fromkeys(row[index] for row in self._made.get(table.name, ())))
        return [value for value in found if value is not None]

    def _pool(self, column: ColumnProfile) -> Pool:
        place, config = (fold(self._table.name), fold(column.name)), self._config
        size = MAX_ROWS if self._rng.random() < config.distinct else self._rng.randint(*config.pool)
        constants = self._constants.values.get(place, ())
        return make_pool(self._rng, column, constants, self._constants.patterns.get(place, ()), size, config.near)

    def _special_keys(self, pool: Pool) -> list[SQLValue]:
        most = self._config.near
        near = [each for value in pool.exact for each in neighbours(self._rng, value)[:most]]
        self._rng.shuffle(near)
        return [*near[: most * len(pool.exact) // 2], *pool.exact]


@dataclass(frozen=True, slots=True)
class Pool:
    """What one column is filled from. `exact`: values that the query compares it with."""

    exact: tuple[SQLValue, ...]
    others: tuple[SQLValue, ...]

    def draw(self, rng: random.Random, satisfy: float) -> SQLValue:
        """Return a value; an exact one with probability `satisfy`, where there is one."""
        if self.exact and (not self.others or rng.random() < satisfy):
            return rng.choice(self.exact)
        return rng.choice(self.others)


def make_pool(
    rng: random.Random,
    column: ColumnProfile,
    constants: Sequence[SQLValue],
    patterns: Sequence[str],
    size: int,
    near_size: int = 2,
) -> Pool:
    """Return a pool of about `size` values besides the constants, and `near_size` or more of those near them."""
    if column.kind is Kind.JSON and column.values:  # constants are compared with what is in it
        return Pool((), column.values)
    exact = [fit(value, column.kind) for value in constants if value not in patterns]
    # Texts that match a LIKE pattern: with nothing, and with something, for each wildcard.
    for pattern in patterns:
        exact.append(_WILDCARDS.sub(lambda each: "" if each[0] == "%" else rng.choice(_LETTERS), pattern))
        exact.append(_WILDCARDS.sub(lambda _: rng.choice(_LETTERS), pattern))
    near = [each for value in exact for each in neighbours(rng, value)]
    usual = [usual_value(rng, column) for _ in range(size)]
    rng.shuffle(near)
    others = dict.fromkeys([*near[: max(near_size, size)], *usual])
    return Pool(tuple(dict.fromkeys(exact)), tuple(others))


def usual_value(rng: random.Random, column: ColumnProfile) -> SQLValue:
    """Return a value like those of the column: one of them, one near to one, or one in their range."""
    if column.values and (column.kind is Kind.OTHER or rng.random() < 0.6):
        value = rounded(rng.choice(column.values))
        return value if rng.random() < 0.7 else rng.choice(neighbours(rng, value) or [value])
    if column.kind in (Kind.INTEGER, Kind.REAL):
        numbers = [value for value in column.values if isinstance(value, int | float) and abs(value) < _MAX_INTEGER]
        low, high = (math.floor(min(numbers)), math.ceil(max(numbers))) if numbers else (0, 20)
        return rng.randint(low - 1, high + 1) if column.kind is Kind.INTEGER else rng.randint(4 * low, 4 * high + 4) / 4
    if column.kind is Kind.DATE:
        return f"{rng.randint(1990, 2020)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 7))).capitalize()


def unused(rng: random.Random, column: ColumnProfile, number: int) -> SQLValue:
    """Return a value for a key: distinct for distinct numbers, of the column's kind, in no telling order."""
    if column.kind in (Kind.INTEGER, Kind.REAL):
        return number
    texts = [value for value in column.values if isinstance(value, str)]
    if texts and all(_NUMERAL.fullmatch(text) for text in texts):
        return str(number)
    return f"{rng.choice(texts) if texts else 'K'}{number}"


def neighbours(rng: random.Random, value: SQLValue) -> list[SQLValue]:
    """Return values near to one, the nearest first: those that a slightly wrong query takes for it."""
    match value:
        case bool() | None | bytes():
            return []
        case int():
            near = [value + 1, value - 1, value + rng.randint(2, 9), value - rng.randint(2, 9)]
            near += [value + rng.randint(10, 60)]
            return [each for each in near if abs(each) <= _LARGEST_INTEGER]
        case float():
            return [value + 0.25, value - 0.25, rounded(value + rng.randint(1, 9)), rounded(value - rng.randint(1, 9))]
    return _near_text(rng, value)


def _near_text(rng: random.Random, text: str) -> list[SQLValue]:
    if _NUMERAL.fullmatch(text) and not text.startswith("0"):
        number = float(text) if "." in text else int(text)
        # As text, a number is less than one that it begins.
        shorter = [text[:-1]] if len(text) > 1 and text[-2].isdigit() else []
        return [str(number + 1), str(number - 1), text + rng.choice("0123456789"), *shorter]
    letter = rng.choice(_LETTERS)
    if _DATE.match(text):
        date, _, time = text.partition(" ")
        year, month, day = date.split("-", 2)
        next_day = f"{year}-{month}-{int(day[:2]) % 28 + 1:02d}"
        return [f"{int(year) + rng.choice((-1, 1))}{text[4:]}", " ".join(filter(None, (next_day, time)))]
    # None differs in case alone: LIKE asks the same of a text without wildcards.
    near: list[SQLValue] = [text + letter, letter + text, letter + text + letter]
    if len(text) > 1:
        place = rng.randrange(len(text))
        other = letter if text[place].lower() != letter else _LETTERS[_LETTERS.index(letter) - 1]
        near += [text[:-1], text[1:], text[:place] + other + text[place + 1 :]]
    rng.shuffle(near)
    return near


def rounded(value: SQLValue) -> SQLValue:
    """Return a real as a multiple of 1/4, so that sums do not depend on the order of rows; anything else as it is."""
    if isinstance(value, float) and math.isfinite(value) and abs(value) < _MAX_INTEGER:
        return round(value * 4) / 4
    return value


def fit(value: SQLValue, kind: Kind) -> SQLValue:
    """Return a constant as the column would store it: a year compared with a date becomes a date."""
    if isinstance(value, bytes):
        return value
    if kind is Kind.DATE and re.fullmatch(r"\d{4}", str(value)):
        return f"{value}-06-15"
    if kind is Kind.TEXT and isinstance(value, int | float):
        return str(value)
    if kind is Kind.INTEGER and isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value):
        return int(value)
    return value
