"""Tests of the reward layers and of the bound on a wrong episode's total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Gold, Row
from env_server.reward import EpisodeRewards, normalize_action, wrong_total_bound
from env_server.settings import RewardSettings
from env_server.types import RewardComponents

GOLD = Gold(rows=(("a", 1), ("b", 2)), ordered=False)
FULL: tuple[Row, ...] = GOLD.rows
HALF: tuple[Row, ...] = (("a", 7), ("x", 2))  # phi 0.5
NEAR: tuple[Row, ...] = (("x", "y"), ("z", "w"))  # phi 0.25
EMPTY: tuple[Row, ...] = ()  # phi 0
DEFAULT = RewardSettings()
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Move:
    """One step of an agent, and what the environment made of it."""

    kind: str
    argument: str
    ok: bool = True
    rows: tuple[Row, ...] | None = None


def query(argument: str, rows: tuple[Row, ...]) -> Move:
    return Move("QUERY", argument, rows=rows)


def play(moves: Sequence[Move], settings: RewardSettings = DEFAULT) -> list[RewardComponents]:
    """Play an episode; an ANSWER in it is wrong and ends it."""
    rewards = EpisodeRewards(GOLD, settings)
    steps = []
    for move in moves:
        if move.kind == "ANSWER" and move.ok:
            steps.append(rewards.answer(move.argument, correct=False))
            break
        count = None if move.rows is None else len(move.rows)
        steps.append(rewards.explore(move.kind, move.argument, ok=move.ok, rows=move.rows, row_count=count))
    return steps


def total(steps: Sequence[RewardComponents]) -> float:
    return sum(step.total for step in steps)


# --- layers --------------------------------------------------------------------------------------------------


def test_operational_layer() -> None:
    describe, again, failed, failed_again, fresh, repeat = play(
        [
            Move("DESCRIBE", "t"),
            Move("describe", '"T"'),
            Move("QUERY", "SELECT nope", ok=False),
            Move("QUERY", "SELECT nope", ok=False),
            query("SELECT 1", EMPTY),
            query("select  1;", EMPTY),
        ]
    )
    assert (describe.step_cost, describe.success, describe.new_information, describe.repeat) == (-0.02, 0.02, 0.0, 0.0)
    assert again.repeat == -0.03
    assert (failed.success, failed.new_information, failed.repeat, failed.total) == (0.0, 0.0, 0.0, -0.02)
    assert (failed_again.new_information, failed_again.repeat) == (0.0, -0.03)
    assert (fresh.new_information, repeat.new_information, repeat.repeat) == (0.01, 0.0, -0.03)
    assert [fresh.total, repeat.total] == pytest.approx([0.01, -0.03])


def test_progress_telescopes_over_the_best_query_so_far() -> None:
    steps = play([query("q1", NEAR), query("q2", FULL), query("q3", EMPTY), query("q4", FULL), Move("SAMPLE", "t")])
    assert [step.progress for step in steps] == pytest.approx([0.0375, 0.1125, 0.0, 0.0, 0.0])


def test_the_step_is_clipped() -> None:
    (jump,) = play([query("q", FULL)])
    assert jump.operational + jump.progress > 0.15
    assert jump.total == 0.15
    costly = RewardSettings(step_cost=-0.5)
    assert play([Move("SAMPLE", "t")], costly)[0].total == -0.10


def test_terminal_layer() -> None:
    right = EpisodeRewards(GOLD, DEFAULT).answer("a", correct=True)
    wrong = EpisodeRewards(GOLD, DEFAULT).answer("a", correct=False)
    assert (right.terminal, right.total) == (1.0, 0.98)
    assert (wrong.terminal, wrong.total) == (0.0, -0.02)
    assert right.success == wrong.success == 0.0


def test_an_empty_answer_is_an_ordinary_failed_step() -> None:
    steps = play([Move("ANSWER", "", ok=False), Move("ANSWER", "", ok=False), Move("ANSWER", "x")])
    assert [step.total for step in steps] == pytest.approx([-0.02, -0.05, -0.02])


def test_row_limit_is_what_phi_compares() -> None:
    wanted = Gold(rows=tuple((f"n{i}",) for i in range(10)), ordered=False)
    rewards = EpisodeRewards(wanted, DEFAULT, row_limit=3)
    step = rewards.explore("QUERY", "q", ok=True, rows=wanted.rows[:4], row_count=10)
    assert step.progress == pytest.approx(0.15)


# --- identity of actions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("QUERY", "SELECT a FROM t"), ("query", "  select\n a  from T ; ;")),
        (("QUERY", "SELECT a,b FROM t"), ("QUERY", "SELECT a , b FROM t")),
        (("QUERY", "SELECT 1"), ("QUERY", "SELECT /* x */ 1 -- y")),
        (("QUERY", "SELECT 1"), ("QUERY", "SELECT 1 /* open")),
        (("DESCRIBE", "Singer"), ("DESCRIBE", ' "singer" ')),
        (("SAMPLE", "[a b]"), ("sample", "A B;")),
    ],
)
def test_same_action(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert normalize_action(*first) == normalize_action(*second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("QUERY", "SELECT 'A'"), ("QUERY", "SELECT 'a'")),
        (("QUERY", "SELECT 'a  b'"), ("QUERY", "SELECT 'a b'")),
        (("QUERY", "SELECT '--x', 1"), ("QUERY", "SELECT '--x', 2")),
        (("QUERY", "SELECT 'it''s; X'"), ("QUERY", "SELECT 'it''s; x'")),
        (("QUERY", "SELECT 'a''b'"), ("QUERY", "SELECT 'a' 'b'")),
        (("QUERY", "SELECT ab"), ("QUERY", "SELECT a b")),
        (("QUERY", "SELECT 1 <= 2"), ("QUERY", "SELECT 1 < = 2")),
        (("DESCRIBE", "t"), ("SAMPLE", "t")),
        (("DESCRIBE", "É"), ("DESCRIBE", "é")),
    ],
)
def test_different_actions(first: tuple[str, str], second: tuple[str, str]) -> None:
    assert normalize_action(*first) != normalize_action(*second)


@given(st.sampled_from(["QUERY", "DESCRIBE", "SAMPLE", "ANSWER", "??"]), st.text(alphabet=" aB'\"`[];-/*\n,<=1é"))
def test_identity_ignores_case_of_the_type_and_padding(kind: str, argument: str) -> None:
    assert normalize_action(f" {kind.lower()}\n", f" {argument.strip()} ") == normalize_action(kind, argument.strip())


# --- the bound -----------------------------------------------------------------------------------------------

ALPHABET = (
    query("SELECT 1", FULL),
    query("SELECT 2", EMPTY),
    query("SELECT 3", NEAR),
    query("SELECT 4", HALF),
    Move("DESCRIBE", "t"),
    Move("QUERY", "nonsense", ok=False),
    Move("ANSWER", "wrong"),
)


def test_the_bound_is_reached_by_exhaustive_search_and_never_exceeded() -> None:
    for budget in range(1, 5):
        best = max(total(play(moves)) for moves in product(ALPHABET, repeat=budget))
        assert best == pytest.approx(wrong_total_bound(DEFAULT, budget), abs=TOLERANCE)


def test_the_best_wrong_episode_of_fifteen_steps() -> None:
    fillers = [query(f"SELECT {i}", EMPTY) for i in range(13)]
    climb = [query("near", NEAR), query("full", FULL)]
    assert total(play([*climb, *fillers])) == pytest.approx(wrong_total_bound(DEFAULT, 15)) == pytest.approx(0.30)
    assert total(play([*climb, *fillers[:-1], Move("ANSWER", "wrong")])) == pytest.approx(0.27)


def test_oscillating_gains_nothing() -> None:
    """With the last query's phi, the clip would pay +0.15 for a rise and take only 0.10 for the fall."""
    climb = [query("good 0", FULL)]
    back_and_forth = [query(f"bad {i}", EMPTY) if i % 2 else query(f"good {i}", FULL) for i in range(1, 15)]
    still = [query(f"good {i}", FULL) for i in range(1, 15)]
    assert total(play(climb + back_and_forth)) == total(play(climb + still))
    assert sum(step.progress for step in play(climb + back_and_forth)) == pytest.approx(0.15)
    repeated = [climb[0], query("bad", EMPTY)] * 7
    assert total(play(repeated)) < total(play(climb))


ARGUMENTS = st.sampled_from(["t", "T", "u", "SELECT 1", "select 1;", "SELECT 2", "SELECT 3", ""])
MOVES = st.builds(
    Move,
    kind=st.sampled_from(["QUERY", "QUERY", "QUERY", "DESCRIBE", "SAMPLE", "ANSWER", "DROP"]),
    argument=ARGUMENTS | st.text(max_size=4),
    ok=st.booleans(),
    rows=st.none() | st.sampled_from([FULL, HALF, NEAR, EMPTY, FULL[:1]]),
)
NUMBERS = st.floats(-2, 2)
SETTINGS = st.builds(
    RewardSettings,
    step_cost=NUMBERS,
    success=NUMBERS,
    new_information=NUMBERS,
    repeat=NUMBERS,
    progress_scale=NUMBERS,
    clip_low=st.floats(-3, 0.5),
    clip_high=st.floats(0.5, 3),
)


@given(st.lists(MOVES, min_size=1, max_size=15))
def test_no_wrong_episode_exceeds_the_default_bound(moves: list[Move]) -> None:
    steps = play(moves)
    assert total(steps) <= min(wrong_total_bound(DEFAULT, len(moves)), 0.30) + TOLERANCE
    assert min(step.progress for step in steps) >= 0
    assert sum(step.progress for step in steps) <= DEFAULT.progress_scale + TOLERANCE


@given(st.lists(MOVES, min_size=1, max_size=15), SETTINGS)
def test_no_wrong_episode_exceeds_the_bound_of_any_settings_and_components_add_up(
    moves: list[Move], settings: RewardSettings
) -> None:
    steps = play(moves, settings)
    assert total(steps) <= wrong_total_bound(settings, 15) + TOLERANCE
    for step in steps:
        assert step.operational == step.step_cost + step.success + step.new_information + step.repeat
        clipped = min(max(step.operational + step.progress, settings.clip_low), settings.clip_high)
        assert step.total == clipped + step.terminal


@given(sql=st.text(alphabet="aB1 .$<=>!|;()\t\n*,-/\u00e9", max_size=40))
def test_a_comment_has_no_part_in_the_identity(sql: str) -> None:
    assert normalize_action("QUERY", sql) == normalize_action("QUERY", "/**/" + sql)
