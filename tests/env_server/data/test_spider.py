"""Reading Spider's folder: what is found in which layout, what is refused and how, and the official split."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from env_server.data.database_files import find_databases
from env_server.data.spider import SPIDER, read_spider
from env_server.dataset import Split
from env_server.errors import DataError


def entry(db_id: str = "ranch", **changes: Any) -> dict[str, Any]:
    return {"db_id": db_id, "question": "How many?", "query": "SELECT count(*) FROM t", **changes}


def write_questions(folder: Path, entries: list[Any], name: str = "train_spider.json") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    return file


def add_database(folder: Path, name: str, tables: tuple[str, ...] = ("t",)) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        for table in tables:
            connection.execute(f'CREATE TABLE "{table}" (a)')
    return file


def listed(db_id: str, *tables: str) -> dict[str, Any]:
    return {"db_id": db_id, "table_names_original": list(tables), "column_names_original": [[-1, "*"], [0, "nowhere"]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_database(tmp_path, "database/ranch/ranch.sqlite")
    return tmp_path


def test_questions_keep_their_order_and_get_stable_ids(folder: Path) -> None:
    add_database(folder, "database/city/city.sqlite")
    write_questions(folder, [entry(question=" First? ", hardness=3), entry("city", question="Second?")])
    write_questions(folder, [entry(question="Third?", query="SELECT 1")], "train_others.json")
    raw = read_spider(folder)
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
    raw = read_spider(tmp_path)
    assert dict(raw.databases) == {"ranch": file}
    assert [q.question_id for q in raw.questions] == ["train_spider-0000"]


def test_the_first_of_several_files_counts(tmp_path: Path) -> None:
    first = add_database(tmp_path, "database/ranch/ranch.sqlite")
    add_database(tmp_path, "database/ranch/ranch.db")
    add_database(tmp_path, "test_database/ranch/ranch.sqlite")
    assert find_databases(tmp_path, SPIDER.database_folders) == {"ranch": first}


def test_a_top_folder_of_an_archive_is_read_as_a_whole(tmp_path: Path) -> None:
    add_database(tmp_path, "spider/database/ranch/ranch.sqlite")
    write_questions(tmp_path, [entry()], "spider/train_spider.json")
    write_questions(tmp_path, [entry("d")], "spider/dev.json")
    write_questions(tmp_path, [entry("deeper")], "spider/more/train_others.json")
    assert [q.question_id for q in read_spider(tmp_path).questions] == ["train_spider-0000", "dev-0000"]


def test_two_releases_side_by_side_are_not_mixed(folder: Path) -> None:
    for release in ("old", "new"):
        write_questions(folder, [entry()], f"{release}/train_spider.json")
    with pytest.raises(DataError, match="lies in more than one folder") as raised:
        read_spider(folder)
    assert str(folder / "old") in str(raised.value)


def test_databases_without_questions_are_left_out(folder: Path) -> None:
    add_database(folder, "database/unused/unused.sqlite")
    write_questions(folder, [entry()])
    assert set(read_spider(folder).databases) == {"ranch"}


def test_a_question_without_its_database_is_kept(folder: Path) -> None:
    write_questions(folder, [entry(), entry("lost")])
    raw = read_spider(folder)
    assert [q.db_id for q in raw.questions] == ["ranch", "lost"]
    assert set(raw.databases) == {"ranch"}


def test_a_db_id_cannot_leave_the_folder(folder: Path) -> None:
    add_database(folder.parent, "outside.sqlite")
    write_questions(folder, [entry(), entry("../../outside"), entry("/etc/passwd")])
    assert set(read_spider(folder).databases) == {"ranch"}


def test_dev_json_is_the_official_split(folder: Path) -> None:
    write_questions(folder, [entry(db) for db in ("a", "b", "c", "ranch")])
    write_questions(folder, [entry("d"), entry("ranch")], "dev.json")
    splits = {(q.question_id, q.db_id): q.split for q in read_spider(folder).questions}
    assert splits == {
        ("train_spider-0000", "a"): Split.TRAIN,
        ("train_spider-0001", "b"): Split.TRAIN,
        ("train_spider-0002", "c"): Split.TRAIN,
        ("train_spider-0003", "ranch"): Split.EVAL,  # dev.json names this database, so it is unseen in training
        ("dev-0000", "d"): Split.EVAL,
        ("dev-0001", "ranch"): Split.EVAL,
    }


def test_dev_json_alone_is_enough(folder: Path) -> None:
    write_questions(folder, [entry()], "dev.json")
    assert [q.split for q in read_spider(folder).questions] == [Split.EVAL]


def test_the_test_release_is_read_where_there_is_no_dev_json(tmp_path: Path) -> None:
    file = add_database(tmp_path, "test_database/ranch/ranch.sqlite")
    write_questions(tmp_path, [entry()], "test.json")
    write_questions(tmp_path, [listed("ranch", "t")], "test_tables.json")
    raw = read_spider(tmp_path)
    assert [(q.question_id, q.split) for q in raw.questions] == [("test-0000", Split.EVAL)]
    assert dict(raw.databases) == {"ranch": file}
    write_questions(tmp_path, [entry()], "dev.json")
    assert [q.question_id for q in read_spider(tmp_path).questions] == ["dev-0000"]


def test_without_an_evaluation_file_the_databases_are_split(folder: Path) -> None:
    write_questions(folder, [entry(db_id) for db_id in ("ranch", "city", "shop", "ranch", "city")])
    splits = {(q.db_id, q.split) for q in read_spider(folder).questions}
    assert len(splits) == 3
    assert {split for _, split in splits} == {Split.TRAIN, Split.EVAL}


def test_a_database_that_lacks_a_listed_table_is_refused(folder: Path) -> None:
    add_database(folder, "database/city/city.sqlite", tables=("Streets", "parks"))
    write_questions(folder, [entry(), entry("city")])
    tables = write_questions(folder, [listed("ranch", "T"), listed("city", "streets", "Bus Stops")], "tables.json")
    raw = read_spider(folder)
    assert set(raw.databases) == {"ranch"}
    assert [q.db_id for q in raw.questions] == ["ranch", "city"]
    assert list(raw.refused) == ["city"]
    path = folder / "database/city/city.sqlite"
    assert raw.refused["city"].startswith(f"{path} does not match {tables}: it lacks 'Bus Stops'. Take both from")


def test_a_database_that_is_not_listed_is_taken(folder: Path) -> None:
    write_questions(folder, [entry()])
    write_questions(folder, [listed("city", "streets")], "tables.json")
    assert set(read_spider(folder).databases) == {"ranch"}


def test_no_usable_database_is_an_error_with_the_reason(folder: Path) -> None:
    (folder / "database/ranch/ranch.sqlite").write_bytes(b"")
    write_questions(folder, [entry()])
    with pytest.raises(DataError, match=r"none of the 1 databases can be used.*ranch\.sqlite is empty"):
        read_spider(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[\n{"db_id": "ranch"}]', 'line 2 (database 0): "table_names_original" is null, not a list of names'),
        ('[{"db_id": "ranch", "table_names_original": [3]}]', 'line 1 (database 0): "table_names_original" is a list'),
        ('[{"table_names_original": []}]', 'line 1 (database 0): the key "db_id" is missing'),
        ("[\n{", "line 2, column 2: not JSON"),
    ],
)
def test_a_broken_list_of_tables_is_named_with_the_line(folder: Path, content: str, words: str) -> None:
    write_questions(folder, [entry()])
    (folder / "tables.json").write_text(content)
    with pytest.raises(DataError) as raised:
        read_spider(folder)
    assert str(raised.value).startswith(f"{folder / 'tables.json'}, {words}")


def test_a_broken_question_is_named_with_the_line(folder: Path) -> None:
    file = folder / "dev.json"
    file.write_text('[\n{"db_id": "ranch", "question": "q", "query": "s"},\n{"db_id": "ranch", "question": "q"}]')
    with pytest.raises(DataError) as raised:
        read_spider(folder)
    assert str(raised.value).startswith(f'{file}, line 3 (question 1): the key "query" is missing')


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder") as raised:
        read_spider(tmp_path / "nowhere")
    assert "train_spider.json and database/" in str(raised.value)


def test_a_folder_without_question_files(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no question file.*train_spider\.json, train_others\.json, dev\.json"):
        read_spider(folder)


def test_question_files_without_a_question(folder: Path) -> None:
    write_questions(folder, [])
    with pytest.raises(DataError, match="no question in"):
        read_spider(folder)


def test_a_folder_without_databases_says_where_they_belong(tmp_path: Path) -> None:
    write_questions(tmp_path, [entry(), entry("city")])
    with pytest.raises(DataError, match="none of the 2 databases") as raised:
        read_spider(tmp_path)
    assert str(tmp_path / "database" / "city" / "city.sqlite") in str(raised.value)


def test_the_real_folder(spider_dir: Path) -> None:
    raw = read_spider(spider_dir)
    assert len(raw.questions) == 2274
    assert len(raw.databases) == 46
    assert raw.refused == {}
    by_split = {split: {q.db_id for q in raw.questions if q.split is split} for split in (Split.TRAIN, Split.EVAL)}
    assert not by_split[Split.TRAIN] & by_split[Split.EVAL]
    assert (len(by_split[Split.TRAIN]), len(by_split[Split.EVAL])) == (35, 11)
