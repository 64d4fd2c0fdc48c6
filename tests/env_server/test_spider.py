"""Reading Spider's layout: what is found, what is refused and how, and the split by database."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.questions import Split
from env_server.data.spider import find_databases, read_spider, split_databases
from env_server.errors import DataError


def entry(db_id: str = "farm", **changes: Any) -> dict[str, Any]:
    return {"db_id": db_id, "question": "How many?", "query": "SELECT count(*) FROM t", **changes}


def write_questions(folder: Path, entries: list[Any], name: str = "train_spider.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    return file


def add_database(folder: Path, name: str) -> Path:
    """Put an empty file where a database belongs: the reader never opens it."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_database(tmp_path, "database/farm/farm.sqlite")
    return tmp_path


def test_questions_keep_their_order_and_get_stable_ids(folder: Path) -> None:
    add_database(folder, "database/city/city.sqlite")
    write_questions(folder, [entry(question=" First? ", hardness=3), entry("city", question="Second?")])
    write_questions(folder, [entry(question="Third?", query="SELECT 1")], "train_others.json")
    raw = read_spider(folder)
    assert raw.name == "spider"
    assert [(q.question_id, q.text, q.db_id) for q in raw.questions] == [
        ("train_spider-0000", "First?", "farm"),
        ("train_spider-0001", "Second?", "city"),
        ("train_others-0000", "Third?", "farm"),
    ]
    assert raw.questions[2].sql == "SELECT 1"
    assert dict(raw.databases) == {
        "farm": folder / "database/farm/farm.sqlite",
        "city": folder / "database/city/city.sqlite",
    }


@pytest.mark.parametrize(
    "place",
    [
        "database/farm/farm.sqlite",
        "database/farm/farm.db",
        "database/farm.sqlite",
        "databases/farm/farm.sqlite",
        "databases/farm.db",
        "test_database/farm/farm.sqlite",
    ],
)
def test_known_layouts(tmp_path: Path, place: str) -> None:
    file = add_database(tmp_path, place)
    add_database(tmp_path, "database/other/notes.txt")
    assert find_databases(tmp_path) == {"farm": file}


def test_the_first_of_several_files_counts(tmp_path: Path) -> None:
    first = add_database(tmp_path, "database/farm/farm.sqlite")
    add_database(tmp_path, "database/farm/farm.db")
    add_database(tmp_path, "test_database/farm/farm.sqlite")
    assert find_databases(tmp_path) == {"farm": first}


def test_databases_without_questions_are_left_out(folder: Path) -> None:
    add_database(folder, "database/unused/unused.sqlite")
    write_questions(folder, [entry()])
    assert set(read_spider(folder).databases) == {"farm"}


def test_a_question_without_its_database_is_kept(folder: Path) -> None:
    write_questions(folder, [entry(), entry("lost")])
    raw = read_spider(folder)
    assert [q.db_id for q in raw.questions] == ["farm", "lost"]
    assert set(raw.databases) == {"farm"}


def test_a_db_id_cannot_leave_the_folder(folder: Path) -> None:
    add_database(folder.parent, "outside.sqlite")
    write_questions(folder, [entry(), entry("../../outside"), entry("/etc/passwd")])
    assert set(read_spider(folder).databases) == {"farm"}


def test_dev_json_is_the_official_split(folder: Path) -> None:
    write_questions(folder, [entry(db) for db in ("a", "b", "c", "farm")])
    write_questions(folder, [entry("d"), entry("farm")], "dev.json")
    splits = {(q.question_id, q.db_id): q.split for q in read_spider(folder).questions}
    assert splits == {
        ("train_spider-0000", "a"): Split.TRAIN,
        ("train_spider-0001", "b"): Split.TRAIN,
        ("train_spider-0002", "c"): Split.TRAIN,
        ("train_spider-0003", "farm"): Split.EVAL,  # dev.json names this database, so it is unseen in training
        ("dev-0000", "d"): Split.EVAL,
        ("dev-0001", "farm"): Split.EVAL,
    }


def test_dev_json_alone_is_enough(folder: Path) -> None:
    write_questions(folder, [entry()], "dev.json")
    assert [q.split for q in read_spider(folder).questions] == [Split.EVAL]


def test_byte_order_mark_and_other_letters(folder: Path) -> None:
    text = json.dumps([entry(question="Où est “Zürich”?")], ensure_ascii=False)
    (folder / "train_spider.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_spider(folder).questions[0].text == "Où est “Zürich”?"


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b'[\n {"db_id": "farm",\n  "question": }\n]', 3, "not JSON"),
        (b"", 1, "not JSON"),
        (b'{"db_id": "farm"}', 1, "holds an object, not a list"),
        (b"3", 1, "holds a number, not a list"),
        (b'[\n\n {"db_id": "farm", "question": "q", "query": "s"},\n\n {"db_id": "farm"}]', 5, '"question" is missing'),
        (b'[\n{"db_id": "farm", "question": "q", "query": "s"}\n,\n7]', 4, "(question 1): is a number, not an object"),
        (b'[{"db_id": "farm", "question": "q", "query": null}]', 1, '"query" is null, not a string'),
        (b'[{"db_id": "farm", "question": true, "query": "s"}]', 1, '"question" is a boolean'),
        (b'[{"db_id": ["farm"], "question": "q", "query": "s"}]', 1, '"db_id" is a list'),
        (b'[{"db_id": "farm", "question": " \\n", "query": "s"}]', 1, '"question" is blank'),
        (b'[{"db_id": "\\ud800", "question": "q", "query": "s"}]', 1, '"db_id" holds half of a surrogate pair'),
        (b'[\n{"db_id": "farm", "question": "caf\xe9", "query": "s"}]', 2, "not UTF-8 (byte 0xe9"),
    ],
)
def test_a_broken_file_is_named_with_the_line(folder: Path, content: bytes, line: int, words: str) -> None:
    file = folder / "train_spider.json"
    file.write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_spider(folder)
    assert f"{file}, line {line}" in str(raised.value)
    assert words in str(raised.value)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder") as raised:
        read_spider(tmp_path / "nowhere")
    assert "train_spider.json" in str(raised.value)


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
    assert str(tmp_path / "database" / "farm" / "farm.sqlite") in str(raised.value)


@given(st.sets(st.text(min_size=1, max_size=12), max_size=40))
def test_split_covers_both_sides_and_does_not_depend_on_order(db_ids: set[str]) -> None:
    splits = split_databases(sorted(db_ids))
    assert splits == split_databases(sorted(db_ids, reverse=True))
    assert set(splits) == db_ids
    assert set(splits.values()) <= {Split.TRAIN, Split.EVAL}
    if len(db_ids) > 1:
        assert set(splits.values()) == {Split.TRAIN, Split.EVAL}


def test_split_has_about_the_asked_share_and_is_stable() -> None:
    db_ids = [f"database_{i}" for i in range(1000)]
    splits = split_databases(db_ids)
    assert 200 <= sum(split is Split.EVAL for split in splits.values()) <= 300
    fewer = split_databases(db_ids[::3])
    assert all(splits[db_id] is split for db_id, split in fewer.items())


def test_the_real_folder(spider_dir: Path) -> None:
    raw = read_spider(spider_dir)
    assert len(raw.questions) == 2274
    assert len(raw.databases) == 46
    by_split = {split: {q.db_id for q in raw.questions if q.split is split} for split in (Split.TRAIN, Split.EVAL)}
    assert not by_split[Split.TRAIN] & by_split[Split.EVAL]
    assert (len(by_split[Split.TRAIN]), len(by_split[Split.EVAL])) == (35, 11)
