"""Suites made beforehand: the same as when they are asked for, over processes, resumable, each once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from env_server.dataset import Dataset, Question
from env_server.environment import EnvironmentFactory
from env_server.errors import DataError
from env_server.settings import EnvSettings, SandboxSettings
from env_server.test_suites import store
from env_server.test_suites.store import Suites, build_suites
from env_server.test_suites.suite import SuiteMaker
from env_server.types import ActionType, AnswerMode, SQLAction

SANDBOX = SandboxSettings()


def variations(pets: Dataset, count: int) -> list[Question]:
    """Questions with different gold queries that are quickly made suites of."""
    return [
        replace(pets.questions[0], question_id=f"older-{age}", gold_sql=f"SELECT COUNT(*) FROM pets WHERE age > {age}")
        for age in range(count)
    ]


@pytest.fixture
def no_making(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(self: SuiteMaker, sql: str) -> None:
        raise AssertionError(f"made: {sql}")

    monkeypatch.setattr(SuiteMaker, "make", make)


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
