"""phi: how close the rows of a query are to the gold rows, in {0, 0.25, 0.5, 0.75, 1}.

    score = 0.25 cardinality + 0.50 value overlap + 0.25 numeric proximity

- cardinality: 1 - |p - g| / max(p, g, 1) over the true numbers of rows; an unknown number counts as unbounded: 0.
- value overlap: size of the multiset intersection of the cells over the larger number of cells. Cells are
  compared by key: text normalised as in judging, 1 equal to 1.0 but not to '1', floats to 12 significant digits.
- numeric proximity: mean over the gold's numeric cells of max(0, 1 - |p - g| / max(|g|, 1)), p the nearest
  predicted number that no other gold cell has taken; equal numbers are paired first, the others in ascending
  order. Without a numeric gold cell its weight goes to value overlap.

The score is rounded down to a multiple of 0.25. Overlap and proximity see the first `row_limit` rows of either
side, because no more than that is fetched from a query. phi is 1 only if the number of rows agrees and the cells
seen are the same multiset. Pure, deterministic, O(n log n) in the cells seen. The number leaves the server only
as part of a reward.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from env_server.dataset import Gold, Row, SQLValue
from env_server.judging.answers import normalize_text

BINS = 4
ROW_LIMIT = 20
_CARDINALITY, _OVERLAP, _PROXIMITY = 0.25, 0.50, 0.25
_SLACK = 1e-9
"""Keeps a score that is exactly a multiple of 1/4 from falling a bin through float rounding."""


class Target:
    """Gold rows, ready for many queries to be scored against them."""

    def __init__(self, gold: Gold, row_limit: int = ROW_LIMIT) -> None:
        wanted = [cell for row in gold.rows[:row_limit] for cell in row]
        self._row_limit = row_limit
        self._row_count = len(gold.rows)
        self._cell_count = len(wanted)
        self._keys = Counter(map(_key, wanted))
        self._numbers = Counter(_numbers(wanted))

    def phi(self, rows: Sequence[Row], row_count: int | None) -> float:
        """Score a query's rows. `row_count` is their true number, or None when it is not known."""
        predicted = [cell for row in rows[: self._row_limit] for cell in row]
        cardinality = _cardinality(row_count, self._row_count)
        overlap = self._overlap(predicted)
        proximity = _proximity(_numbers(predicted), self._numbers) if self._numbers else overlap
        score = _CARDINALITY * cardinality + _OVERLAP * overlap + _PROXIMITY * proximity
        return math.floor(score * BINS + _SLACK) / BINS

    def _overlap(self, predicted: Sequence[SQLValue]) -> float:
        larger = max(len(predicted), self._cell_count)
        if larger == 0:
            return 1.0
        wanted = self._keys
        common = sum(min(count, wanted[key]) for key, count in Counter(map(_key, predicted)).items() if key in wanted)
        return common / larger


def _cardinality(predicted: int | None, wanted: int) -> float:
    if predicted is None:
        return 0.0
    return 1 - abs(predicted - wanted) / max(predicted, wanted, 1)


def _key(value: SQLValue) -> tuple[str, object]:
    if isinstance(value, str):
        return ("text", normalize_text(value))
    if isinstance(value, float):
        # A sum taken in another order differs in the last bits.
        return ("number", float(f"{value:.12g}")) if math.isfinite(value) else ("special", repr(value))
    if isinstance(value, int):
        return ("number", value)
    return ("other", value)


def _numbers(cells: Sequence[SQLValue]) -> list[int | float]:
    """Return the finite numbers, ascending."""
    return sorted(cell for cell in cells if isinstance(cell, int | float) and math.isfinite(cell))


def _proximity(predicted: list[int | float], wanted: Counter[int | float]) -> float:
    """Return the mean proximity of the wanted numbers, of which there is at least one."""
    found = Counter(predicted)
    common = found & wanted
    rest = sorted((found - common).elements())
    total = float(common.total())
    for number in sorted((wanted - common).elements()):
        if not rest:
            break
        total += _closeness(_take_nearest(rest, number), number)
    return total / wanted.total()


def _take_nearest(numbers: list[int | float], target: int | float) -> int | float:
    """Remove and return the nearest of the ascending numbers; of two equally near, the smaller."""
    index = bisect_left(numbers, target)
    if index == len(numbers) or (index > 0 and target - numbers[index - 1] <= numbers[index] - target):
        index -= 1
    return numbers.pop(index)


def _closeness(number: int | float, target: int | float) -> float:
    return max(0.0, 1 - abs(number - target) / max(abs(target), 1))
