"""Where databases are looked for, and which files are refused before SQLite could misread them."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from env_server.data.database_files import file_problem, find_databases
from tests.env_server.data.folders import add_database


def touch(folder: Path, name: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return add_database(tmp_path, "shop.sqlite", "CREATE TABLE Orders(a); CREATE VIEW recent AS SELECT a FROM Orders;")


def test_hidden_files_those_of_archives_and_folders_are_passed_over(tmp_path: Path) -> None:
    for name in ("database/.ranch.sqlite", "database/__MACOSX/ranch.sqlite", "database/._ranch/._ranch.sqlite"):
        touch(tmp_path, name)
    touch(tmp_path, "__MACOSX/database/ranch.sqlite")
    (tmp_path / "database" / "folder.sqlite").mkdir(parents=True)
    assert find_databases(tmp_path, ("database",)) == {}


def test_the_nearest_folder_counts_then_the_order_of_the_names(tmp_path: Path) -> None:
    touch(tmp_path, "inner/first/ranch.sqlite")
    second = touch(tmp_path, "second/ranch/ranch.sqlite")
    assert find_databases(tmp_path, ("first", "second")) == {"ranch": second}
    first = touch(tmp_path, "first/ranch.db")
    assert find_databases(tmp_path, ("first", "second")) == {"ranch": first}
    assert find_databases(tmp_path, ("second", "first")) == {"ranch": second}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty (0 bytes)"),
        (b"hello", "is not a SQLite database, or it is encrypted"),
        (bytes(range(256)) * 16, "is not a SQLite database, or it is encrypted"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
    ],
)
def test_other_files_are_told_apart(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "shop.sqlite"
    file.write_bytes(content)
    assert file_problem(file).startswith(f"{file} {words}")


def test_a_file_that_is_cut_off(database: Path) -> None:
    content = database.read_bytes()
    assert len(content) == 8_192
    assert file_problem(database) == ""
    database.write_bytes(content[:-1])
    assert file_problem(database).startswith(f"{database} is cut off: it has 8,191 of its 8,192 bytes")
    old = content[:92] + bytes(4) + content[96:]  # written by a version that does not keep the size
    database.write_bytes(old[:-1])
    assert file_problem(database) == ""


def test_changes_that_are_not_in_the_file_yet_are_a_problem_until_they_are(tmp_path: Path) -> None:
    copied = tmp_path / "copied.db"
    with closing(sqlite3.connect(tmp_path / "live.db")) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t(a); INSERT INTO t VALUES (1);")
        for suffix in ("", "-wal"):
            shutil.copy(tmp_path / f"live.db{suffix}", tmp_path / f"copied.db{suffix}")
    assert "copied.db-wal may hold changes that are not in it" in file_problem(copied)
    with closing(sqlite3.connect(copied)) as connection:  # what the message advises: open it once
        assert connection.execute("SELECT a FROM t").fetchall() == [(1,)]
    assert file_problem(copied) == ""


def test_a_journal_counts_when_it_is_hot(database: Path) -> None:
    journal = database.with_name("shop.sqlite-journal")
    journal.write_bytes(bytes(512))  # journal_mode=PERSIST leaves a journal with an empty head
    assert file_problem(database) == ""
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(504))
    assert "shop.sqlite-journal may hold changes" in file_problem(database)
