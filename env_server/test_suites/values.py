"""Values for a variant's columns: the query's constants, their neighbours, and values like those in the database.

Pure and driven by the random generator that is passed in. A value is near another one when a neighbour query of a query
would treat the two differently: one more, one less, a letter changed, added or lost, the next day.

Reals other than the query's own constants are multiples of 1/4, so that sums and averages do not depend on the
order in which rows are added up.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from env_server.dataset import SQLValue
from env_server.test_suites.database_profile import ColumnPlan, Kind

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NUMERAL = re.compile(r"[+-]?\d{1,15}(\.\d{1,6})?")
_WILDCARDS = re.compile(r"[%_]")
_MAX_INTEGER = 2**53
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Pool:
    """What one column of one variant is filled from. `exact`: values that the query compares it with."""

    exact: tuple[SQLValue, ...]
    others: tuple[SQLValue, ...]

    def draw(self, rng: random.Random, satisfy: float) -> SQLValue:
        """Return a value; an exact one with probability `satisfy`, where there is one."""
        if self.exact and (not self.others or rng.random() < satisfy):
            return rng.choice(self.exact)
        return rng.choice(self.others)


def make_pool(
    rng: random.Random,
    column: ColumnPlan,
    constants: Sequence[SQLValue],
    patterns: Sequence[str],
    size: int,
    near_size: int = 2,
) -> Pool:
    """Return a pool of about `size` values besides the constants, and `near_size` or more of those near them."""
    exact = [fit(value, column.kind) for value in constants if value not in patterns]
    matches = [match for pattern in patterns for match in matching(rng, pattern)]
    near = [each for value in exact + matches for each in neighbours(rng, value)]
    usual = fresh(rng, column, size)
    rng.shuffle(near)
    others = list(dict.fromkeys([*near[: max(near_size, size)], *usual]))
    return Pool(tuple(dict.fromkeys([*exact, *matches])), tuple(others))


def fresh(rng: random.Random, column: ColumnPlan, count: int) -> list[SQLValue]:
    """Return values like those of the column: each is one of them, near to one, or in their range."""
    numbers = [value for value in column.values if isinstance(value, int | float) and abs(value) < _MAX_INTEGER]
    low, high = (math.floor(min(numbers)), math.ceil(max(numbers))) if numbers else (0, 20)
    return [_fresh(rng, column, low, high) for _ in range(count)]


def _fresh(rng: random.Random, column: ColumnPlan, low: int, high: int) -> SQLValue:
    if column.values and (column.kind is Kind.OTHER or rng.random() < 0.6):
        value = rounded(rng.choice(column.values))
        return value if rng.random() < 0.7 else rng.choice(neighbours(rng, value) or [value])
    match column.kind:
        case Kind.INTEGER:
            return rng.randint(low - 1, high + 1)
        case Kind.REAL:
            return rng.randint(4 * low, 4 * high + 4) / 4
        case Kind.DATE:
            return _date(rng)
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 7))).capitalize()


def unused(rng: random.Random, column: ColumnPlan, number: int) -> SQLValue:
    """Return a value for a key: distinct for distinct numbers, of the column's kind, in no telling order."""
    match column.kind:
        case Kind.INTEGER:
            return number
        case Kind.REAL:
            return float(number)
        case Kind.DATE:
            return f"{1950 + number // 336}-{number // 28 % 12 + 1:02d}-{number % 28 + 1:02d}"
    texts = [value for value in column.values if isinstance(value, str)]
    if texts and all(_NUMERAL.fullmatch(text) for text in texts):
        return str(number)
    return f"{rng.choice(texts) if texts else 'K'}{number}"


def neighbours(rng: random.Random, value: SQLValue) -> list[SQLValue]:
    """Return values near to one, the nearest first."""
    match value:
        case bool() | None | bytes():
            return []
        case int():
            near = [value + 1, value - 1, value + rng.randint(2, 9), value - rng.randint(2, 9)]
            return [each for each in near if abs(each) <= _LARGEST_INTEGER]
        case float():
            return [value + 0.25, value - 0.25, rounded(value + rng.randint(1, 9)), rounded(value - rng.randint(1, 9))]
    return _near_text(rng, value)


def rounded(value: SQLValue) -> SQLValue:
    """Return a real as a multiple of 1/4, anything else as it is."""
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


def matching(rng: random.Random, pattern: str) -> list[str]:
    """Return texts that match a LIKE pattern: with nothing, and with something, for each wildcard."""
    bare = _WILDCARDS.sub(lambda each: "" if each[0] == "%" else rng.choice(_LETTERS), pattern)
    filled = _WILDCARDS.sub(lambda _: rng.choice(_LETTERS), pattern)
    return [bare, filled]


def _near_text(rng: random.Random, text: str) -> list[SQLValue]:
    if _NUMERAL.fullmatch(text) and not text.startswith("0"):
        number = float(text) if "." in text else int(text)
        # As text, a number is less than one that it begins.
        shorter = [text[:-1]] if len(text) > 1 and text[-2].isdigit() else []
        return [str(number + 1), str(number - 1), text + rng.choice("0123456789"), *shorter]
    letter = rng.choice(_LETTERS)
    if re.match(r"\d{4}-\d{1,2}-\d{1,2}", text):
        head, _, tail = text.partition(" ")
        return [f"{int(head[:4]) + rng.choice((-1, 1))}{text[4:]}", " ".join(filter(None, (_next_day(head), tail)))]
    longer: list[SQLValue] = [text + letter, letter + text, letter + text + letter]
    if len(text) > 1:
        place = rng.randrange(len(text))
        other = letter if text[place] != letter else _LETTERS[_LETTERS.index(letter) - 1]
        longer += [text[:-1], text[1:], text[:place] + other + text[place + 1 :]]
    rng.shuffle(longer)
    return longer


def _next_day(date: str) -> str:
    year, month, day = date.split("-")
    return f"{year}-{month}-{int(day[:2]) % 28 + 1:02d}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1990, 2020)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
