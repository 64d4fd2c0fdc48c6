"""Exploration and false positives, counted by hand on really played episodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from tests.trainer.recited import recite
from tests.trainer.records import make_record
from trainer.eval.summaries import explore, false_positives
from trainer.rollout.episodes import record
from trainer.rollout.players import OraclePlayer, RandomPlayer, play

EPISODES = (
    ["DESCRIBE pets", "QUERY SELECT kind FROM pets", "QUERY SELECT COUNT(*) FROM pets", "ANSWER 5"],
    ["QUERY SELECT * FROM cats", "DESCRIBE pets", "QUERY SELECT FROM pets", "ANSWER 5"],
    ["DESCRIBE cats", "QUERY SELECT 1", "ANSWER 1"],
    ["Hello!", "DESCRIBE pets", "SAMPLE pets", "ANSWER 2"],
)


def test_the_figures(environment: SQLEnvironment, pets: Dataset) -> None:
    question = pets.question("cats")
    found = explore([recite(environment, question, texts, read=100) for texts in EPISODES])
    assert found.described_first is not None
    assert found.recovered is not None
    assert found.hallucinated_names is not None
    # A DESCRIBE of a table that is not there describes nothing; an episode without a query is left out.
    assert (found.described_first.count, found.described_first.n) == (1, 3)
    assert (found.recovered.count, found.recovered.n) == (1, 3)
    # What was no action and ran as a query to no avail is not a query.
    assert (found.hallucinated_names.count, found.hallucinated_names.n) == (2, 5)
    assert found.hallucinated_names.share == pytest.approx(0.4)
    assert found.hallucinated_names.interval.low < 0.4 < found.hallucinated_names.interval.high
    assert (found.steps, found.generated_tokens, found.prompt_tokens) == (15 / 4, 15 / 4, 100.0)


def test_players_count_no_tokens_and_the_oracle_makes_no_mistake(environment: SQLEnvironment, pets: Dataset) -> None:
    found = explore([record(play(environment, q, OraclePlayer(q))[0]) for q in pets.questions])
    assert found.described_first is not None
    assert found.described_first.share == 1.0
    assert found.recovered is None
    assert (found.generated_tokens, found.prompt_tokens) == (None, None)


def test_an_old_record_does_not_know_what_was_read_and_a_lost_episode_counts_nowhere() -> None:
    known = make_record("a", prompt_tokens=10)
    assert explore([known, make_record("b", "failed")]).prompt_tokens == 10.0
    assert explore([known, make_record("b")]).prompt_tokens is None


CATS = "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield folder


@pytest.mark.parametrize(
    ("texts", "wrong_query", "no_query"),
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
def test_each_kind_of_false_positive(
    environment: SQLEnvironment, pets: Dataset, texts: list[str], wrong_query: int, no_query: int
) -> None:
    played = recite(environment, pets.question("cats"), texts)
    assert played.outcome == "correct"
    found = false_positives([played], pets)
    assert found is not None
    assert (found.wrong_query, found.no_query, found.share.n) == (wrong_query, no_query, 1)
    assert found.share.count == wrong_query + no_query


def test_the_oracle_has_no_false_positives_and_generates_no_test_databases(
    environment: SQLEnvironment, pets: Dataset, cache: Path
) -> None:
    told = []
    played = [record(play(environment, q, OraclePlayer(q))[0]) for q in pets.questions]
    found = false_positives(played, pets, lambda: told.append(1))
    assert found is not None
    assert (found.share.count, found.share.n, found.untested, len(told)) == (0, 4, 0, 4)
    assert not any(cache.iterdir())


def test_the_random_player_is_never_verified(environment: SQLEnvironment, pets: Dataset) -> None:
    games = [record(play(environment, pets.question("cats"), RandomPlayer(seed))[0]) for seed in range(150)]
    found = false_positives(games, pets)
    assert found is not None
    assert found.share.n == sum(game.outcome == "correct" for game in games) > 2
    assert found.share.share == 1.0
    assert found.wrong_query + found.no_query == found.share.n


def test_without_a_right_answer_there_is_nothing_to_measure(environment: SQLEnvironment, pets: Dataset) -> None:
    wrong = recite(environment, pets.question("cats"), ["ANSWER 7"])
    assert false_positives([wrong, make_record("cats", "failed")], pets) is None
