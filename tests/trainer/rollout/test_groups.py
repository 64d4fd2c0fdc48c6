"""Groups without signal are replaced: bounded, all counted, and no faster group is preferred."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import pvariance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_server.types import SQLAction
from tests.trainer.records import make_record
from trainer.rollout.client import EpisodeRequest
from trainer.rollout.episodes import Episode, Outcome, TokenRow, has_signal
from trainer.rollout.failures import Failures, RolloutError
from trainer.rollout.groups import Group, PlayedGroups, choose_groups, most_spread, play_groups

SIZE = 2


class Client:
    """Plays each group in its number of turns of the event loop, all wrong or with a right one. Stands for a client."""

    def __init__(self, delays: Sequence[int], informative: Sequence[bool] = (False,) * 100) -> None:
        self._delays = delays
        self._informative = informative
        self.firsts: list[int] = []

    async def play(self, requests: Sequence[EpisodeRequest], *, failures: Failures, first: int) -> list[Episode]:
        self.firsts.append(first)
        number = int(requests[0].question_id)
        for _ in range(self._delays[number % len(self._delays)]):
            await asyncio.sleep(0)
        if number == 99:
            failures.add("no server")
        row = TokenRow([], [], [], [], [])
        outcomes = [Outcome.WRONG] * len(requests)
        if self._informative[number] or requests[0].given:
            outcomes[-1] = Outcome.CORRECT
        return [
            Episode(f"{number}#{request.seed}", request.question_id, "d", "", "easy", "f", outcome, (), row)
            for request, outcome in zip(requests, outcomes, strict=True)
        ]


def played(
    informative: Sequence[bool], delays: Sequence[int], count: int, extra: int, guidable: Collection[int] = ()
) -> PlayedGroups:
    """Play groups; those of `guidable` numbers have signal where they are given a step."""
    client: Any = Client(delays, informative)
    given = (SQLAction(action_type="DESCRIBE", argument="pets"),)

    def draw(number: int) -> list[EpisodeRequest]:
        return [EpisodeRequest(str(number), seed) for seed in range(SIZE)]

    def guide(number: int) -> list[EpisodeRequest]:
        return [replace(request, given=given) for request in draw(number)] if number in guidable else []

    async def run() -> PlayedGroups:
        return await play_groups(client, draw, count, extra, Failures(100, 1.0), guide)

    result = asyncio.run(run())
    assert len(set(client.firsts)) == len(client.firsts), "no two requests have one number"
    return result


@settings(deadline=None)
@given(
    informative=st.lists(st.booleans(), min_size=12, max_size=12),
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    others=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    count=st.integers(1, 4),
    extra=st.integers(0, 8),
)
def test_what_is_kept_depends_on_the_order_of_the_draw_alone(
    informative: list[bool], delays: list[int], others: list[int], count: int, extra: int
) -> None:
    groups = played(informative, delays, count, extra)
    kept, replaced = groups.kept, groups.replaced
    assert len(kept) == count
    numbers = sorted(group.number for group in (*kept, *replaced))
    assert numbers == list(range(len(numbers))), "every group that was drawn is there, once"
    assert len(numbers) <= count + extra
    assert all(len(group.episodes) == SIZE for group in (*kept, *replaced))
    assert [group.number for group in kept] == sorted(group.number for group in kept)
    assert not any(group.has_signal for group in replaced), "what was paid for and has signal is used"
    if not all(group.has_signal for group in kept):
        assert len(numbers) == count + extra, "only the bound leaves a group without signal"
    again = played(informative, others, count, extra)
    assert [g.number for g in again.kept] == [g.number for g in kept], "however fast each of them was"


@settings(deadline=None)
@given(
    informative=st.lists(st.booleans(), min_size=12, max_size=12),
    guidable=st.sets(st.integers(0, 11)),
    delays=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    count=st.integers(1, 4),
    extra=st.integers(0, 8),
)
def test_a_group_that_is_all_wrong_is_played_again_with_steps_given(
    informative: list[bool], guidable: set[int], delays: list[int], count: int, extra: int
) -> None:
    groups = played(informative, delays, count, extra, guidable)
    kept, everything = groups.kept, [*groups.kept, *groups.replaced]
    unguided = {group.number for group in everything if not group.guided}
    guided = {group.number for group in everything if group.guided}
    assert unguided == set(range(len(unguided))), "each question that was drawn was asked without help first"
    assert guided == {number for number in unguided & guidable if not informative[number]}
    assert len(everything) == len(unguided) + len(guided)
    assert len(kept) == len({group.number for group in kept}) == count, "of one question, one group at most"
    assert all(group.has_signal for group in kept if group.guided)
    assert not any(group.has_signal for group in groups.replaced)
    if not all(group.has_signal for group in kept):
        assert len(unguided) == count + extra


def test_a_guided_group_without_signal_does_not_take_the_place_of_the_unguided_one() -> None:
    groups = [Group(0, (), False), Group(0, (), False, guided=True), Group(1, (), False), Group(1, (), True, True)]
    chosen = choose_groups(groups, 2)
    assert [(group.number, group.guided) for group in chosen.kept] == [(0, False), (1, True)]


def test_of_those_without_signal_the_first_drawn_fill_up() -> None:
    groups = [Group(number, (), number in (1, 4)) for number in (4, 3, 2, 1, 0)]
    chosen = choose_groups(groups, 3)
    assert [group.number for group in chosen.kept] == [0, 1, 4]
    assert [group.number for group in chosen.replaced] == [2, 3]


@given(st.lists(st.integers(-3, 3), max_size=9), st.integers(0, 9))
def test_no_other_choice_has_a_larger_variance(values: list[int], count: int) -> None:
    chosen = most_spread(values, count)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(values))
    if chosen:
        others = combinations(values, len(chosen))
        assert pvariance([values[place] for place in chosen]) == max(pvariance(other) for other in others)


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ([0, 0, 1, 0, 0, 0], [0, 2]),
        ([0.2, 0.1, 0.9, 0.3], [1, 2]),
        ([1, 1, 1, 1], [0, 1]),
        ([0, 1, 1, 1], [0, 1]),
        ([5, 4], [0, 1]),
    ],
)
def test_the_best_and_the_worst_are_taken(values: list[float], chosen: list[int]) -> None:
    assert most_spread(values, 2) == chosen


def test_too_many_failures_end_it_with_their_own_error() -> None:
    client: Any = Client([0])

    def draw(number: int) -> list[EpisodeRequest]:
        return [EpisodeRequest("99", 0)]

    async def run() -> None:
        await play_groups(client, draw, 3, 3, Failures(2, 0.0))

    with pytest.raises(RolloutError, match="no server"):
        asyncio.run(run())


RIGHT, WRONG, LOST = Outcome.CORRECT, Outcome.WRONG, Outcome.FAILED


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([RIGHT, WRONG], True),
        ([RIGHT, Outcome.OUT_OF_BUDGET, RIGHT], True),
        ([RIGHT, RIGHT], False),
        ([WRONG, Outcome.OUT_OF_TOKENS, Outcome.OUT_OF_BUDGET], False),
        ([RIGHT, RIGHT, LOST], False),
        ([WRONG, LOST], False),
        ([RIGHT, WRONG, LOST, LOST], True),
        ([LOST, LOST], False),
        ([], False),
    ],
)
def test_a_group_has_signal_where_correctness_differs_within_it(outcomes: list[Outcome], expected: bool) -> None:
    group = [make_record("q", outcome.value) for outcome in outcomes]
    assert has_signal(group) is expected
