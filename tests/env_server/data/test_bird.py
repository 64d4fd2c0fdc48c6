"""Reading BIRD's folder: its layouts, its keys, its split, and that the agent sees the evidence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from env_server.data.bird import read_bird
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from env_server.environment import SQLEnvironment
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool


def entry(**changes: Any) -> dict[str, Any]:
    return {"db_id": "pets", "question": "How many?", "SQL": "SELECT count(*) FROM pets", "evidence": ""} | changes


def write(file: Path, entries: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=4), encoding="utf-8")
    return file


@pytest.fixture
def place(tmp_path: Path, pets_file: Path) -> Path:
    """A folder with the database `pets` in `dev_databases/`."""
    (tmp_path / "dev_databases" / "pets").mkdir(parents=True)
    shutil.copy(pets_file, tmp_path / "dev_databases" / "pets" / "pets.sqlite")
    return tmp_path


def test_the_keys_of_a_question(place: Path) -> None:
    question = entry(question_id=12, evidence=" cats are pets ", difficulty="simple", SQL="SELECT 1")
    write(place / "dev.json", [question, entry(question_id=3, evidence=None)])
    raw = read_bird(place)
    assert raw.name == "bird"
    first, second = raw.questions
    assert (first.question_id, first.text, first.sql, first.db_id) == ("dev-0012", "How many?", "SELECT 1", "pets")
    assert (first.evidence, first.family, first.split) == ("cats are pets", "simple", Split.EVAL)
    assert (second.question_id, second.evidence, second.family) == ("dev-0003", "", "")


@pytest.mark.parametrize("numbers", [(5, 5), (None, 3), ("1", "2")])
def test_numbers_that_do_not_tell_questions_apart_are_replaced_by_places(place: Path, numbers: tuple[Any, Any]) -> None:
    write(place / "dev.json", [entry(question_id=number) for number in numbers])
    assert [q.question_id for q in read_bird(place).questions] == ["dev-0000", "dev-0001"]


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
def test_known_layouts(tmp_path: Path, pets_file: Path, questions: str, database: str) -> None:
    file = tmp_path / database
    file.parent.mkdir(parents=True)
    shutil.copy(pets_file, file)
    (file.parent / "database_description").mkdir()
    (file.parent / "database_description" / "pets.csv").touch()
    write(tmp_path / questions, [entry()])
    raw = read_bird(tmp_path)
    assert dict(raw.databases) == {"pets": file}
    assert len(raw.questions) == 1


def test_train_and_dev_side_by_side_keep_the_official_split(tmp_path: Path, pets_file: Path) -> None:
    for part, db_id in (("train", "zoo"), ("dev", "pets")):
        file = tmp_path / part / f"{part}_databases" / db_id / f"{db_id}.sqlite"
        file.parent.mkdir(parents=True)
        shutil.copy(pets_file, file)
        write(tmp_path / part / f"{part}.json", [entry(db_id=db_id)])
    raw = read_bird(tmp_path)
    assert [(q.question_id, q.split) for q in raw.questions] == [
        ("train-0000", Split.TRAIN),
        ("dev-0000", Split.EVAL),
    ]
    assert set(raw.databases) == {"zoo", "pets"}


def test_mini_dev_beside_dev_is_not_read_twice(place: Path) -> None:
    write(place / "dev.json", [entry(), entry()])
    write(place / "mini_dev_sqlite.json", [entry()])
    assert [q.question_id for q in read_bird(place).questions] == ["dev-0000", "dev-0001"]


def test_a_list_of_tables_that_does_not_match_is_told(place: Path, pets_file: Path) -> None:
    shutil.copytree(place / "dev_databases" / "pets", place / "dev_databases" / "zoo")
    (place / "dev_databases/zoo/pets.sqlite").rename(place / "dev_databases/zoo/zoo.sqlite")
    write(place / "dev.json", [entry(), entry(db_id="zoo")])
    write(place / "dev_tables.json", [{"db_id": "zoo", "table_names_original": ["pets", "cages", "keepers"]}])
    dataset = load_dataset(f"bird:{place}")
    (excluded,) = dataset.excluded
    assert (excluded.question_id, excluded.db_id, excluded.reason.value) == ("dev-0001", "zoo", "no_database")
    assert "dev_tables.json: it lacks 'cages', 'keepers'" in excluded.detail


def test_a_missing_key_is_named_with_the_line(place: Path) -> None:
    file = write(place / "dev.json", [{"db_id": "pets", "question": "How many?", "query": "SELECT 1"}])
    with pytest.raises(DataError) as raised:
        read_bird(place)
    assert str(raised.value).startswith(f'{file}, line 2 (question 0): the key "SQL" is missing')


def test_a_folder_without_anything_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.json, dev\.json, mini_dev_sqlite\.json"):
        read_bird(tmp_path)


def test_the_agent_sees_the_evidence(place: Path) -> None:
    write(place / "dev.json", [entry(evidence="a pet is a row of pets")])
    dataset = load_dataset(f"bird:{place}")
    pool = DatabasePool(dataset.databases, EnvSettings().sandbox)
    try:
        observation = SQLEnvironment(dataset, pool).reset(seed=0)
    finally:
        pool.close()
    assert observation.question == "How many?\nHint: a pet is a row of pets"
