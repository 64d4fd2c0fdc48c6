"""The index follows its files, whatever becomes of them; a search is a value, never part of a statement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.viewer.runs import evaluate, evaluate_alone, make_run, played, train
from trainer.eval.run_files import RunFolder
from trainer.viewer import index as module
from trainer.viewer.index import LINES, Filter, Index, Order, match_of

FAILED = {"steps": 1, "turns": [], "reward": -0.3}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "first")
    train(run, 1, [played("a"), played("b", "wrong")])
    return run


def index_of(*paths: Path) -> Index:
    index = Index()
    list(index.update(paths))
    return index


def steps(index: Index) -> list[tuple[int, str]]:
    return index.rows("SELECT step, question_id FROM episodes ORDER BY seq")


def matching(index: Index, word: str) -> int:
    return int(index.rows("SELECT COUNT(*) FROM words WHERE words MATCH ?", (word,))[0][0])


def test_an_episode_is_read_back_from_its_file(run: RunFolder) -> None:
    index = index_of(run.episodes_path)
    first, second = run.episodes()
    assert index.record(LINES) == (1, 1, first.record)
    assert index.record(LINES + 1) == (1, 1, second.record)
    assert index.record(LINES + 2) is None
    row = f"SELECT question_id, db_id, hardness, outcome, kind, steps, tokens FROM episodes WHERE id = {LINES + 1}"
    assert index.rows(row) == [("b", "shop", "easy", "wrong", "right_rows", 3, 10)]


def test_what_is_appended_is_read_in_complete_lines(run: RunFolder) -> None:
    index = index_of(run.episodes_path)
    assert list(index.update([run.episodes_path])) == []
    train(run, 2, [played("c", question="something\r\x0b new")])
    whole = run.episodes_path.read_bytes()
    run.episodes_path.write_bytes(whole[:-9])
    assert list(index.update([run.episodes_path])) == []
    run.episodes_path.write_bytes(whole)
    assert len(list(index.update([run.episodes_path]))) == 1
    assert steps(index) == [(1, "a"), (1, "b"), (2, "c")]
    assert matching(index, "something") == 1
    assert index.offsets() == {run.episodes_path: len(whole)}


@given(sizes=st.lists(st.integers(0, 400), max_size=12), chunk=st.integers(1, 3_000))
def test_chunks_add_up_to_the_file(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], chunk: int) -> None:
    run = make_run(tmp_path_factory.mktemp("chunks") / "run")
    train(run, 1, [played(str(i), question="é" * size) for i, size in enumerate(sizes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        index = index_of(run.episodes_path)
    assert [question for _, question in steps(index)] == [str(i) for i in range(len(sizes))]
    for number, episode in enumerate(run.episodes(), LINES):
        assert index.record(number) == (1, 1, episode.record)


def test_a_run_that_resumes_loses_what_it_cut_off(run: RunFolder) -> None:
    train(run, 2, [played("c", question="cut off"), played("c")])
    index = index_of(run.episodes_path)
    run.resume_from(1)
    list(index.update([run.episodes_path]))
    train(run, 2, [played("d"), played("e"), played("f")])
    list(index.update([run.episodes_path]))
    assert steps(index) == [(1, "a"), (1, "b"), (2, "d"), (2, "e"), (2, "f")]
    assert matching(index, '"cut off"') == 0
    os.truncate(run.episodes_path, 0)
    assert list(index.update([run.episodes_path])) == [None]
    assert steps(index) == []


def test_an_evaluation_that_is_played_again_replaces_the_first_and_a_file_that_goes_is_forgotten(
    run: RunFolder,
) -> None:
    evaluate(run, "after", [played("a", "wrong")])
    path = run.evaluations_path / "after.episodes.jsonl"
    index = index_of(run.episodes_path, path)
    evaluate(run, "after", [played("a")])
    list(index.update([run.episodes_path, path]))
    assert index.rows("SELECT outcome FROM episodes WHERE file = ?", (index.numbers()[path],)) == [("correct",)]
    run.drop_evaluation("after")
    list(index.update([run.episodes_path]))
    assert set(index.numbers()) == {run.episodes_path}
    assert len(steps(index)) == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[]", "a line is a JSON object"),
        ("{", "EOF"),
        ('{"step": 3}', "this is no episode"),
        ('{"step": 3, "color": 1}', "unexpected keyword argument 'color'"),
    ],
)
def test_a_malformed_line_is_named_and_affects_no_other_file(
    tmp_path: Path, run: RunFolder, line: str, why: str
) -> None:
    other = make_run(tmp_path / "second")
    train(other, 1, [played("z")])
    with run.episodes_path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    train(run, 2, [played("after the malformed line")])
    paths = [run.episodes_path, other.episodes_path]
    index = index_of(*paths)
    assert [question for _, question in steps(index)] == ["a", "b", "z"]
    assert why in index.errors()[run.episodes_path]
    train(run, 3, [played("later")])
    assert list(index.update(paths)) == []


def test_a_malformed_turn_is_named(run: RunFolder) -> None:
    train(run, 2, [played("c", "wrong", turns=[{"text": "?"}])])
    assert "a turn of episode episode-c cannot be read" in index_of(run.episodes_path).errors()[run.episodes_path]


def test_a_file_that_cannot_be_read_is_named_and_read_once_it_can(tmp_path: Path, run: RunFolder) -> None:
    unreadable = tmp_path / "other.episodes.jsonl"
    unreadable.mkdir()
    paths = [unreadable, run.episodes_path]
    index = index_of(*paths)
    assert [question for _, question in steps(index)] == ["a", "b"]
    assert index.errors() == {unreadable: "Is a directory"}
    unreadable.rmdir()
    unreadable.touch()
    list(index.update(paths))
    assert index.errors() == {}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Index:
    records = [
        played("a", "correct", "shop", hardness="easy"),
        played("b", "wrong", "shop", question="How many Café_tables are there?", hardness="hard"),
        played("c", "wrong", "zoo", hardness="hard", question='Say "x y"', **FAILED),
        played("c", "out_of_budget", "zoo", question="Another text", **FAILED),
    ]
    return index_of(evaluate_alone(tmp_path_factory.mktemp("query") / "played.jsonl", records))


def found(index: Index, order: Order = Order.OLDEST, files: tuple[int, ...] = (1,), **wanted: Any) -> list[int]:
    episodes = index.search(files, Filter(order=order, **wanted))["episodes"]
    return [1 + one["id"] - LINES for one in episodes]


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
        ({"text": "%"}, []),
        ({"text": "  "}, [1, 2, 3, 4]),
        ({"offset": 1, "limit": 2}, [2, 3]),
        ({"files": ()}, []),
        ({"files": (2,)}, []),
    ],
)
def test_what_is_wanted_is_found(four: Index, wanted: dict[str, Any], ids: list[int]) -> None:
    assert found(four, **wanted) == ids


def test_orders(four: Index) -> None:
    assert found(four, Order.NEWEST) == [4, 3, 2, 1]
    assert found(four, Order.REWARD_DOWN) == [1, 2, 4, 3]
    assert found(four, Order.REWARD_UP)[-1] == 1
    assert found(four, Order.STEPS_DOWN) == [2, 1, 4, 3]


def test_a_facet_counts_what_the_other_conditions_leave(four: Index) -> None:
    wrong = four.search((1,), Filter(outcome="wrong"))
    assert (wrong["total"], wrong["right"]) == (2, 0)
    assert wrong["facets"]["outcome"] == {"wrong": 2, "correct": 1, "out_of_budget": 1}
    assert wrong["facets"]["db_id"] == {"shop": 1, "zoo": 1}
    assert four.search((1,), Filter(outcome="wrong", kind="any"))["facets"]["kind"] == {"right_rows": 1, "gave_up": 1}


@given(text=st.text(alphabet=st.sampled_from("ab\"'-* ()^:{}+,.\\\n%_é;"), max_size=25))
def test_no_text_is_an_error(four: Index, text: str) -> None:
    found(four, text=text)


@given(text=st.text(max_size=15))
def test_a_match_is_one_the_index_understands(text: str) -> None:
    if match := match_of(text):
        connection = apsw.Connection(":memory:")
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(text)")
        list(connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (match,)))


def test_what_is_typed_is_a_value(four: Index) -> None:
    for name in ("outcome", "kind", "db_id", "hardness", "question_id"):
        wanted: dict[str, Any] = {name: "' OR 1=1 --"}
        assert found(four, **wanted) == []
