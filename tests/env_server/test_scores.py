"""What is remembered is what would be computed, and no more is kept than may be."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.scores import LONGEST_TEXT, ScoreCache, Scores
from env_server.sql.pool import DatabasePool
from env_server.types import SQLAction, SQLObservation

ACTIONS = (
    ("QUERY", "SELECT COUNT(*) FROM pets WHERE species = 'cat'"),
    ("QUERY", "select count(*) from pets where species = 'cat'"),
    ("QUERY", "SELECT COUNT(*) FROM pets WHERE species = 'Cat'"),
    ("QUERY", "SELECT species FROM pets"),
    ("QUERY", "SELECT name FROM pets ORDER BY name"),
    ("QUERY", "SELECT nothing FROM pets"),
    ("SAMPLE", "pets"),
    ("ANSWER", "2"),
    ("ANSWER", "3"),
    ("ANSWER", "cat"),
)
EPISODES = st.lists(
    st.tuples(st.sampled_from(("cats", "species")), st.lists(st.sampled_from(ACTIONS), max_size=6)), max_size=6
)


def never() -> float:
    raise AssertionError("it is remembered")


def counted(score: float, calls: list[float]) -> Callable[[], float]:
    def compute() -> float:
        calls.append(score)
        return score

    return compute


def play(environment: SQLEnvironment, question: str, actions: list[tuple[str, str]]) -> list[SQLObservation]:
    observations = [environment.reset(question_id=question, episode_id="e")]
    for kind, argument in actions:
        if observations[-1].done:
            break
        observations.append(environment.step(SQLAction(action_type=kind, argument=argument)))
    return observations


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EPISODES)
def test_episodes_are_the_same_with_and_without(
    environment: SQLEnvironment,
    pets: Dataset,
    pets_pool: DatabasePool,
    episodes: list[tuple[str, list[tuple[str, str]]]],
) -> None:
    scores = Scores()
    for question, actions in episodes:
        remembering = SQLEnvironment(pets, pets_pool, scores=scores)
        assert play(remembering, question, actions) == play(environment, question, actions)


def test_environments_share_what_they_remember(pets: Dataset, pets_pool: DatabasePool) -> None:
    scores = Scores()
    for _ in range(3):
        play(SQLEnvironment(pets, pets_pool, scores=scores), "cats", [ACTIONS[0], ACTIONS[3], ACTIONS[7]])
    assert (len(scores.phi), len(scores.judgements)) == (2, 1)


def test_a_score_is_computed_once_for_each_question_and_text() -> None:
    cache: ScoreCache[float] = ScoreCache(10)
    calls: list[float] = []
    assert cache.get("one", "SELECT 1", counted(0.0, calls)) == 0.0
    assert cache.get("one", "SELECT 1", never) == 0.0
    assert cache.get("two", "SELECT 1", counted(0.25, calls)) == 0.25
    assert cache.get("one", "SELECT 2", counted(0.5, calls)) == 0.5
    assert cache.get("one", "SELECT 1", never) == 0.0
    assert calls == [0.0, 0.25, 0.5]


def test_long_texts_are_not_remembered() -> None:
    cache: ScoreCache[float] = ScoreCache(2)
    calls: list[float] = []
    for _ in range(2):
        cache.get("q", "x" * (LONGEST_TEXT + 1), counted(1.0, calls))
    assert (len(cache), len(calls)) == (0, 2)
    cache.get("q", "x" * LONGEST_TEXT, counted(1.0, calls))
    assert len(cache) == 1
