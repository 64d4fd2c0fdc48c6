"""A data set selects without looking at its questions, and rows are JSON and back, value by value."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset, Split, rows_from_json, rows_to_json


def test_a_split_is_selected_once(pets: Dataset) -> None:
    for split in Split:
        assert pets.select(split) is pets.select(split)
        assert [q for q in pets.questions if split in (q.split, Split.ALL)] == list(pets.select(split))


VALUES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
ROWS = st.lists(st.lists(VALUES, max_size=4).map(tuple), max_size=4).map(tuple)


@given(rows=ROWS)
def test_rows_come_back_as_they_were(rows: tuple[tuple[int | float | str | bytes | None, ...], ...]) -> None:
    back = rows_from_json(rows_to_json(rows))
    assert back == rows
    assert [[type(value) for value in row] for row in back] == [[type(value) for value in row] for row in rows]
