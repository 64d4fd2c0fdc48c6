"""Which answers neighbour queries hit by luck, counted on databases where it can be seen by hand."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from env_server.dataset import Gold, Hardness, Question, Split
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.test_suites.guessability import Guessability, measure_guessability
from env_server.test_suites.store import Suites

SQL = "SELECT COUNT(*) FROM sales WHERE shop = 'north' AND day > 10"


def guessability_over(tmp_path: Path, rows: list[tuple[str, int]], sql: str) -> Guessability:
    path = tmp_path / "sales.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE sales (shop TEXT, day INTEGER)")
    connection.executemany("INSERT INTO sales VALUES (?, ?)", rows)
    connection.commit()
    gold = Gold(tuple(connection.execute(sql).fetchall()), ordered=False)
    connection.close()
    question = Question("q", "?", "sales", sql, Hardness.EASY, Split.TRAIN, gold)
    databases = DatabasePool({"sales": path}, SandboxSettings())
    suites = Suites({"sales": path}, SandboxSettings(), tmp_path / "cache")
    try:
        return measure_guessability(question, suites.of(question), databases)
    finally:
        databases.close()


def test_where_every_condition_counts_hardly_a_near_miss_is_lucky(tmp_path: Path) -> None:
    rows = [(shop, day) for shop in ("north", "south", "north east") for day in range(1, 25)]
    guessability = guessability_over(tmp_path, rows, SQL)
    assert guessability.different > 10
    assert not guessability.guessable


def test_where_no_condition_counts_the_answer_is_guessable(tmp_path: Path) -> None:
    guessability = guessability_over(tmp_path, [("north", 20), ("north", 21)], SQL)
    assert guessability.different > 10
    assert guessability.guessable


def test_another_way_to_ask_the_same_is_no_luck(tmp_path: Path) -> None:
    found = guessability_over(tmp_path, [("north", 1), ("south", 2)], "SELECT DISTINCT shop FROM sales")
    assert found == Guessability(different=1, lucky=0)  # of days; that without DISTINCT is not counted


def test_a_query_without_near_misses_is_not_called_guessable(tmp_path: Path) -> None:
    assert guessability_over(tmp_path, [("north", 1)], "VALUES (1)") == Guessability(0, 0)
    assert not Guessability(0, 0).guessable


@pytest.mark.parametrize(("lucky", "guessable"), [(0, False), (5, False), (6, True), (12, True)])
def test_half_of_the_near_misses_make_it_guessable(lucky: int, guessable: bool) -> None:
    assert Guessability(12, lucky).guessable is guessable
