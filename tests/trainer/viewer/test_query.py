"""What a person types is looked for, and is never part of a statement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.viewer.runs import evaluate_alone, played
from trainer.viewer.index import Index
from trainer.viewer.query import Filter, Order, count, counts_by, listing, match_of, same_question

FAILED = {"steps": 1, "turns": [], "reward": -0.3}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("query")
    records = [
        played("a", "correct", "shop", hardness="easy"),
        played("b", "wrong", "shop", question="How many Café_tables are there?", hardness="hard"),
        played("c", "wrong", "zoo", hardness="hard", question='Say "x y"', **FAILED),
        played("c", "out_of_budget", "zoo", question="Another text", **FAILED),
    ]
    index = Index(folder / "index.sqlite")
    list(index.update([evaluate_alone(folder / "played.jsonl", records)]))
    yield index
    index.close()


def found(index: Index, order: Order = Order.OLDEST, /, **wanted: Any) -> list[int]:
    statement = listing(replace(Filter((1,)), **wanted), order, 0, 10)
    return [row[0] for row in index.rows(statement.text, statement.values)]


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        ({}, [1, 2, 3, 4]),
        ({"outcome": "correct"}, [1]),
        ({"kind": "any"}, [2, 3, 4]),
        ({"kind": "right_rows"}, [2]),
        ({"kind": "never_queried", "db_id": "zoo"}, [4]),
        ({"db_id": "shop", "hardness": "hard"}, [2]),
        ({"question_id": "c"}, [3, 4]),
        ({"min_reward": 1.0}, [1]),
        ({"max_reward": -0.3}, [3, 4]),
        ({"min_step": 1}, []),
        ({"text": "cafe"}, [2]),
        ({"text": "CAFÉ_tab"}, [2]),
        ({"text": '"no such column" nme'}, [1, 2]),
        ({"text": '"such no"'}, []),
        ({"text": "column -tables"}, [1]),
        ({"text": "nosuchword"}, []),
        ({"text": "%"}, []),
        ({"text": "  "}, [1, 2, 3, 4]),
        ({"files": ()}, []),
        ({"files": (2,)}, []),
    ],
)
def test_what_is_wanted_is_found(index: Index, wanted: dict[str, Any], ids: list[int]) -> None:
    assert found(index, **wanted) == ids


def test_orders(index: Index) -> None:
    assert found(index, Order.NEWEST) == [4, 3, 2, 1]
    assert found(index, Order.REWARD_DOWN) == [1, 2, 4, 3]
    assert found(index, Order.REWARD_UP)[-1] == 1
    assert found(index, Order.STEPS_DOWN) == [2, 1, 4, 3]


def test_counts(index: Index) -> None:
    def of(wanted: Filter, column: str) -> dict[str, int]:
        statement = counts_by(wanted, column)
        return dict(index.rows(statement.text, statement.values))

    wrong = Filter((1,), outcome="wrong")
    statement = count(wrong)
    assert index.rows(statement.text, statement.values)[0][:2] == (2, 0)
    assert of(wrong, "outcome") == {"wrong": 2, "correct": 1, "out_of_budget": 1}
    assert of(wrong, "db_id") == {"shop": 1, "zoo": 1}
    assert of(replace(wrong, kind="any"), "kind") == {"right_rows": 1, "gave_up": 1}


def test_the_same_question_is_of_one_text(index: Index) -> None:
    statement = same_question((1,), "c", "zoo", "Another text", 10)
    assert [row[0] for row in index.rows(statement.text, statement.values)] == [4]


@given(text=st.text(alphabet=st.sampled_from("ab\"'-* ()^:{}+,.\\\n%_é;"), max_size=25))
def test_no_text_is_an_error(index: Index, text: str) -> None:
    found(index, text=text)


@given(text=st.text(max_size=15))
def test_a_match_is_one_the_index_understands(text: str) -> None:
    if match := match_of(text):
        connection = apsw.Connection(":memory:")
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(text)")
        list(connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (match,)))


def test_what_is_typed_is_a_value(index: Index) -> None:
    for name in ("outcome", "kind", "db_id", "hardness", "question_id"):
        assert found(index, **{name: "' OR 1=1 --"}) == []
