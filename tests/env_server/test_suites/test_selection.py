"""The choice of candidates, against what can be checked about any choice."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from env_server.test_suites.selection import KILLS_WANTED, choose

kill_lists = st.lists(st.frozensets(st.sampled_from("abcdefgh")), max_size=10)


def test_the_one_that_kills_most_comes_before_two_that_kill_less() -> None:
    assert choose([{"a"}, {"b"}, {"a", "b"}], 0, 1) == [2]


def test_a_first_kill_counts_more_than_second_ones() -> None:
    assert choose([{"a", "b", "c"}, {"a", "b", "c"}, {"d"}], 0, 2) == [0, 2]


def test_the_earlier_of_equals_is_taken() -> None:
    assert choose([{"a"}, {"a"}, {"a"}], 0, 2) == [0, 1]


def test_those_that_add_nothing_are_taken_only_to_reach_the_least() -> None:
    useless: list[set[str]] = [set(), set(), set()]
    assert choose(useless, 0, 3) == []
    assert choose(useless, 2, 3) == [0, 1]
    assert choose(useless, 5, 8) == [0, 1, 2]


@given(kills=kill_lists, least=st.integers(0, 4), most=st.integers(0, 10))
def test_every_mutant_is_killed_and_as_often_as_it_can_be(kills: list[frozenset[str]], least: int, most: int) -> None:
    chosen = choose(kills, least, most)
    assert chosen == sorted(set(chosen))
    assert min(least, most, len(kills)) <= len(chosen)
    reached = Counter(mutant for i in chosen for mutant in kills[i])
    possible = Counter(mutant for killed in kills for mutant in killed)
    assert len(chosen) <= max(most, len(possible))
    for mutant, times in possible.items():
        assert reached[mutant] >= (min(times, KILLS_WANTED) if len(chosen) < most else 1)


@given(kills=kill_lists)
def test_what_kills_nothing_new_is_left_out(kills: list[frozenset[str]]) -> None:
    chosen = choose(kills, 0, 0)
    assert len(chosen) <= len({mutant for killed in kills for mutant in killed})
