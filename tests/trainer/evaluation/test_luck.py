"""Which right answers were lucky: told on episodes that were really played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from tests.trainer.recited import recite
from tests.trainer.records import make_record
from trainer.evaluation.luck import luck_line, measure_luck
from trainer.rollout.episodes import record
from trainer.rollout.players import OraclePlayer, RandomPlayer, play

CATS = "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield folder


@pytest.mark.parametrize(
    ("texts", "lucky_query", "no_query"),
    [
        ([CATS, "ANSWER 2"], 0, 0),
        ([CATS, "QUERY SELECT COUNT(*) FROM pets", "SAMPLE pets", "ANSWER 2"], 0, 0),
        (["QUERY SELECT 2", CATS, "ANSWER 2"], 0, 0),
        (["SELECT COUNT(*) FROM pets WHERE species = 'cat'", "ANSWER 2"], 0, 0),
        (["QUERY SELECT 2", "ANSWER 2"], 1, 0),
        (["QUERY SELECT COUNT(*) FROM owners WHERE city = 'Oslo'", "ANSWER 2"], 1, 0),
        (["QUERY SELECT species, COUNT(*) FROM pets GROUP BY species", "ANSWER 2"], 0, 1),
        (["QUERY SELECT kind FROM pets", "ANSWER 2"], 0, 1),
        (["DESCRIBE pets", "ANSWER 2"], 0, 1),
    ],
)
def test_each_sort(
    environment: SQLEnvironment, pets: Dataset, texts: list[str], lucky_query: int, no_query: int
) -> None:
    played = recite(environment, pets.question("cats"), texts)
    assert played.outcome == "correct"
    luck = measure_luck([played], pets)
    assert luck is not None
    assert (luck.lucky_query, luck.no_query, luck.lucky.n) == (lucky_query, no_query, 1)
    assert luck.lucky.count == lucky_query + no_query


def test_the_oracle_is_never_lucky_and_makes_no_variants(
    environment: SQLEnvironment, pets: Dataset, cache: Path
) -> None:
    told = []
    played = [record(play(environment, q, OraclePlayer(q))[0]) for q in pets.questions]
    luck = measure_luck(played, pets, lambda: told.append(1))
    assert luck is not None
    assert (luck.lucky.count, luck.lucky.n, luck.untested, len(told)) == (0, 4, 0, 4)
    assert not any(cache.iterdir())
    assert luck_line(luck) == (
        f"right by luck: 0.0% ({100 * luck.lucky.interval.low:.1f} to {100 * luck.lucky.interval.high:.1f}) of 4 right "
        "answers, 0 on a query that is wrong on variants of the database, 0 on none that returned the answer"
    )


def test_random_play_is_right_by_luck_alone(environment: SQLEnvironment, pets: Dataset) -> None:
    games = [record(play(environment, pets.question("cats"), RandomPlayer(seed))[0]) for seed in range(150)]
    luck = measure_luck(games, pets)
    assert luck is not None
    assert luck.lucky.n == sum(game.outcome == "correct" for game in games) > 2
    assert luck.lucky.share == 1.0
    assert luck.lucky_query + luck.no_query == luck.lucky.n


def test_an_answer_that_is_given_again_makes_nothing_surer(environment: SQLEnvironment, pets: Dataset) -> None:
    earned = [record(play(environment, q, OraclePlayer(q))[0]) for q in pets.questions]
    played = [recite(environment, pets.question("cats"), ["DESCRIBE pets", "ANSWER 2"]), *earned[1:]]
    intervals = [luck.lucky.interval for times in (1, 8) if (luck := measure_luck(times * played, pets)) is not None]
    once, often = (interval.high - interval.low for interval in intervals)
    assert often > 0.9 * once


def test_where_nothing_is_right_there_is_no_luck(environment: SQLEnvironment, pets: Dataset) -> None:
    wrong = recite(environment, pets.question("cats"), ["ANSWER 7"])
    assert measure_luck([wrong, make_record("cats", "failed")], pets) is None
