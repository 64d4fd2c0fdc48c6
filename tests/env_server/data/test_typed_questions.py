"""Files and folders without questions, and the questions that a person types about them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from env_server.data.loading import has_no_questions, read_databases, typed_question
from env_server.errors import DataError


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "orders.csv").write_text("id,amount\n1,2\n", encoding="utf-8")
    (folder / "items.tsv").write_text("id\tname\n1\tpen\n", encoding="utf-8")
    return folder


def test_databases_are_called_like_their_files(shop: Path, pets_file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert set(read_databases(shop / "orders.csv", cache)) == {"orders"}
    assert read_databases(pets_file, cache) == {"pets": pets_file}
    shutil.copy(pets_file, shop)
    assert set(read_databases(shop, cache)) == {"shop", "pets"}


def test_what_has_questions(shop: Path, pets_file: Path) -> None:
    assert all(map(has_no_questions, (shop, shop / "orders.csv", shop / "not-there.csv", pets_file)))
    assert not any(map(has_no_questions, (Path("synthetic"), shop / "readme.txt")))
    (shop / "questions.jsonl").write_text('{"question": "How many?", "sql": "SELECT COUNT(*) FROM orders"}\n')
    assert not has_no_questions(shop)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone.csv", "does not exist"),
        ("notes.txt", "is no table and no database. Give one of .csv, .tsv"),
        ("empty.sqlite", "is empty"),
    ],
)
def test_what_is_no_data(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(DataError, match=says):
        read_databases(tmp_path / name, tmp_path)


def test_a_typed_question_is_about_one_database(pets_file: Path) -> None:
    two = {"pets": pets_file, "more": pets_file}
    (question,) = typed_question("How many?", two, "more").questions
    assert (question.db_id, question.judged, question.gold.rows) == ("more", False, ())
    assert typed_question("How many?", {"pets": pets_file}).questions[0].db_id == "pets"
    with pytest.raises(DataError, match="there are 2 databases; say which one the question is about: pets, more"):
        typed_question("How many?", two)
    with pytest.raises(DataError, match="there is no database 'x'; there is pets, more"):
        typed_question("How many?", two, "x")
