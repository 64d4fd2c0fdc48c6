"""Reading Spider's folder: what is found in which layout, what is refused and how, and the official split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from env_server.data.layout import SPIDER, read_layout
from env_server.dataset import Split
from env_server.errors import DataError
from tests.env_server.data.folders import add_database, write_entries
from tests.env_server.data.folders import spider_entry as entry


def write_questions(folder: Path, entries: list[Any], name: str = "train_spider.json") -> Path:
    return write_entries(folder, entries, name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_database(tmp_path, "database/ranch/ranch.sqlite")
    return tmp_path


def test_questions_keep_their_order_and_get_stable_ids(folder: Path) -> None:
    add_database(folder, "database/city/city.sqlite")
    write_questions(folder, [entry(question=" First? ", hardness=3), entry("city", question="Second?")])
    write_questions(folder, [entry(question="Third?", query="SELECT 1")], "train_others.json")
    raw = read_layout(SPIDER, folder)
    assert raw.name == "spider"
    assert [(q.question_id, q.text, q.db_id) for q in raw.questions] == [
        ("train_spider-0000", "First?", "ranch"),
        ("train_spider-0001", "Second?", "city"),
        ("train_others-0000", "Third?", "ranch"),
    ]
    assert raw.questions[2].sql == "SELECT 1"
    assert dict(raw.databases) == {
        "ranch": folder / "database/ranch/ranch.sqlite",
        "city": folder / "database/city/city.sqlite",
    }
    assert raw.refused == {}


@pytest.mark.parametrize(
    "place",
    [
        "database/ranch/ranch.sqlite",
        "database/ranch/ranch.db",
        "database/ranch.sqlite",
        "databases/ranch/ranch.sqlite",
        "databases/ranch.db",
        "test_database/ranch/ranch.sqlite",
        "database/database/ranch/ranch.sqlite",
        "spider_data/database/ranch/ranch.sqlite",
    ],
)
@pytest.mark.parametrize("questions", [".", "spider", "spider_data/spider_data"])
def test_known_layouts(tmp_path: Path, place: str, questions: str) -> None:
    file = add_database(tmp_path, place)
    (file.parent / "notes.txt").touch()
    write_questions(tmp_path / questions, [entry()])
    raw = read_layout(SPIDER, tmp_path)
    assert dict(raw.databases) == {"ranch": file}
    assert [q.question_id for q in raw.questions] == ["train_spider-0000"]


def test_a_top_folder_of_an_archive_is_read_as_a_whole(tmp_path: Path) -> None:
    add_database(tmp_path, "spider/database/ranch/ranch.sqlite")
    write_questions(tmp_path, [entry()], "spider/train_spider.json")
    write_questions(tmp_path, [entry("d")], "spider/dev.json")
    write_questions(tmp_path, [entry("deeper")], "spider/more/train_others.json")
    assert [q.question_id for q in read_layout(SPIDER, tmp_path).questions] == ["train_spider-0000", "dev-0000"]


def test_dev_json_is_the_official_split(folder: Path) -> None:
    write_questions(folder, [entry(db) for db in ("a", "b", "c", "ranch")])
    write_questions(folder, [entry("d"), entry("ranch")], "dev.json")
    splits = {(q.question_id, q.db_id): q.split for q in read_layout(SPIDER, folder).questions}
    assert splits == {
        ("train_spider-0000", "a"): Split.TRAIN,
        ("train_spider-0001", "b"): Split.TRAIN,
        ("train_spider-0002", "c"): Split.TRAIN,
        ("train_spider-0003", "ranch"): Split.EVAL,  # dev.json names this database, so it is unseen in training
        ("dev-0000", "d"): Split.EVAL,
        ("dev-0001", "ranch"): Split.EVAL,
    }


def test_the_test_release_is_read_where_there_is_no_dev_json(tmp_path: Path) -> None:
    file = add_database(tmp_path, "test_database/ranch/ranch.sqlite")
    write_questions(tmp_path, [entry()], "test.json")
    (tmp_path / "test_tables.json").write_text("no matter what")
    raw = read_layout(SPIDER, tmp_path)
    assert [(q.question_id, q.split) for q in raw.questions] == [("test-0000", Split.EVAL)]
    assert dict(raw.databases) == {"ranch": file}
    write_questions(tmp_path, [entry()], "dev.json")
    assert [q.question_id for q in read_layout(SPIDER, tmp_path).questions] == ["dev-0000"]


def test_without_an_evaluation_file_the_databases_are_split(folder: Path) -> None:
    write_questions(folder, [entry(db_id) for db_id in ("ranch", "city", "shop", "ranch", "city")])
    splits = {(q.db_id, q.split) for q in read_layout(SPIDER, folder).questions}
    assert len(splits) == 3
    assert {split for _, split in splits} == {Split.TRAIN, Split.EVAL}


def test_databases_come_from_the_folder_and_are_those_that_questions_use(folder: Path) -> None:
    """The first of several files counts, and no db_id leads out of the folder."""
    add_database(folder, "database/unused/unused.sqlite")
    add_database(folder, "database/ranch/ranch.db")
    add_database(folder, "test_database/ranch/ranch.sqlite")
    add_database(folder.parent, "outside.sqlite")
    db_ids = ["ranch", "lost", "../../outside", "/etc/passwd"]
    empty = folder / "database" / "empty.sqlite"
    empty.touch()
    write_questions(folder, [entry(db_id) for db_id in [*db_ids, "empty"]])
    raw = read_layout(SPIDER, folder)
    assert [q.db_id for q in raw.questions] == [*db_ids, "empty"], "a question without its database is kept"
    assert dict(raw.databases) == {"ranch": folder / "database/ranch/ranch.sqlite"}
    assert raw.refused == {"empty": f"{empty} is empty (0 bytes). Copy or unpack it again"}


GOOD = '[{"db_id": "ranch", "question": "q", "query": "s"}'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no question file. Put at least one there: train_spider.json, train_others.json, dev.json"),
        ({"dev.json": "[]"}, "no question in "),
        (
            {"dev.json": GOOD + ',\n{"db_id": "ranch", "question": "q"}]'},
            'dev.json, line 2 (question 1): the key "query" is missing',
        ),
        ({"old/dev.json": GOOD + "]", "new/dev.json": GOOD + "]"}, "dev.json lies in more than one folder: "),
        (
            {"dev.json": GOOD + "]", "database/ranch/ranch.sqlite": ""},
            "none of the 1 databases can be used. ",
        ),
        (
            {"dev.json": GOOD.replace("ranch", "city") + "]"},
            "holds none of the 1 databases. Put them there as ",
        ),
    ],
)
def test_what_is_missing_or_broken_is_named(folder: Path, files: dict[str, str], words: str) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    with pytest.raises(DataError) as raised:
        read_layout(SPIDER, folder)
    assert words in str(raised.value)
    assert str(folder) in str(raised.value)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a folder.*train_spider\.json and database/"):
        read_layout(SPIDER, tmp_path / "nowhere")
