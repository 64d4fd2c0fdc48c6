"""What an answer without a gold rests on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Row
from env_server.judging.answers import format_answer
from trainer.cli.session import Basis, Ran, Support, basis_of, support_of

NAMES = (("Max", 7), ("Tom", 5))


@pytest.mark.parametrize(
    ("answer", "rows", "support"),
    [
        ("5", ((5,),), Support.ROWS),
        ("Max, Tom", NAMES, Support.ROWS),
        ("tom, max", NAMES, Support.ROWS),
        ("Max | 7\nTom | 5", NAMES, Support.ROWS),
        ("7 | Max\n5 | Tom", NAMES, Support.ROWS),
        ("Max", NAMES, Support.CELLS),
        ("7, Tom", NAMES, Support.CELLS),
        ("180", ((180.0,), (40.0,)), Support.CELLS),
        ("Rex", NAMES, Support.NONE),
        ("Max, Rex", NAMES, Support.NONE),
        ("6", ((5,),), Support.NONE),
        ("[]", (), Support.ROWS),
        ("0", (), Support.NONE),
        ("NULL", ((None,),), Support.ROWS),
    ],
)
def test_how_a_query_supports_an_answer(answer: str, rows: tuple[Row, ...], support: Support) -> None:
    assert support_of(answer, Ran("SELECT", rows)) is support


def test_rows_of_which_there_are_more_are_not_the_answer() -> None:
    assert support_of("Max, Tom", Ran("SELECT", NAMES, complete=False)) is Support.CELLS


def test_the_best_query_is_named_and_of_several_the_latest() -> None:
    other, first, last = Ran("other", ((9,),)), Ran("first", ((5,),)), Ran("last", ((5,),))
    assert basis_of("5", [first, last, other]) == Basis("last", Support.ROWS)
    assert basis_of("5", [first, other]) == Basis("first", Support.ROWS)
    assert basis_of("7", [first, other]) == Basis("other", Support.NONE)
    assert basis_of("5", []) is None


CELLS = st.one_of(st.none(), st.integers(-100, 100), st.floats(-1e6, 1e6), st.text("ab, |'\"", max_size=6))


@given(st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), max_size=5)))
def test_the_rows_as_they_are_written_rest_on_their_query(rows: list[Row]) -> None:
    assert support_of(format_answer(rows), Ran("SELECT", tuple(rows))) is Support.ROWS
