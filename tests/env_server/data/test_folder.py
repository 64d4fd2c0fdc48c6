"""A folder of one's own: databases, tables and questions; what is wrong with one; and the how-to page, as written."""

from __future__ import annotations

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
from tests.env_server.data.folders import add_database, write_entries

DOCS = Path(__file__).parents[3] / "docs"


def question(**changes: Any) -> dict[str, Any]:
    return {"question": "How many?", "sql": "SELECT count(*) FROM t"} | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    place = tmp_path / "my shop"
    place.mkdir()
    return place


@pytest.fixture
def shop(folder: Path) -> Path:
    """A folder with one database and no questions."""
    add_database(folder, "shop.sqlite")
    return folder


def ask(folder: Path, *questions: Mapping[str, Any], name: str = "questions.json") -> Path:
    return write_entries(folder, questions, name)


def add_table(folder: Path, name: str, text: str = "a,b\n1,2\n") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def read(folder: Path) -> RawDataset:
    return read_folder(folder, folder.parent / "cache")


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        read(folder)
    return str(raised.value)


def test_every_database_and_every_folder_of_tables_has_its_name(folder: Path) -> None:
    files = {name: add_database(folder, name + suffix) for name, suffix in (("a.b", ".sqlite"), ("c", ".DB"))}
    files["d"] = add_database(folder, "inner/d.sqlite3")
    add_table(folder, "orders.csv")
    add_table(folder, "items.tsv", "a\tb\n1\t2\n")
    add_table(folder, "north/orders.csv", "x;y\n1;2\n")
    add_table(folder, "south/orders.csv", "a,b\n1\n")  # broken, and nobody asks
    ask(folder, *(question(database=name) for name in [*files, "my shop", "north"]))
    raw = read(folder)
    assert raw.name == "my shop"
    assert [q.db_id for q in raw.questions] == [*files, "my shop", "north"]
    tables = {}
    for db_id, path in raw.databases.items():
        if db_id not in files:
            assert folder.parent / "cache" in path.parents
            with closing(sqlite3.connect(path)) as connection:
                tables[db_id] = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert tables == {"my shop": {"orders", "items"}, "north": {"orders"}}
    assert {name: raw.databases[name] for name in files} == files


def test_the_keys_of_a_question(shop: Path) -> None:
    """The only database needs no name."""
    (shop / "Thumbs.db").write_bytes(b"not a database")
    (shop / ".hidden.sqlite").touch()
    first = question(question=" Why? ", evidence=" so ", id="first", note=1, database="shop")
    ask(shop, first, question(id=7, database=None), question(), question())
    raw = read(shop)
    assert [(q.question_id, q.text, q.evidence) for q in raw.questions][:3] == [
        ("first", "Why?", "so"),
        ("7", "How many?", ""),
        ("questions-0002", "How many?", ""),
    ]
    assert dict(raw.databases) == {"shop": shop / "shop.sqlite"}


@pytest.mark.parametrize("name", ["questions.jsonl", "Questions.JSON", "my questions.json"])
def test_the_question_file(shop: Path, name: str) -> None:
    ask(shop, question(), name=name)
    (shop / ".settings.json").write_text("{}")
    assert len(read(shop).questions) == 1


T, E = Split.TRAIN, Split.EVAL


@pytest.mark.parametrize(
    ("questions", "splits"),
    [
        ([question(split="eval"), question(split="train"), question(split="train")], [E, T, T]),
        ([question()], [T]),
        ([question(), question()], [T, T]),
    ],
    ids=["stated", "alone", "one query"],
)
def test_the_split(shop: Path, questions: list[dict[str, Any]], splits: list[Split]) -> None:
    ask(shop, *questions)
    assert [q.split for q in read(shop).questions] == splits


def test_several_databases_are_split_by_database_and_a_single_one_by_query(folder: Path) -> None:
    names = [f"db{i}" for i in range(6)]
    for name in names:
        add_database(folder, f"{name}.sqlite")
    ask(folder, *(question(database=name, sql=f"SELECT {i}") for name in names for i in range(4)))
    raw = read(folder)
    assert {q.split for q in raw.questions} == {T, E}
    assert len({(q.db_id, q.split) for q in raw.questions}) == len(names)
    ask(folder, *(question(database="db0", sql=f"SELECT {i} + {i}") for i in range(20) for _ in range(2)))
    questions = read(folder).questions
    assert [q.split for q in questions].count(E) == 10
    assert len({(q.sql, q.split) for q in questions}) == 20


def test_among_several_json_files_it_is_the_one_called_questions(shop: Path) -> None:
    ask(shop, question(), name="package.json")
    ask(shop, question(), name="notes.json")
    assert "holds 2 JSON files (notes.json, package.json). Call the one with the questions questions.jsonl" in refusal(
        shop
    )
    ask(shop, question(), question(), name="questions.json")
    assert len(read(shop).questions) == 2
    ask(shop, question(), name="questions.jsonl")
    assert "holds 4 JSON files" in refusal(shop)


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


def test_a_split_is_stated_by_every_question_or_none(shop: Path) -> None:
    file = ask(shop, question(split="eval"), question(), question(split="train"))
    assert refusal(shop).startswith(f'{file}, line 7 (question 1): the key "split" is missing, though other')


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["orders.sqlite", "orders/lines.csv"], "two databases are called 'orders'"),
        (["orders.csv", "Orders.tsv"], "would be the same table"),
        (["broken.db"], "broken.db is not a SQLite database, or it is encrypted"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, files: list[str], words: str) -> None:
    for name in files:
        if name.endswith(".sqlite"):
            add_database(folder, name)
        else:
            add_table(folder, name)
    ask(folder, question())
    assert words in refusal(folder)


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


def test_a_folder_without_questions(shop: Path) -> None:
    assert "holds no questions. Write questions.jsonl with lines like" in refusal(shop)
    (shop / "questions.jsonl").write_text("\n")
    assert "questions.jsonl holds no question. Add some" in refusal(shop)


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
    add_table(folder, "inner/t.csv")
    add_table(folder, "t.csv")
    ask(folder, question(database="my shop"))
    link = folder.parent / "link"
    link.symlink_to(folder)
    monkeypatch.chdir(folder)
    assert read_folder(Path(spelling), folder.parent / "cache").name == "my shop"
    ask(folder, question(database="link"))
    assert list(read(link).databases) == ["link"], "a link has a name of its own"


def test_a_path_that_is_no_folder(folder: Path) -> None:
    file = ask(folder, question())
    assert refusal(file) == f"{file} is a file. Give the folder that holds it"
    assert refusal(folder / "nowhere") == f"{folder / 'nowhere'} is not a folder"


def page_files(page: str) -> dict[str, str]:
    """The files that a page shows: a code block after a line that begins with the file's name."""
    text = (DOCS / page).read_text("utf-8")
    return dict(re.findall(r"^`([\w./-]+)`[^\n]*\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def test_the_questions_of_the_page_about_the_tables_of_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {name: text for name, text in page_files("own-data.md").items() if "questions" not in name}
    files = tables | page_files("data-format.md")
    assert set(files) == {"my-shop/customers.csv", "my-shop/orders.csv", "my-shop/questions.jsonl"}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    dataset = load_dataset("my-shop", cache_dir=tmp_path / "cache")
    assert (dataset.name, list(dataset.databases), dataset.excluded) == ("my-shop", ["my-shop"], ())
    assert {len(dataset.select(Split.TRAIN)), len(dataset.select(Split.EVAL))} == {3, 1}
    assert {question.text: question.gold.rows for question in dataset.questions} == {
        "How many customers are there?": ((7,),),
        "What are the names of the customers in Rome?": (("Dee",), ("Gus",)),
        "Who has never ordered anything?": (("Dee",), ("Gus",)),
        "How many regulars are there?": ((1,),),
    }


@pytest.mark.parametrize(
    ("stated", "rows"),
    [
        (42, ((42,),)),
        ("42", ((42,),)),
        ("3.5", ((3.5,),)),
        ("007", (("007",),)),
        ("Oslo, Rome", (("Oslo, Rome",),)),
        (["Oslo", "Rome"], (("Oslo",), ("Rome",))),
        ('["Oslo", "Rome"]', (("Oslo",), ("Rome",))),
        ([["Ada", 3], ["Bo", None]], (("Ada", 3), ("Bo", None))),
        (True, ((1,),)),
        (None, ((None,),)),
        ("true", (("true",),)),
        ([], ()),
    ],
)
def test_an_answer_in_place_of_sql(shop: Path, stated: Any, rows: tuple[Any, ...]) -> None:
    ask(shop, {"question": "How many?", "answer": stated})
    asked = read(shop).questions[0]
    assert (asked.sql, asked.answer) == ("", rows)


@pytest.mark.parametrize("stated", [{"a": 1}, [{"a": 1}], [[1], [1, 2]], [[[1]]], [[]], "[[1], [1, 2]]", "[1e999]"])
def test_an_answer_that_is_no_value_is_refused(shop: Path, stated: Any) -> None:
    ask(shop, question(), {"question": "How many?", "answer": stated})
    assert 'line 6 (question 1): "answer"' in refusal(shop)


def test_a_table_of_questions_with_answers_and_its_split(shop: Path) -> None:
    lines = [f"How many of {name}?,{number}" for number, name in enumerate("abcdefgh")]
    add_table(shop, "asked.csv", "\n".join(["Question,Answer", *lines, '" how  many OF a?",0']))
    raw = read(shop)
    assert [each.answer for each in raw.questions[:3]] == [((0,),), ((1,),), ((2,),)]
    splits = [each.split for each in raw.questions]
    assert splits.count(Split.EVAL) == 2
    assert splits[0] is splits[-1], "the same question, in another case and with other blanks, is not on both sides"


def test_with_both_the_sql_decides(shop: Path) -> None:
    ask(shop, question(answer=7))
    assert (read(shop).questions[0].sql, read(shop).questions[0].answer) == ("SELECT count(*) FROM t", ())
