"""The library follows its files, whatever becomes of them; a search is a value, never part of a statement."""

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
from trainer.viewer.library import LINES, Filter, Library, match_of

FAILED = {"steps": 1, "turns": [], "reward": -0.3}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "first")
    train(run, 1, [played("a"), played("b", "wrong")])
    return run


@pytest.fixture
def library(run: RunFolder) -> Library:
    return Library([run.path.parent])


def steps(library: Library, **wanted: Any) -> list[tuple[int | None, str]]:
    library.refresh()
    episodes = library.episodes(Filter(order="oldest", **wanted))["episodes"]
    return [(one["step"], one["question_id"]) for one in episodes]


def trouble(library: Library) -> list[str]:
    return [text for source in library.state()["sources"] for text in source["trouble"]]


def test_what_is_appended_is_read_in_complete_lines(library: Library, run: RunFolder) -> None:
    version = library.state()["version"]
    assert library.state()["version"] == version
    train(run, 2, [played("c", question="something\r\x0b new é")])
    whole = run.episodes_path.read_bytes()
    run.episodes_path.write_bytes(whole[:-9])
    assert steps(library) == [(1, "a"), (1, "b")]
    run.episodes_path.write_bytes(whole)
    assert steps(library) == [(1, "a"), (1, "b"), (2, "c")]
    assert library.state()["version"] != version
    assert steps(library, text="something") == [(2, "c")]
    for number, episode in enumerate(run.episodes(), LINES):
        assert library.episode(number)["question"] == episode.record.question


def test_a_run_that_resumes_loses_what_it_cut_off(library: Library, run: RunFolder) -> None:
    train(run, 2, [played("c", question="cut off"), played("c")])
    library.refresh()
    run.resume_from(1)
    assert steps(library) == [(1, "a"), (1, "b")]
    train(run, 2, [played("d"), played("e"), played("f")])
    assert steps(library) == [(1, "a"), (1, "b"), (2, "d"), (2, "e"), (2, "f")]
    assert steps(library, text='"cut off"') == []
    os.truncate(run.episodes_path, 0)
    assert steps(library) == []


def test_an_evaluation_that_is_played_again_replaces_the_first_and_a_file_that_goes_is_forgotten(
    library: Library, run: RunFolder
) -> None:
    evaluate(run, "after", [played("a", "wrong")])
    assert steps(library, outcome="wrong", label="after") == [(None, "a")]
    evaluate(run, "after", [played("a")])
    assert steps(library, outcome="wrong", label="after") == []
    assert steps(library, label="after") == [(None, "a")]
    run.drop_evaluation("after")
    assert len(steps(library)) == 2


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
    library: Library, run: RunFolder, line: str, why: str
) -> None:
    train(make_run(run.path.parent / "second"), 1, [played("z")])
    with run.episodes_path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    train(run, 2, [played("after the malformed line")])
    assert steps(library) == [(1, "a"), (1, "b"), (1, "z")]
    assert [why in text for text in trouble(library)] == [True]
    train(run, 3, [played("later")])
    assert len(steps(library)) == 3


def test_a_malformed_turn_is_named(library: Library, run: RunFolder) -> None:
    train(run, 2, [played("c", "wrong", turns=[{"text": "?"}])])
    assert ["a turn of episode episode-c cannot be read" in text for text in trouble(library)] == [True]


def test_a_file_that_cannot_be_read_is_named_and_read_once_it_can(library: Library, run: RunFolder) -> None:
    unreadable = run.evaluations_path / "other.episodes.jsonl"
    unreadable.mkdir()
    assert trouble(library) == ["other.episodes.jsonl: Is a directory"]
    assert len(steps(library)) == 2
    unreadable.rmdir()
    evaluate(run, "other", [played("x")])
    assert trouble(library) == []
    assert len(steps(library)) == 3


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Library:
    records = [
        played("a", "correct", "shop", hardness="easy"),
        played("b", "wrong", "shop", question="How many Café_tables are there?", hardness="hard"),
        played("c", "wrong", "zoo", hardness="hard", question='Say "x y"', **FAILED),
        played("c", "out_of_budget", "zoo", question="Another text", **FAILED),
    ]
    library = Library([evaluate_alone(tmp_path_factory.mktemp("query") / "played.jsonl", records)])
    library.refresh()
    return library


def found(library: Library, **wanted: Any) -> list[int]:
    return [1 + one["id"] - LINES for one in library.episodes(Filter(**{"order": "oldest"} | wanted))["episodes"]]


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
        ({"source": "other"}, []),
        ({"source": "played", "label": "played", "limit": 1}, [1]),
    ],
)
def test_what_is_wanted_is_found(four: Library, wanted: dict[str, Any], ids: list[int]) -> None:
    assert found(four, **wanted) == ids


def test_orders(four: Library) -> None:
    assert found(four, order="newest") == [4, 3, 2, 1]
    assert found(four, order="reward_down") == [1, 2, 4, 3]
    assert found(four, order="reward_up")[-1] == 1
    assert found(four, order="steps_down") == [2, 1, 4, 3]


def test_a_facet_counts_what_the_other_conditions_leave(four: Library) -> None:
    wrong = four.episodes(Filter(outcome="wrong"))
    assert (wrong["total"], wrong["right"]) == (2, 0)
    assert wrong["facets"]["outcome"] == {"wrong": 2, "correct": 1, "out_of_budget": 1}
    assert wrong["facets"]["db_id"] == {"shop": 1, "zoo": 1}
    assert four.episodes(Filter(outcome="wrong", kind="any"))["facets"]["kind"] == {"right_rows": 1, "gave_up": 1}


@given(text=st.text(alphabet=st.sampled_from("ab\"'-* ()^:{}+,.\\\n%_é;"), max_size=25))
def test_no_text_is_an_error(four: Library, text: str) -> None:
    found(four, text=text)


@given(text=st.text(max_size=15))
def test_a_match_is_one_the_index_understands(text: str) -> None:
    if match := match_of(text):
        connection = apsw.Connection(":memory:")
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(text)")
        list(connection.execute("SELECT rowid FROM words WHERE words MATCH ?", (match,)))


def test_what_is_typed_is_a_value(four: Library) -> None:
    for name in ("outcome", "kind", "db_id", "hardness", "question_id"):
        wanted: dict[str, Any] = {name: "' OR 1=1 --"}
        assert found(four, **wanted) == []
