"""How a policy explored: counted by hand on really played episodes."""

from __future__ import annotations

import random

import pytest

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from policies.tiny.stumbling import StumblingPlayer
from tests.trainer.recited import recite
from tests.trainer.records import make_record
from trainer.results.exploration import exploration_lines, explore
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
    assert found.invented_names is not None
    # A DESCRIBE of a table that is not there describes nothing; an episode without a query is left out.
    assert (found.described_first.count, found.described_first.n) == (1, 3)
    assert (found.recovered.count, found.recovered.n) == (1, 3)
    # What was no action and ran as a query to no avail is not a query.
    assert (found.invented_names.count, found.invented_names.n) == (2, 5)
    assert found.invented_names.share == pytest.approx(0.4)
    assert found.invented_names.interval.low < 0.4 < found.invented_names.interval.high
    assert (found.steps, found.generated_tokens, found.prompt_tokens) == (15 / 4, 15 / 4, 100.0)
    said = exploration_lines(found)
    assert said[0].startswith("DESCRIBE before the first QUERY: 33.3% (")
    assert exploration_lines(found, one_query=True) == said[2:]
    assert said[-1] == "a question took 3.8 steps, 4 tokens written and 100 read"


def test_players_count_no_tokens_and_the_oracle_makes_no_mistake(environment: SQLEnvironment, pets: Dataset) -> None:
    found = explore([record(play(environment, q, OraclePlayer(q))[0]) for q in pets.questions])
    assert found.described_first is not None
    assert found.described_first.share == 1.0
    assert found.recovered is None
    assert (found.generated_tokens, found.prompt_tokens) == (None, None)
    assert "tokens" not in exploration_lines(found)[-1]


@pytest.mark.parametrize("seed", range(3))
def test_shares_lie_in_their_intervals_whoever_plays(environment: SQLEnvironment, pets: Dataset, seed: int) -> None:
    played = [
        record(play(environment, question, player)[0])
        for question in pets.questions
        for player in (RandomPlayer(seed), StumblingPlayer(question, random.Random(seed)))
    ]
    found = explore(played)
    for share in (found.described_first, found.recovered, found.invented_names):
        if share is not None:
            assert share.interval.low <= share.share == share.count / share.n <= share.interval.high
    assert len(exploration_lines(found)) <= 4


def test_an_old_record_does_not_know_what_was_read_and_a_lost_episode_counts_nowhere() -> None:
    known = make_record("a", prompt_tokens=10)
    assert explore([known, make_record("b", "failed")]).prompt_tokens == 10.0
    assert explore([known, make_record("b")]).prompt_tokens is None
