"""Suites are made once, kept on disk, shared by threads and processes, and made anew for a changed database."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from env_server.cache import Cache
from env_server.dataset import Dataset, Gold, Question
from env_server.errors import DataError
from env_server.settings import SandboxSettings
from env_server.test_suites.store import KEPT_SUITES, KIND, Suites
from env_server.test_suites.suite import SuiteMaker

PRINT_SUITE = """
import sys
from pathlib import Path
from env_server.settings import SandboxSettings
from env_server.test_suites.store import Suites
import hashlib, types
question = types.SimpleNamespace(db_id="pets", gold_sql=sys.argv[3])
suite = Suites({"pets": Path(sys.argv[1])}, SandboxSettings(), Path(sys.argv[2])).of(question)
print(hashlib.sha256(b"".join(v.image for v in suite.databases)).hexdigest(), [v.gold.rows for v in suite.databases])
"""


def suites(databases: Mapping[str, Path], cache: Path) -> Suites:
    return Suites(databases, SandboxSettings(), cache)


@pytest.fixture
def cats(pets: Dataset) -> Question:
    return pets.question("cats")


@pytest.fixture
def no_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: SuiteMaker, sql: str) -> None:
        raise AssertionError(f"made again: {sql}")

    monkeypatch.setattr(SuiteMaker, "make", make)


def test_a_suite_comes_back_from_disk_as_it_was(pets: Dataset, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    useless = replace(pets.questions[0], gold_sql="SELECT species FROM pets GROUP BY species HAVING COUNT(*) >= 1")
    questions = [*pets.questions, useless]
    made = [suites(pets.databases, tmp_path).of(question) for question in questions]
    assert all(suite.databases for suite in made)
    assert made[-1].untested == ("HAVING COUNT(*) >= 1",)
    request.getfixturevalue("no_making")
    again = suites(pets.databases, tmp_path)
    assert [again.of(question) for question in questions] == made


def test_golds_of_every_type_come_back_from_disk(tmp_path: Path, pets: Dataset, cats: Question) -> None:
    path = tmp_path / "odd.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (a, b BLOB)")
    connection.execute("INSERT INTO t VALUES (9e999, x'00ff'), (-1.5, NULL), ('té', x'01'), (9223372036854775807, x'')")
    connection.commit()
    connection.close()
    question = replace(cats, db_id="odd", gold_sql="SELECT a, b FROM t", gold=Gold(((1, 2),), ordered=False))
    made = suites({"odd": path}, tmp_path / "cache").of(question)
    values = {type(value) for database in made.databases for row in database.gold.rows for value in row}
    assert bytes in values
    assert suites({"odd": path}, tmp_path / "cache").of(question) == made


def test_another_process_makes_the_same_suite(pets: Dataset, pets_file: Path, cats: Question, tmp_path: Path) -> None:
    outputs = set()
    for number in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, "-c", PRINT_SUITE, str(pets_file), str(tmp_path / number), cats.gold_sql]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_threads_that_ask_at_once_get_one_suite(pets: Dataset, cats: Question, tmp_path: Path) -> None:
    store = suites(pets.databases, tmp_path)
    found = []
    gate = threading.Barrier(4)

    def ask() -> None:
        gate.wait()
        found.append(store.of(cats))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(suite is found[0] for suite in found)


def test_no_more_suites_stay_in_memory_than_allowed(
    pets: Dataset, cats: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("env_server.test_suites.store.KEPT_SUITES", 2)
    assert KEPT_SUITES > 2
    store = suites(pets.databases, tmp_path)
    first = store.of(cats)
    for question in pets.questions:
        store.of(question)
    again = store.of(cats)
    assert again == first
    assert again is not first


@pytest.mark.parametrize(
    ("definition", "problem"),
    [
        ("CREATE VIRTUAL TABLE notes USING fts5(body)", "the database has virtual tables: notes"),
        ("CREATE VIRTUAL TABLE notes USING rtree(id, low, high)", "the database has virtual tables: notes"),
    ],
)
def test_a_database_without_test_databases_has_empty_suites_that_say_why(
    tmp_path: Path, cats: Question, definition: str, problem: str
) -> None:
    path = tmp_path / "notes.sqlite"
    connection = apsw.Connection(str(path))
    connection.execute(definition)
    connection.close()
    question = replace(cats, db_id="notes", gold_sql="SELECT COUNT(*) FROM notes")
    for _ in ("made", "loaded"):
        suite = suites({"notes": path}, tmp_path / "cache").of(question)
        assert suite.databases == ()
        assert suite.problem == problem


def test_a_damaged_database_is_an_error_and_is_not_kept(tmp_path: Path, cats: Question) -> None:
    path = tmp_path / "zoo.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE animals (id INTEGER PRIMARY KEY, name TEXT)")
    connection.execute("CREATE TABLE keepers (id INTEGER PRIMARY KEY, name TEXT)")
    connection.execute("INSERT INTO animals VALUES (1, 'bear')")
    connection.executemany("INSERT INTO keepers VALUES (?, ?)", ((i, "x" * 500) for i in range(100)))
    connection.commit()
    connection.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:12_288] + bytes(4_096) + whole[16_384:])
    question = replace(cats, db_id="zoo", gold_sql="SELECT name FROM animals")
    for _ in range(2):
        with pytest.raises(DataError, match=r"zoo\.sqlite: the database cannot be read: .*malformed"):
            suites({"zoo": path}, tmp_path / "cache").of(question)
    path.write_bytes(whole)
    assert suites({"zoo": path}, tmp_path / "cache").of(question).databases


@pytest.mark.parametrize("broken", ["a file", "not a database", "no database"])
def test_what_cannot_be_used_is_told(pets: Dataset, cats: Question, tmp_path: Path, broken: str) -> None:
    if broken == "a file":
        (tmp_path / "cache").write_text("in the way")
        with pytest.raises(DataError, match="SQLENV_CACHE_DIR"):
            suites(pets.databases, tmp_path / "cache").of(cats)
    elif broken == "not a database":
        store = suites(pets.databases, tmp_path)
        store.of(cats)
        (file,) = Cache(tmp_path).path(KIND, "").iterdir()
        file.write_bytes(b"nonsense" * 1000)
        with pytest.raises(DataError, match="Delete it"):
            suites(pets.databases, tmp_path).of(cats)
    else:
        with pytest.raises(DataError, match="no database 'pets'"):
            suites({}, tmp_path).of(cats)


def test_no_handle_stays_open(pets: Dataset, tmp_path: Path) -> None:
    store = suites(pets.databases, tmp_path)
    for question in pets.questions:
        store.of(question)
    held = [fd.readlink() for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()]
    assert not [target for target in held if target.is_relative_to(tmp_path)]
