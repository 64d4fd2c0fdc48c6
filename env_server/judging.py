"""The verdict on an ANSWER: does it equal the gold rows?

Both judges compare whole tables: the same number of rows and columns, rows as a multiset (as a list where the
gold SQL orders), under one permutation of the columns for the whole table. They differ in the cells.

`judge_value` (the agent typed the answer; `answers.parse_answer` gives its readings):
- integers exactly; `42`, `42.0`, `+42`, `1,234` and `1e3` are read as numbers;
- floats to the precision given, never looser than 1%: the answer is at most half a unit of its last digit and at
  most 1% of the gold value away. A relative error of 1e-9 is rounding noise and always accepted. There is no
  absolute tolerance: a gold of 0 wants 0, a gold of 1e-9 wants about 1e-9;
- text trimmed, NFKC and case-folded; a text that looks like a number ('007') is compared as text;
- NULL is a bare NULL or None in any case. A bare `NULL` is never a text, the quoted one always is; a blob is x'..';
- a text with unprintable characters may also be typed as `display` shows it.

`judge_rows` (the agent submitted SQL) is Spider's execution rule (Yu et al. 2018; test-suite evaluation, Zhong
et al. 2020): cells are equal as Python values, 1 equals 1.0, 1 differs from '1', and no float tolerance.

Promises: the judges are deterministic, never raise, and their work is bounded; a comparison that would exceed
the bound (it takes a table built for it) is judged wrong. Judging right needs an explicit match of every row.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Generic, NamedTuple, Protocol, TypeVar

from env_server.answers import NULL_WORDS, Cell, format_answer, normalize_text, parse_answer
from env_server.data.questions import Gold, Row, SQLValue
from env_server.display import shortened

_RELATIVE_TOLERANCE = Decimal("0.01")
_ROUNDING_NOISE = Decimal("1e-9")
_MAX_NUMBER_CHARS = 400
_WORK = 200_000
_WORK_PER_CELL = 20
"""Cell readings, row comparisons and matching edges that one verdict may cost: a constant, and per gold cell."""
_LONGEST_ESCAPE = 6
"""Characters that `display` needs at most for one."""
_SPARE_CHARS = 10_000
_SPARE_FACTOR = 8
"""An answer may be this many times as long as the canonical one, plus the spare characters."""

_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,4})?")
_SPECIAL = {
    sign + word: value
    for word, number in (("inf", math.inf), ("infinity", math.inf), ("nan", math.nan))
    for sign, value in (("", repr(number)), ("+", repr(number)), ("-", repr(-number)))
}

T = TypeVar("T", contravariant=True)


class Judgement(NamedTuple):
    """Whether the answer is right. `reason` is for logs and tests and is never sent to the agent."""

    correct: bool
    reason: str


class _TooCostlyError(Exception):
    """The comparison exceeded its bound."""


class _Work:
    """What a verdict may still cost."""

    def __init__(self, gold: Gold) -> None:
        self._left = _WORK + _WORK_PER_CELL * len(gold.rows) * gold.width

    def spend(self, units: int) -> None:
        """Add to the cost; raises _TooCostlyError."""
        self._left -= units
        if self._left < 0:
            raise _TooCostlyError


def judge_value(answer: str, gold: Gold) -> Judgement:
    """Judge a typed answer."""
    longest = _SPARE_CHARS + _SPARE_FACTOR * len(format_answer(gold.rows))
    if len(answer) > longest:
        return Judgement(False, f"the answer has {len(answer)} characters, more than {longest}")
    readings = [table for table in parse_answer(answer, gold.width) if len(table) == len(gold.rows)]
    if not readings:
        return Judgement(False, f"no reading has {len(gold.rows)} rows of {gold.width} columns")
    columns = [_ValueColumn(column) for column in zip(*gold.rows, strict=True)]
    work = _Work(gold)
    for table in readings:
        typed = [[_typed(cell) for cell in column] for column in zip(*table, strict=True)]
        verdict = _compare(columns, typed, work, ordered=gold.ordered)
        if verdict.correct:
            return verdict
    return verdict


def judge_rows(rows: Sequence[Row], gold: Gold) -> Judgement:
    """Judge all the rows that a submitted query returned."""
    if len(rows) != len(gold.rows):
        return Judgement(False, f"{len(rows)} rows, not {len(gold.rows)}")
    if any(len(row) != gold.width for row in rows):
        return Judgement(False, f"{len(rows[0])} columns, not {gold.width}")
    columns = [_ExactColumn(column) for column in zip(*gold.rows, strict=True)]
    return _compare(columns, list(zip(*rows, strict=True)), _Work(gold), ordered=gold.ordered)


# --- cells ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Typed:
    """A cell of an answer, ready to be compared: its normalised text and its number, if it reads as one."""

    text: str
    may_be_null: bool
    may_be_text: bool
    number: Decimal | None


def _typed(cell: Cell) -> _Typed:
    text = normalize_text(cell.text)
    number = None
    if len(text) <= _MAX_NUMBER_CHARS and _NUMBER.fullmatch(text):
        number = Decimal(text.replace(",", ""))
    return _Typed(
        text=text,
        may_be_null=not cell.quoted and text in NULL_WORDS,
        may_be_text=cell.quoted or cell.text.strip() != "NULL",
        number=number,
    )


def floats_agree(answer: Decimal, gold: Decimal) -> bool:
    """Tell whether a typed number is the gold float, to the precision given and never looser than 1%."""
    error = abs(answer - gold)
    return error <= abs(gold) * _ROUNDING_NOISE or error <= min(_half_unit(answer), abs(gold) * _RELATIVE_TOLERANCE)


def _half_unit(number: Decimal) -> Decimal:
    """Half a unit of the last digit written."""
    return Decimal((0, (5,), int(number.as_tuple().exponent) - 1))


class _Column(Protocol[T]):
    """A gold column. Its distinct values are numbered; `ids` holds one number per row."""

    ids: list[int]

    def candidates(self, cell: T) -> tuple[int, ...]:
        """Return the values that an answer's cell may stand for, the closest first."""


class _ExactColumn:
    """A gold column under Python equality."""

    def __init__(self, values: Sequence[SQLValue]) -> None:
        self._number: dict[SQLValue, int] = {}
        self.ids = [self._number.setdefault(value, len(self._number)) for value in values]

    def candidates(self, cell: SQLValue) -> tuple[int, ...]:
        """Return the equal value, if there is one."""
        number = self._number.get(cell)
        return () if number is None else (number,)


class _ValueColumn:
    """A gold column under the rules for typed answers."""

    def __init__(self, values: Sequence[SQLValue]) -> None:
        number: dict[tuple[str, object], int] = {}
        self.ids = [number.setdefault(_key(value), len(number)) for value in values]
        for value, own in zip(values, self.ids, strict=True):
            if isinstance(value, str):
                shown = shortened(value, _LONGEST_ESCAPE * len(value) + 1)
                number.setdefault(("text", normalize_text(shown)), own)
        self._number = number
        self._floats = sorted({Decimal(repr(v)) for v in values if isinstance(v, float) and math.isfinite(v)})

    def candidates(self, cell: _Typed) -> tuple[int, ...]:
        """Return the values that the cell may stand for: NULL, text, blob, integer, then floats by closeness."""
        keys: list[tuple[str, object]] = []
        if cell.may_be_null:
            keys.append(("null", None))
        if cell.may_be_text:
            keys += [("text", cell.text), ("blob", cell.text)]
        if cell.text in _SPECIAL:
            keys.append(("special", _SPECIAL[cell.text]))
        if cell.number is not None:
            keys.append(("int", cell.number))
            keys += [("float", value) for value in self._close_floats(cell.number)]
        return tuple(self._number[key] for key in keys if key in self._number)

    def _close_floats(self, number: Decimal) -> list[Decimal]:
        # The window is a little wider than any tolerance; `floats_agree` decides.
        loosest = min(_half_unit(number), abs(number) * _RELATIVE_TOLERANCE * 2)
        window = max(loosest, abs(number) * _ROUNDING_NOISE * 2)
        first = bisect_left(self._floats, number - window)
        last = bisect_right(self._floats, number + window)
        close = [value for value in self._floats[first:last] if floats_agree(number, value)]
        return sorted(close, key=lambda value: abs(value - number))


def _key(value: SQLValue) -> tuple[str, object]:
    """Return the identity of a gold value."""
    if value is None:
        return ("null", None)
    if isinstance(value, str):
        return ("text", normalize_text(value))
    if isinstance(value, bytes):
        return ("blob", f"x'{value.hex()}'")
    if isinstance(value, int):
        return ("int", Decimal(value))
    return ("float", Decimal(repr(value))) if math.isfinite(value) else ("special", repr(value))


# --- tables --------------------------------------------------------------------------------------------------


def _compare(gold: Sequence[_Column[T]], answer: Sequence[Sequence[T]], work: _Work, *, ordered: bool) -> Judgement:
    """Compare two tables of the same shape, given by columns."""
    try:
        same = _TableMatch(gold, answer, work).exists(ordered=ordered)
    except _TooCostlyError:
        return Judgement(False, "the tables are too ambiguous to compare")
    return Judgement(True, "equal") if same else Judgement(False, "the values differ")


_Candidates = list[tuple[int, ...]]


class _TableMatch(Generic[T]):
    """Search for a permutation of the answer's columns (and, unordered, of its rows) that gives the gold table.

    Ordered tables: a perfect matching of columns, polynomial. Unordered: depth first over the gold columns,
    the identity first; a partial assignment is dropped as soon as the multisets of the row prefixes differ, which
    leaves few branches unless columns are interchangeable, and then the first branch succeeds.
    """

    def __init__(self, gold: Sequence[_Column[T]], answer: Sequence[Sequence[T]], work: _Work) -> None:
        self._gold = gold
        self._answer = answer
        self._height = len(answer[0]) if answer else 0
        self._spend = work.spend
        self._cache: dict[tuple[int, int], _Candidates | None] = {}

    def exists(self, *, ordered: bool) -> bool:
        """Tell whether the tables are the same; raises _TooCostlyError."""
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
