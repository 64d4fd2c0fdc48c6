"""Matching ambiguous cells against brute force over rows and columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.judging.tables import TooCostlyError, Work
from env_server.judging.typed_tables import stands_for

Grid = list[tuple[int, ...]]


class NearColumn:
    """A gold column of integers; an answer's cell may stand for every one that is at most 1 away."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = list(dict.fromkeys(values))
        self.ids = [self._values.index(value) for value in values]

    def candidates(self, cell: int) -> tuple[int, ...]:
        close = [i for i, value in enumerate(self._values) if abs(value - cell) <= 1]
        return tuple(sorted(close, key=lambda i: abs(self._values[i] - cell)))


def by_columns(grid: Grid) -> list[tuple[int, ...]]:
    return list(zip(*grid, strict=True))


def by_brute_force(answer: Grid, gold: Grid, *, ordered: bool) -> bool:
    rows = [answer] if ordered else [list(order) for order in itertools.permutations(answer)]
    return any(
        all(abs(row[i] - cell) <= 1 for row, wanted in zip(table, gold, strict=True) for i, cell in enumerate(wanted))
        for permuted in (
            [[tuple(row[i] for i in order) for row in table] for table in rows]
            for order in itertools.permutations(range(len(gold[0])))
        )
        for table in permuted
    )


@settings(max_examples=400)
@given(st.data(), st.booleans())
def test_agrees_with_brute_force(data: st.DataObject, ordered: bool) -> None:
    width, height = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    grids = st.lists(st.tuples(*[st.integers(0, 5)] * width), min_size=height, max_size=height)
    gold, answer = data.draw(grids), data.draw(grids)
    columns = [NearColumn(column) for column in by_columns(gold)]
    found = stands_for(columns, by_columns(answer), Work(100_000), ordered=ordered)
    assert found == by_brute_force(answer, gold, ordered=ordered)


def test_the_bound_is_kept() -> None:
    gold: Grid = [(i % 3, i % 2) for i in range(200)]
    columns = [NearColumn(column) for column in by_columns(gold)]
    work = Work(100)
    with pytest.raises(TooCostlyError):
        stands_for(columns, by_columns(gold), work, ordered=False)
    assert stands_for(columns, by_columns(gold), Work(10_000), ordered=False)
