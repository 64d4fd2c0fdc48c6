"""The text of `sqlenv data inspect`: counts that add up, every reason, samples, one database."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from env_server.data.cli.inspection import MAX_LISTED, evenly, inspect_text
from env_server.dataset import Dataset, Exclusion, ExclusionReason, Gold, Hardness, Question, Split
from env_server.errors import DataError


def printed(renderable: RenderableType) -> str:
    console = Console(file=StringIO(), width=200, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def row(text: str, name: str) -> list[str]:
    """Return the cells after the name in the one table row that begins with it."""
    (line,) = (line.split() for line in text.splitlines() if line.split()[:1] == [name] and len(line.split()) > 1)
    return line[1:]


@pytest.fixture
def dataset(pets: Dataset) -> Dataset:
    hard = replace(pets.questions[0], question_id="hard", hardness=Hardness.HARD, family="")
    excluded = (
        Exclusion("lost-1", "pets", "Who?", ExclusionReason.GOLD_EMPTY, "no row"),
        Exclusion("lost-2", "pets", "Where?", ExclusionReason.GOLD_FAILS, "no such table: [people]"),
        Exclusion("lost-3", "zoo", "When?", ExclusionReason.GOLD_EMPTY, "no row"),
    )
    return replace(pets, questions=(*pets.questions, hard), excluded=excluded)


def test_the_overview(dataset: Dataset) -> None:
    text = printed(inspect_text(dataset))
    assert "pets: 5 usable questions, 1 database, 3 questions left out" in text
    assert row(text, "train") == ["1", "3", "0", "1", "0", "4"]
    assert row(text, "eval") == ["1", "1", "0", "0", "0", "1"]
    assert row(text, "test") == ["1", "4", "0", "0", "0", "4"]
    assert row(text, "(none)") == ["1", "0", "0", "1", "0", "1"]
    assert row(text, "gold_empty")[:3] == ["2", "lost-1,", "pets:"]
    assert row(text, "gold_fails")[:3] == ["1", "lost-2,", "pets:"]
    assert "no such table: [people]" in text
    assert row(text, "pets") == ["5", "2", "9", "8", "train", "and", "eval"]
    assert "more" not in text
    assert "among them" not in text


def test_the_overview_shows_only_what_there_is(pets: Dataset) -> None:
    first, second, *_ = (replace(question, family="") for question in pets.questions)
    copy = replace(second, duplicate_of=first.question_id, gold=Gold(((0.0,),), ordered=False))
    text = printed(inspect_text(replace(pets, questions=(first, copy))))
    assert "among them 1 duplicate (the SQL of an earlier question, up to formatting), 1 question with the" in text
    assert row(text, "pets")[4:] == ["train"]
    assert "family" not in text
    assert "left out: nothing" in text


def test_many_databases_are_cut_and_counted(pets: Dataset) -> None:
    names = [f"copy{i:03d}" for i in range(MAX_LISTED + 7)]
    questions = tuple(replace(pets.questions[0], question_id=name, db_id=name) for name in names)
    many = Dataset("many", questions, dict.fromkeys(names, pets.databases["pets"]))
    text = printed(inspect_text(many, samples=0))
    assert names[MAX_LISTED - 1] in text
    assert names[MAX_LISTED] not in text
    assert "... and 7 more" in text


def test_samples_show_the_gold_and_are_not_taken_for_markup(pets: Dataset) -> None:
    odd = Question(
        question_id="odd",
        text="Is [bold]this[/] shown?",
        db_id="pets",
        gold_sql="SELECT '[red]',\n  NULL",
        hardness=Hardness.EASY,
        split=Split.TRAIN,
        gold=Gold((("[red]", None), ("x", 1)), ordered=False),
        evidence="[/nothing]",
    )
    lines = printed(inspect_text(replace(pets, questions=(odd,)))).splitlines()
    shown = [line.strip() for line in lines[-7:]]
    assert shown[0] == "odd (train, easy, pets)"
    assert [re.sub(" {2,}", "  ", line) for line in shown[1:6]] == [
        "question  Is [bold]this[/] shown?",
        "hint  [/nothing]",
        "gold SQL  SELECT '[red]', NULL",
        "gold  [red] | NULL",
        "x | 1",
    ]


def test_one_database_shows_its_columns_and_what_was_left_out(dataset: Dataset) -> None:
    text = printed(inspect_text(dataset, db_id="pets", samples=1))
    assert "pets, database pets: 5 usable questions, 1 database, 2 questions left out" in text
    assert str(dataset.databases["pets"]) in text.replace("\n", "")
    assert "owner_id INTEGER references owners(owner_id)" in text
    assert "lost-1: gold_empty (no row)" in text
    assert "lost-2: gold_fails (no such table: [people])" in text
    assert "lost-3" not in text
    assert text.count("gold SQL") == 1


def test_an_unknown_database_names_the_nearest(dataset: Dataset) -> None:
    with pytest.raises(DataError, match=r"no database 'pet'; it has 1, such as \['pets'\]"):
        inspect_text(dataset, db_id="pet")
    with pytest.raises(DataError, match="'zoo' has no usable question: all 1 were left out"):
        inspect_text(dataset, db_id="zoo")


@given(st.integers(0, 60), st.integers(0, 12))
def test_samples_are_evenly_spread(size: int, count: int) -> None:
    questions = [Question(str(i), "?", "d", "", Hardness.EASY, Split.TRAIN, Gold((), False)) for i in range(size)]
    places = [int(question.question_id) for question in evenly(questions, count)]
    assert len(places) == min(size, count)
    assert places[:1] == [0][: len(places)]
    gaps = {later - earlier for earlier, later in zip(places, [*places[1:], size], strict=True)} if places else set()
    assert max(gaps, default=1) - min(gaps, default=1) <= 1
    assert min(gaps, default=1) >= 1
