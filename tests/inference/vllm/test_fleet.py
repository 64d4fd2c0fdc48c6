"""Which replica gets a request: sticky, spread, and never one that is not ready."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inference.vllm.fleet import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    REPORT_EVERY_S,
    Fleet,
    Replica,
    Wait,
    every_server,
    look_up,
    pause_s,
    split_urls,
)

V4, V6 = socket.AF_INET, socket.AF_INET6
NAMES = {
    "inference": [(V4, "10.0.0.3"), (V4, "10.0.0.2"), (V4, "10.0.0.2")],
    "six": [(V6, "fd00::2"), (V6, "fd00::1")],
    "both": [(V4, "10.0.0.9"), (V6, "fd00::9")],
}
URLS = ("http://a:1", "http://b:2", "http://c:3")


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet.of(URLS)
    for replica in fleet.replicas:
        fleet.joined(replica, 1, None)
    return fleet


def test_an_episode_stays_where_it_is(fleet: Fleet) -> None:
    one, two, three = fleet.replicas
    two.in_flight = three.in_flight = 50
    assert fleet.choose(two) is two
    assert fleet.choose() is one


def test_new_episodes_go_where_least_is_in_flight(fleet: Fleet) -> None:
    for _ in range(30):
        chosen = fleet.choose()
        assert chosen is not None
        chosen.in_flight += 1
    assert [replica.in_flight for replica in fleet.replicas] == [10, 10, 10]


def test_a_wait_is_reported_at_once_and_every_few_seconds_until_it_is_over() -> None:
    wait = Wait(began=100.0, limit_s=2.5 * REPORT_EVERY_S)
    reported = [now for now in range(100, 120) if URLS[0] in wait.report(now, URLS[0])]
    assert reported == [100, 105, 110, 115]
    assert [wait.left_s(now) for now in (100, 110, 115)] == [12.5, 2.5, -2.5]


def test_a_replica_advances_when_it_has_computed_more() -> None:
    replica = Replica(URLS[0])
    for now, computed in enumerate((0, 0, 5, 5, 5)):
        replica.counted(computed, now)
    assert (replica.advanced_at, replica.counted_at) == (2, 4)
    replica.counted(3, 5)  # started anew, by somebody else
    assert replica.advanced_at == 5


def test_ranks_that_know_nothing_of_each_other_use_all_replicas() -> None:
    begun = [0] * 100
    for rank in range(50):
        fleet = Fleet.of(f"http://host-{number}:1" for number in range(len(begun)))
        fleet.chance = random.Random(rank)
        for replica in fleet.replicas:
            fleet.joined(replica, 1, None)
        for _ in range(20):
            chosen = fleet.choose()
            assert chosen is not None
            chosen.in_flight += 1
        for number, replica in enumerate(fleet.replicas):
            begun[number] += replica.in_flight
    assert sum(begun) == 1_000
    assert 1 <= min(begun) <= max(begun) <= 25, "ten each, give or take"


def test_an_episode_moves_when_its_replica_is_lost_and_nobody_is_chosen_when_all_are(fleet: Fleet) -> None:
    one, two, three = fleet.replicas
    assert fleet.lost(one, "gone", now=5.0)
    assert not fleet.lost(one, "still gone", now=5.0), "it was not ready before"
    assert fleet.choose(one) in (two, three)
    fleet.lost(two, "gone", now=5.0)
    fleet.lost(three, "gone too", now=5.0)
    assert fleet.choose(one) is None
    assert fleet.reasons() == "still gone; gone; gone too"


def test_a_replica_is_tried_again_after_a_pause_that_grows(fleet: Fleet) -> None:
    one = fleet.replicas[0]
    pauses = []
    for _ in range(12):
        fleet.lost(one, "gone", now=100.0)
        pauses.append(one.retry_at - 100.0)
        assert fleet.due(100.0) == []
        assert fleet.due(one.retry_at) == [one]
        assert fleet.next_due() == one.retry_at
    assert FIRST_PAUSE_S / 2 <= pauses[0] <= FIRST_PAUSE_S
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    assert fleet.joined(one, 2, "x"), "it was away"
    assert not fleet.joined(one, 3, "x")
    assert (fleet.next_due(), one.failures, one.version) == (None, 0, 3)


def test_a_fleet_of_which_nothing_is_known_is_due_at_once() -> None:
    fleet = Fleet.of(URLS)
    assert fleet.choose() is None
    assert len(fleet.due(0.0)) == 3
    assert not fleet.joined(fleet.replicas[0], 0, None), "a first meeting is no return"


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_bounded_and_positive(failures: int, jitter: float) -> None:
    assert FIRST_PAUSE_S / 2 <= pause_s(failures, jitter) <= LONGEST_PAUSE_S


def test_urls_are_split_and_checked() -> None:
    assert split_urls("http://a:1, http://b:2/,http://a:1") == ("http://a:1", "http://b:2")
    for wrong in ("a:8000", "http://a:1/v1", "ws://a:1", "http://a:1?x=1"):
        with pytest.raises(ValueError, match="http://host:8001"):
            split_urls(wrong)
    with pytest.raises(ValueError, match="no server is named"):
        split_urls(" , ")


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet.of(URLS)
        self.fleet.chance = random.Random(0)
        self.now = 0.0
        self.version = 0
        self.held: list[Replica] = []

    @rule(index=st.integers(0, 2))
    def join(self, index: int) -> None:
        self.fleet.joined(self.fleet.replicas[index], self.version, None)

    @rule(index=st.integers(0, 2))
    def lose(self, index: int) -> None:
        self.fleet.lost(self.fleet.replicas[index], "gone", self.now)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(index=st.none() | st.integers(0, 2))
    def begin(self, index: int | None) -> None:
        preferred = None if index is None else self.fleet.replicas[index]
        chosen = self.fleet.choose(preferred)
        assert (chosen is None) == (not self.fleet.ready)
        if chosen is not None:
            assert chosen.is_ready
            if preferred is not None and preferred.is_ready:
                assert chosen is preferred
            chosen.in_flight += 1
            self.held.append(chosen)

    @rule()
    def end(self) -> None:
        if self.held:
            self.held.pop().in_flight -= 1

    @invariant()
    def everybody_is_ready_or_will_be_tried_again(self) -> None:
        for replica in self.fleet.replicas:
            assert replica.is_ready or replica in self.fleet.due(self.now + LONGEST_PAUSE_S)
            assert not (replica.is_ready and replica in self.fleet.due(1e9))


TestFleetMachine = FleetMachine.TestCase


@pytest.mark.parametrize(
    ("urls", "servers"),
    [
        (["http://inference:8000", "http://10.0.0.2:8000"], ("http://10.0.0.2:8000", "http://10.0.0.3:8000")),
        (["http://six"], ("http://[fd00::1]:80", "http://[fd00::2]:80")),
        # A name with one address of each kind is one machine; a certificate is for the name; one may be still to come.
        (["http://both:8000"], ("http://both:8000",)),
        (["https://inference:8000"], ("https://inference:8000",)),
        (["http://later:8000", "http://both:1"], ("http://later:8000", "http://both:1")),
    ],
)
def test_a_name_with_several_addresses_is_several_servers(urls: list[str], servers: tuple[str, ...]) -> None:
    def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
        if host in NAMES or host == "10.0.0.2":
            return NAMES.get(host, [(V4, host)])
        raise socket.gaierror("there is no such name")

    assert every_server(urls, resolve) == servers


def test_the_system_resolves() -> None:
    assert (V4, "127.0.0.1") in look_up("localhost", 80)
    assert every_server(["http://127.0.0.1:8000"]) == ("http://127.0.0.1:8000",)
