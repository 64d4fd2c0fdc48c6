"""Suites on disk: made by processes or on demand, read back as they were, and what cannot be used."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from env_server.cache import Cache
from env_server.dataset import Dataset, Gold, Question
from env_server.environment import EnvironmentFactory
from env_server.errors import DataError
from env_server.settings import EnvSettings, SandboxSettings
from env_server.test_suites import store
from env_server.test_suites.store import KEPT_SUITES, KIND, Suites, build_suites
from env_server.test_suites.suite import SuiteMaker
from env_server.types import ActionType, AnswerMode, SQLAction


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


SANDBOX = SandboxSettings()


def variations(pets: Dataset, count: int) -> list[Question]:
    """Questions with different gold queries that are quickly made suites of."""
    return [
        replace(pets.questions[0], question_id=f"older-{age}", gold_sql=f"SELECT COUNT(*) FROM pets WHERE age > {age}")
        for age in range(count)
    ]


def test_processes_make_what_is_made_on_demand(pets: Dataset, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    questions = [*pets.questions, *variations(pets, 14), pets.questions[0]]
    told: list[tuple[int, int]] = []
    many = tmp_path / "many"
    assert (
        build_suites(pets.databases, questions, SANDBOX, many, progress=lambda *at: told.append(at), processes=3) == 18
    )
    assert (told[0], told[-1]) == ((0, 18), (18, 18))
    assert told == sorted(told)
    on_demand = Suites(pets.databases, SANDBOX, tmp_path / "one")
    expected = [on_demand.of(question) for question in questions]
    request.getfixturevalue("no_making")
    # Each process had a seed for its hashes of its own.
    assert [Suites(pets.databases, SANDBOX, many, read_only=True).of(question) for question in questions] == expected
    told.clear()
    assert build_suites(pets.databases, questions, SANDBOX, many, progress=lambda *at: told.append(at)) == 0
    assert told == []


def test_an_interrupted_build_goes_on_where_it_stopped(pets: Dataset, tmp_path: Path) -> None:
    questions = variations(pets, 40)

    class InterruptedHereError(Exception):
        pass

    def interrupt(done: int, _total: int) -> None:
        if done:
            raise InterruptedHereError

    with pytest.raises(InterruptedHereError):
        build_suites(pets.databases, questions, SANDBOX, tmp_path, progress=interrupt, processes=2)
    rest = build_suites(pets.databases, questions, SANDBOX, tmp_path, processes=1)
    assert 0 < rest < 40


def test_builds_that_overlap_make_each_suite_once(pets: Dataset, tmp_path: Path) -> None:
    questions = variations(pets, 6)
    made: list[int] = []

    def build() -> None:
        made.append(build_suites(pets.databases, questions, SANDBOX, tmp_path))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 0, 6]


def test_a_process_that_is_lost_is_an_error(pets: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(DataError, match="try again"):
        build_suites(pets.databases, variations(pets, 20), SANDBOX, tmp_path, processes=2)


def test_a_database_that_cannot_be_read_is_an_error(pets: Dataset, tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match=r"broken\.sqlite"):
        build_suites({"pets": broken}, variations(pets, 20), SANDBOX, tmp_path / "cache", processes=2)


def test_a_reader_never_makes_a_suite(pets: Dataset, tmp_path: Path, no_making: None) -> None:
    with pytest.raises(DataError, match="sqlenv data build"):
        Suites(pets.databases, SANDBOX, tmp_path, read_only=True).of(pets.question("cats"))


def test_environments_are_built_for_the_questions_that_are_asked(
    pets: Dataset, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = pets.questions[:2]
    with EnvironmentFactory(pets, EnvSettings(), AnswerMode.SQL, tmp_path) as factory:
        factory.build_suites(asked)
        request.getfixturevalue("no_making")
        environment = factory.make()
        for question in asked:
            environment.reset(question_id=question.question_id)
            last = environment.step(SQLAction(action_type=ActionType.ANSWER, argument=question.gold_sql))
            assert last.verdict == "correct"
        assert factory.suites is not None
        assert len(factory.suites.missing(pets.questions)["pets"]) == 2
