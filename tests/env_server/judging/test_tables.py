"""Equal tables, of rows and of typed answers, against brute force; and the work it takes on symmetric ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.judging.tables import Budget, TooCostlyError, same_table, tables_match

Matrix = list[tuple[int, ...]]


def shuffled(rows: Matrix, rng: random.Random) -> Matrix:
    order = rng.sample(range(len(rows[0])), len(rows[0]))
    return rng.sample([tuple(row[i] for i in order) for row in rows], len(rows))


def exchanged(rows: Matrix) -> Matrix:
    """Change a table so that every row and every column keeps its values: turn two equal corners over."""
    for first, second in itertools.combinations(range(len(rows)), 2):
        a, b = rows[first], rows[second]
        places: dict[tuple[int, int], int] = {}
        for place, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y and (y, x) in places:
                other = places[y, x]
                result = [list(row) for row in rows]
                for row in (result[first], result[second]):
                    row[place], row[other] = row[other], row[place]
                return [tuple(row) for row in result]
            places[x, y] = place
    raise AssertionError("no such corners")


def binary(rng: random.Random) -> Matrix:
    return [tuple(rng.randint(0, 1) for _ in range(100)) for _ in range(1_000)]


def one_hot(rng: random.Random) -> Matrix:
    """A diagonal, each 1 with its own number of repetitions of its row: only they tell the columns apart."""
    return [tuple(int(i == column) for column in range(40)) for i in range(40) for _ in range(1 + i // 2)]


def blocks(rng: random.Random) -> Matrix:
    """Ten equal blocks on a diagonal: blocks are interchangeable, and so are the columns of one."""
    inside = {(0, 0): 1, (0, 1): 2, (1, 1): 1, (1, 2): 2, (2, 2): 1, (2, 0): 2}
    return [
        tuple(inside.get((i % 3, column % 3), 0) if i // 3 == column // 3 else 0 for column in range(30))
        for i in range(30)
    ]


def group_table(rng: random.Random) -> Matrix:
    """Every row and every column holds every value once."""
    return [tuple((i + column) % 60 for column in range(60)) for i in range(60)]


def projective_plane(rng: random.Random) -> Matrix:
    """Points and lines over the field of 7: every two rows and every two columns look alike."""
    points = [(1, a, b) for a in range(7) for b in range(7)] + [(0, 1, a) for a in range(7)] + [(0, 0, 1)]
    return [tuple(int(sum(x * y for x, y in zip(p, q, strict=True)) % 7 == 0) for p in points) for q in points]


def bound(gold: Matrix) -> Budget:
    """What `judge_rows` allows."""
    return Budget(3_000_000 + 50 * len(gold) * len(gold[0]))


@pytest.mark.parametrize(
    ("make", "per_cell"),
    [
        (binary, 12),
        (one_hot, 12),
        (blocks, 20),
        (group_table, 30),
    ],
)
def test_work_on_equal_tables(make: Callable[[random.Random], Matrix], per_cell: int) -> None:
    rng = random.Random(3)
    gold = make(rng)
    assert same_table(shuffled(gold, rng), gold, Budget(per_cell * len(gold) * len(gold[0])), ordered=False)


@pytest.mark.parametrize("make", [binary, group_table])
def test_nearly_equal_tables(make: Callable[[random.Random], Matrix]) -> None:
    """Rows and columns hold the same values in both, one by one."""
    rng = random.Random(3)
    gold = make(rng)
    assert not same_table(shuffled(exchanged(gold), rng), gold, bound(gold), ordered=False)


def test_work_on_equal_columns_and_rows() -> None:
    gold = [tuple([i % 3] * 500) for i in range(300)]
    rows = [tuple([i % 3] * 499 + [0]) for i in range(300)]
    assert same_table(gold[::-1], gold, Budget(3 * 300 * 500), ordered=False)
    assert not same_table(rows, gold, Budget(4 * 300 * 500), ordered=False)


@pytest.mark.parametrize("make", [blocks, projective_plane])
def test_hopeless_tables_exceed_the_bound(make: Callable[[random.Random], Matrix]) -> None:
    gold = make(random.Random(0))
    budget = Budget(100_000)
    with pytest.raises(TooCostlyError):
        same_table(shuffled(exchanged(gold), random.Random(0)), gold, budget, ordered=False)
    assert budget.spent > budget.limit


def test_ordered_tables_are_linear() -> None:
    rng = random.Random(5)
    gold = binary(rng)
    order = rng.sample(range(100), 100)
    rows = [tuple(row[i] for i in order) for row in gold]
    assert same_table(rows, gold, Budget(2 * 100_000), ordered=True)
    assert not same_table(rows[::-1], gold, Budget(2 * 100_000), ordered=True)


class NearColumn:
    """A gold column of integers; an answer's cell may stand for every one that is at most 1 away."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = list(dict.fromkeys(values))
        self.ids = [self._values.index(value) for value in values]

    def candidates(self, cell: int) -> tuple[int, ...]:
        close = [i for i, value in enumerate(self._values) if abs(value - cell) <= 1]
        return tuple(sorted(close, key=lambda i: abs(self._values[i] - cell)))


def by_columns(grid: Matrix) -> list[tuple[int, ...]]:
    return list(zip(*grid, strict=True))


def typed_by_brute_force(answer: Matrix, gold: Matrix, *, ordered: bool) -> bool:
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
def test_typed_tables_agree_with_brute_force(data: st.DataObject, ordered: bool) -> None:
    width, height = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    grids = st.lists(st.tuples(*[st.integers(0, 5)] * width), min_size=height, max_size=height)
    gold, answer = data.draw(grids), data.draw(grids)
    columns = [NearColumn(column) for column in by_columns(gold)]
    found = tables_match(columns, by_columns(answer), Budget(100_000), ordered=ordered)
    assert found == typed_by_brute_force(answer, gold, ordered=ordered)


def test_typed_tables_keep_the_bound() -> None:
    gold: Matrix = [(i % 3, i % 2) for i in range(200)]
    columns = [NearColumn(column) for column in by_columns(gold)]
    budget = Budget(100)
    with pytest.raises(TooCostlyError):
        tables_match(columns, by_columns(gold), budget, ordered=False)
    assert tables_match(columns, by_columns(gold), Budget(10_000), ordered=False)
