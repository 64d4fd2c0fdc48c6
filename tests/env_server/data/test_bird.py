"""Reading BIRD's folder: its layouts, its keys and its split. What all layouts share: `test_spider.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from env_server.data.layout import BIRD, read_layout
from env_server.dataset import Split
from tests.env_server.data.folders import add_database, write_entries


def entry(**changes: Any) -> dict[str, Any]:
    return {"db_id": "pets", "question": "How many?", "SQL": "SELECT count(*) FROM pets", "evidence": ""} | changes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the database `pets` in `dev_databases/`."""
    add_database(tmp_path, "dev_databases/pets/pets.sqlite")
    return tmp_path


def test_the_keys_of_a_question(place: Path) -> None:
    question = entry(question_id=12, evidence=" cats are pets ", difficulty="simple", SQL="SELECT 1")
    write_entries(place, [question, entry(question_id=3, evidence=None)], "dev.json")
    raw = read_layout(BIRD, place)
    assert raw.name == "bird"
    first, second = raw.questions
    assert (first.question_id, first.text, first.sql, first.db_id) == ("dev-0012", "How many?", "SELECT 1", "pets")
    assert (first.evidence, first.family, first.split) == ("cats are pets", "simple", Split.EVAL)
    assert (second.question_id, second.evidence, second.family) == ("dev-0003", "", "")


@pytest.mark.parametrize("numbers", [(5, 5), (None, 3), ("1", "2")])
def test_numbers_that_do_not_tell_questions_apart_are_replaced_by_places(place: Path, numbers: tuple[Any, Any]) -> None:
    write_entries(place, [entry(question_id=number) for number in numbers], "dev.json")
    assert [q.question_id for q in read_layout(BIRD, place).questions] == ["dev-0000", "dev-0001"]


def test_mini_dev_beside_dev_is_not_read_twice(place: Path) -> None:
    write_entries(place, [entry(), entry()], "dev.json")
    write_entries(place, [entry()], "mini_dev_sqlite.json")
    assert [q.question_id for q in read_layout(BIRD, place).questions] == ["dev-0000", "dev-0001"]


@pytest.mark.parametrize(
    ("questions", "database"),
    [
        ("dev.json", "dev_databases/pets/pets.sqlite"),
        ("mini_dev_sqlite.json", "dev_databases/pets/pets.sqlite"),
        ("train.json", "train_databases/pets/pets.sqlite"),
        ("train.json", "databases/pets/pets.sqlite"),
        ("dev_20240627/dev.json", "dev_20240627/dev_databases/dev_databases/pets/pets.sqlite"),
        ("minidev/MINIDEV/mini_dev_sqlite.json", "minidev/MINIDEV/dev_databases/pets/pets.sqlite"),
        ("train/train.json", "train/train_databases/train_databases/pets/pets.sqlite"),
    ],
)
def test_known_layouts(tmp_path: Path, questions: str, database: str) -> None:
    file = add_database(tmp_path, database)
    (file.parent / "database_description").mkdir()
    (file.parent / "database_description" / "pets.csv").touch()
    write_entries(tmp_path, [entry()], questions)
    raw = read_layout(BIRD, tmp_path)
    assert dict(raw.databases) == {"pets": file}
    assert len(raw.questions) == 1


def test_train_and_dev_side_by_side_keep_the_official_split(tmp_path: Path) -> None:
    for part, db_id in (("train", "zoo"), ("dev", "pets")):
        add_database(tmp_path, f"{part}/{part}_databases/{db_id}/{db_id}.sqlite")
        write_entries(tmp_path, [entry(db_id=db_id)], f"{part}/{part}.json")
    raw = read_layout(BIRD, tmp_path)
    assert {q.question_id: q.split for q in raw.questions} == {"train-0000": Split.TRAIN, "dev-0000": Split.EVAL}
    assert set(raw.databases) == {"zoo", "pets"}
