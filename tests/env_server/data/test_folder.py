"""A folder of one's own: databases, tables and questions; what is wrong with one; and the how-to page, as written."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from env_server.data.folder import read_folder
from env_server.data.loading import load_dataset
from env_server.data.raw import RawDataset
from env_server.dataset import Split
from env_server.errors import DataError

PAGE = Path(__file__).parents[3] / "docs" / "own-data.md"


def question(**changes: Any) -> dict[str, Any]:
    return {"question": "How many?", "sql": "SELECT count(*) FROM t"} | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "my shop"
    place.mkdir()
    return place


def add_database(folder: Path, name: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t (a)")
    return file


def add_table(folder: Path, name: str, text: str = "a,b\n1,2\n") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def ask(folder: Path, *questions: Mapping[str, Any], name: str = "questions.json") -> Path:
    file = folder / name
    file.write_text(json.dumps(questions, indent=1), encoding="utf-8")
    return file


def read(folder: Path) -> RawDataset:
    return read_folder(folder, folder.parent / "cache")


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read(folder)
    return str(raised.value)


def test_sqlite_files_are_databases_called_like_them(folder: Path) -> None:
    files = {name: add_database(folder, name + suffix) for name, suffix in (("a.b", ".sqlite"), ("c", ".DB"))}
    files["d"] = add_database(folder, "inner/d.sqlite3")
    ask(folder, *(question(database=name) for name in files))
    raw = read(folder)
    assert raw.name == "my shop"
    assert dict(raw.databases) == files
    assert [q.db_id for q in raw.questions] == ["a.b", "c", "d"]


def test_tables_of_one_folder_are_one_database(folder: Path) -> None:
    add_table(folder, "orders.csv")
    add_table(folder, "items.tsv", "a\tb\n1\t2\n")
    add_table(folder, "north/orders.csv", "x;y\n1;2\n")
    ask(folder, question(database="my shop"), question(database="north"))
    raw = read(folder)
    tables = {}
    for db_id, path in raw.databases.items():
        assert folder.parent / "cache" in path.parents
        with closing(sqlite3.connect(path)) as connection:
            tables[db_id] = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert tables == {"my shop": {"orders", "items"}, "north": {"orders"}}


def test_only_databases_that_are_asked_about_are_imported(folder: Path) -> None:
    add_table(folder, "north/orders.csv", "a,b\n1\n")  # broken, and nobody asks
    add_database(folder, "shop.sqlite")
    ask(folder, question(database="shop"))
    assert set(read(folder).databases) == {"shop"}


def test_the_only_database_needs_no_name(folder: Path) -> None:
    file = add_database(folder, "shop.sqlite")
    (folder / "Thumbs.db").write_bytes(b"not a database")
    (folder / ".hidden.sqlite").touch()
    ask(folder, question(), question(database=None), question(database="shop"))
    raw = read(folder)
    assert [q.db_id for q in raw.questions] == ["shop"] * 3
    assert dict(raw.databases) == {"shop": file}


def test_the_keys_of_a_question(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    ask(
        folder, question(question=" Why? ", evidence=" so ", id="first", note=1), question(id=7), question(), question()
    )
    first, second, third, _ = read(folder).questions
    assert (first.question_id, first.text, first.evidence) == ("first", "Why?", "so")
    assert (second.question_id, second.evidence) == ("7", "")
    assert third.question_id == "questions-0002"


@pytest.mark.parametrize("name", ["questions.json", "questions.jsonl", "Questions.JSON", "my questions.json"])
def test_the_question_file(folder: Path, name: str) -> None:
    add_database(folder, "shop.sqlite")
    ask(folder, question(), name=name)
    (folder / ".settings.json").write_text("{}")
    assert len(read(folder).questions) == 1


def test_among_several_json_files_it_is_the_one_called_questions(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    ask(folder, question(), name="package.json")
    ask(folder, question(), name="notes.json")
    assert "holds 2 JSON files (notes.json, package.json). Call the one with the questions questions.jsonl" in refusal(
        folder
    )
    ask(folder, question(), question(), name="questions.json")
    assert len(read(folder).questions) == 2
    ask(folder, question(), name="questions.jsonl")
    assert "holds 4 JSON files" in refusal(folder)


def test_a_stated_split_is_taken(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    ask(folder, question(split="eval"), question(split="train"), question(split="train"))
    assert [q.split for q in read(folder).questions] == [Split.EVAL, Split.TRAIN, Split.TRAIN]


def test_several_databases_are_split_by_database(folder: Path) -> None:
    names = [f"db{i}" for i in range(6)]
    for name in names:
        add_database(folder, f"{name}.sqlite")
    ask(folder, *(question(database=name, sql=f"SELECT {i}") for name in names for i in range(4)))
    raw = read(folder)
    assert {q.split for q in raw.questions} == {Split.TRAIN, Split.EVAL}
    assert len({(q.db_id, q.split) for q in raw.questions}) == len(names)


def test_the_questions_about_a_single_database_are_split(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    add_database(folder, "unused.sqlite")
    ask(folder, *(question(database="shop", sql=f"SELECT {i} + {i}") for i in range(20) for _ in range(2)))
    questions = read(folder).questions
    assert [q.split for q in questions].count(Split.EVAL) == 10
    assert len({(q.sql, q.split) for q in questions}) == 20


@pytest.mark.parametrize("count", [1, 2])
def test_one_query_alone_is_for_training(folder: Path, count: int) -> None:
    add_database(folder, "shop.sqlite")
    ask(folder, *[question()] * count)
    assert {q.split for q in read(folder).questions} == {Split.TRAIN}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"question": "How many?"}, 'the key "sql" is missing (it has question)'),
        (question(sql=" "), '"sql" is blank'),
        (question(question=3), '"question" is a number, not a string'),
        (question(evidence=["x"]), '"evidence" is a list, not a string'),
        (question(database="sohp"), "there is no database 'sohp'. Did you mean 'shop'?"),
        (question(database="warehouse"), "there is no database 'warehouse'. Name one of crm, shop"),
        (question(), 'the key "database" is missing, and there are 2. Name one of crm, shop'),
        (question(database="empty"), "database 'empty' cannot be used. "),
        (question(database="shop", split="test"), '"split" is \'test\'. Make it "train" or "eval"'),
        (question(database="shop", id=[1]), '"id" is a list. Make it a string or a whole number'),
        (question(database="shop", id=True), '"id" is a boolean'),
        (question(database="shop", id="questions-0000"), "is also that of the question on line 2"),
        ({"question": "?", "query": "SELECT 1", "db_id": "shop"}, "Load it as spider:PATH"),
        ({"question": "?", "SQL": "SELECT 1", "db_id": "shop"}, "Load it as bird:PATH"),
    ],
)
def test_a_wrong_question_is_named_with_its_line(folder: Path, wrong: dict[str, Any], words: str) -> None:
    add_database(folder, "shop.sqlite")
    add_database(folder, "crm.sqlite")
    (folder / "empty.sqlite").touch()
    file = ask(folder, question(database="shop"), wrong)
    text = refusal(folder)
    assert text.startswith(f"{file}, line 7 (question 1): ")
    assert words in text


def test_a_split_is_stated_by_every_question_or_none(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    file = ask(folder, question(split="eval"), question(), question(split="train"))
    assert refusal(folder).startswith(f'{file}, line 7 (question 1): the key "split" is missing, though other')


def test_a_database_that_cannot_be_used_is_named_with_the_reason(folder: Path) -> None:
    file = folder / "shop.db"
    file.write_bytes(b"encrypted?" * 100)
    ask(folder, question())
    assert refusal(folder).startswith(f"{file} is not a SQLite database, or it is encrypted")


def test_two_databases_with_one_name(folder: Path) -> None:
    add_database(folder, "orders.sqlite")
    add_table(folder, "orders/lines.csv")
    ask(folder, question(database="orders"))
    assert "two databases are called 'orders'" in refusal(folder)


def test_two_files_that_would_be_one_table(folder: Path) -> None:
    add_table(folder, "orders.csv")
    add_table(folder, "Orders.tsv", "a\n1\n")
    ask(folder, question())
    assert "would be the same table" in refusal(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode there")
def test_a_name_that_is_no_text(folder: Path) -> None:
    add_database(folder, os.fsdecode(b"caf\xe9.sqlite"))
    ask(folder, question())
    assert "the name is not Unicode. Rename it" in refusal(folder)


def test_a_folder_without_databases(folder: Path) -> None:
    ask(folder, question())
    (folder / "orders.xlsx").touch()
    text = refusal(folder)
    assert text.startswith(f"{folder} holds no database. Put SQLite files (.sqlite, .db, .sqlite3) or tables (.csv, ")


def test_a_folder_without_questions(folder: Path) -> None:
    add_database(folder, "shop.sqlite")
    assert "holds no questions. Write questions.jsonl with lines like" in refusal(folder)
    (folder / "questions.jsonl").write_text("\n")
    assert "questions.jsonl holds no question. Add some" in refusal(folder)


@pytest.mark.parametrize(
    ("questions", "databases", "benchmark"),
    [("train_spider.json", "database", "spider"), ("mini_dev_sqlite.json", "dev_databases", "bird")],
)
def test_a_release_of_a_benchmark_is_recognised(folder: Path, questions: str, databases: str, benchmark: str) -> None:
    add_database(folder, f"{databases}/ranch/ranch.sqlite")
    ask(folder, question(), name=questions)
    assert f"Load it as {benchmark}:{folder}" in refusal(folder)


@pytest.mark.parametrize("spelling", [".", "../my shop", "inner/.."])
def test_the_name_does_not_depend_on_how_the_folder_is_written(
    folder: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_database(folder, "inner/shop.sqlite")
    ask(folder, question())
    monkeypatch.chdir(folder)
    assert read_folder(Path(spelling), folder.parent / "cache").name == "my shop"


def test_a_link_to_a_folder_has_the_name_of_the_link(folder: Path) -> None:
    add_table(folder, "t.csv")
    ask(folder, question())
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert list(read(link).databases) == ["link"]


def test_a_path_that_is_no_folder(folder: Path) -> None:
    file = ask(folder, question())
    assert refusal(file) == f"{file} is a file. Give the folder that holds it"
    assert refusal(folder / "nowhere") == f"{folder / 'nowhere'} is not a folder"


def page_files() -> dict[str, str]:
    """The files that the how-to page shows: a code block after a line that begins with the file's name."""
    found = re.findall(r"^`([\w./-]+)`[^\n]*\n\n```\w+\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return dict(found)


def test_the_how_to_page_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = page_files()
    assert set(files) == {"my-shop/customers.csv", "my-shop/orders.csv", "my-shop/questions.jsonl"}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    dataset = load_dataset("my-shop", cache_dir=tmp_path / "cache")
    assert (dataset.name, list(dataset.databases), dataset.excluded) == ("my-shop", ["my-shop"], ())
    assert (len(dataset.select(Split.TRAIN)), len(dataset.select(Split.EVAL))) == (8, 2)
    golds = {question.text: question.gold.rows for question in dataset.questions}
    assert golds["How many orders are open?"] == ((2,),)
    assert golds["Who has never ordered anything?"] == (("Dee",),)
    assert golds["What is the total amount of all orders?"] == ((658.5,),)


def test_the_how_to_page_names_data_sets_that_exist() -> None:
    """Every command on the page is about the folder that the page makes."""
    commands = re.findall(r"^sqlenv .*$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(commands) == 3
    assert all("my-shop" in command for command in commands)
    configs = re.findall(r"--config (\S+)", " ".join(commands))
    assert configs
    assert all((PAGE.parents[1] / config).is_file() for config in configs)
