"""Which steps a question's guided episodes are given, and how that follows their success."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Dataset
from env_server.sql.pool import DatabasePool
from env_server.types import ActionType, AnswerMode, RewardComponents, SQLAction
from tests.trainer.records import make_record
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn
from trainer.training.guided_starts import FIRST_LEFT, GuidedEpisode, GuidedStarts, Known, follow, given_steps, learn


def guided(level: str, given: int, solved: int, played: int) -> list[GuidedEpisode]:
    return [{"hardness": level, "given_steps": given, "correct": n < solved} for n in range(played)]


@pytest.mark.parametrize(
    ("steps", "left", "expected"), [(0, 2, 0), (1, 2, 0), (2, 2, 1), (3, 1, 2), (3, 2, 1), (3, 9, 1), (6, 2, 4)]
)
def test_some_steps_are_given_and_never_the_last(steps: int, left: int, expected: int) -> None:
    assert given_steps(steps, left) == expected


@pytest.mark.parametrize(
    ("left", "results", "expected"),
    [
        (2, [(2, 2, 8)], 3),
        (2, [(2, 1, 8)], 2),
        (2, [(2, 0, 8)], 1),
        (1, [(2, 0, 8)], 1),
        (2, [(2, 0, 8), (1, 8, 8)], 3),
        (2, [(2, 0, 8), (1, 3, 8)], 2),
        (2, [(1, 8, 8), (1, 8, 8)], 2),
    ],
)
def test_the_steps_that_are_left_follow_success(left: int, results: list[tuple[int, int, int]], expected: int) -> None:
    assert follow(left, [each for result in results for each in guided("easy", *result)]) == expected


@given(
    st.lists(st.tuples(st.sampled_from(["easy", "hard"]), st.integers(1, 5), st.integers(0, 8)), max_size=30),
)
def test_levels_move_by_one_step_a_batch_and_each_for_itself(results: list[tuple[str, int, int]]) -> None:
    known: Known = {"left": {}, "ways": {}}
    for level, steps, solved in results:
        before = {name: known["left"].get(name, FIRST_LEFT) for name in ("easy", "hard")}
        known = learn(known, {"episodes": guided(level, steps, solved, 8), "ways": {}})
        for name, left in before.items():
            now = known["left"].get(name, FIRST_LEFT)
            assert now >= 1
            assert abs(now - left) <= (name == level)
            assert now <= left or solved >= 2


def actions(*texts: str) -> tuple[SQLAction, ...]:
    return tuple(
        SQLAction(action_type=kind, argument=argument) for kind, _, argument in (t.partition(" ") for t in texts)
    )


def test_the_oracles_steps_are_given_where_there_is_sql(pets: Dataset, pets_pool: DatabasePool) -> None:
    starts = GuidedStarts(pets, pets_pool, AnswerMode.VALUE)
    assert starts.of(0)("oslo") == actions("DESCRIBE pets", "DESCRIBE owners")
    starts.observe(0, [make_record("q", "wrong", given_steps=2)] * 8, [])
    query, *_ = (action.argument for action in starts.of(1)("oslo") if action.action_type == ActionType.QUERY)
    assert query == pets.question("oslo").gold_sql
    assert len(starts.of(1)("oslo")) == 3


def test_a_batch_that_may_still_be_played_gives_nothing_to_the_next(pets: Dataset, pets_pool: DatabasePool) -> None:
    starts = GuidedStarts(pets, pets_pool, AnswerMode.VALUE, lag=1)
    starts.observe(0, [make_record("q", "wrong", given_steps=2)] * 8, [])
    assert [len(starts.of(batch)("oslo")) for batch in (0, 1, 2)] == [2, 2, 3]


def played(question_id: str, *texts: str, outcome: Outcome = Outcome.CORRECT) -> Episode:
    turns = tuple(
        Turn(text, action.action_type, action.argument, True, "", "", RewardComponents())
        for text, action in zip(texts, actions(*texts), strict=True)
    )
    row = TokenRow([], [], [], [], [])
    return Episode(question_id, question_id, "pets", "", "easy", "f", outcome, turns, row)


def test_without_sql_the_policys_own_way_is_given_and_the_shortest_that_has_a_query_kept(
    pets: Dataset, pets_pool: DatabasePool
) -> None:
    hidden = replace(pets, questions=tuple(replace(each, gold_sql="") for each in pets.questions))
    starts = GuidedStarts(hidden, pets_pool, AnswerMode.VALUE)
    long = ("DESCRIBE owners", "DESCRIBE pets", "QUERY SELECT 2", "ANSWER 2")
    short = ("DESCRIBE pets", "QUERY SELECT 2", "ANSWER 2")
    assert starts.of(0)("cats") == ()
    episodes = [
        played("cats", "ANSWER 2"),
        played("cats", *long),
        played("oldest", "QUERY SELECT 1", "ANSWER 1", outcome=Outcome.WRONG),
    ]
    starts.observe(0, [], [starts.ways(episodes), starts.ways([played("cats", *short)])])
    starts.observe(1, [], [starts.ways([played("cats", *long)])])
    assert starts.of(2)("cats") == actions(*short[:1])
    assert starts.of(2)("oldest") == ()
    assert GuidedStarts(pets, pets_pool, AnswerMode.VALUE).ways(episodes) == {}, "the oracle knows the way there"


def test_a_run_that_resumes_gives_what_it_would_have_given(pets: Dataset, pets_pool: DatabasePool) -> None:
    hidden = replace(pets, questions=tuple(replace(each, gold_sql="") for each in pets.questions))
    starts, resumed = (GuidedStarts(hidden, pets_pool, AnswerMode.VALUE, lag=1) for _ in range(2))
    for batch, name in enumerate(("cats", "oldest")):
        way = starts.ways([played(name, "DESCRIBE pets", "DESCRIBE owners", "QUERY SELECT 2", "ANSWER 2")])
        starts.observe(batch, [make_record("q", "wrong", given_steps=2)] * 8, [way])
    resumed.load_state_dict(json.loads(json.dumps(starts.state_dict())))
    assert resumed.state_dict() == starts.state_dict()
    for batch in (2, 3):
        assert [resumed.of(batch)(name) for name in ("cats", "oldest")] == [
            starts.of(batch)(name) for name in ("cats", "oldest")
        ]
    assert [len(starts.of(batch)("oldest")) for batch in (2, 3)] == [0, 3]
