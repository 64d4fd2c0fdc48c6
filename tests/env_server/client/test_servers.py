"""URLs, addresses, and the board: where the next session goes, and how long a server is backed off from."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from env_server.client.errors import AddressError
from env_server.client.servers import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    Loan,
    Server,
    ServerBoard,
    apart,
    look_up,
    parse_servers,
)

A, B, C = (Server("ws", host, 8000) for host in "abc")


def board_of(*servers: Server, seed: int = 0) -> ServerBoard:
    return ServerBoard(servers, random.Random(seed))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("ws://host:8000", "ws://host:8000/ws"),
        ("ws://host:8000/", "ws://host:8000/ws"),
        ("ws://host:8000/ws", "ws://host:8000/ws"),
        ("ws://host:8000/ws/", "ws://host:8000/ws"),
        ("http://host:8000", "ws://host:8000/ws"),
        ("http://host", "ws://host:80/ws"),
        ("https://host", "wss://host:443/ws"),
        ("wss://host/env/sql", "wss://host:443/env/sql/ws"),
        ("wss://host/env/sql/ws", "wss://host:443/env/sql/ws"),
        ("WS://Host:8000", "ws://host:8000/ws"),
        ("ws://[::1]:8000", "ws://[::1]:8000/ws"),
        (" ws://127.0.0.1:8000 ", "ws://127.0.0.1:8000/ws"),
    ],
)
def test_a_url_in_any_of_its_forms(text: str, url: str) -> None:
    (server,) = parse_servers(text)
    assert server.url == url
    assert server.secure == url.startswith("wss")


def test_several_urls_with_commas_or_as_a_list() -> None:
    expected = (A, B)
    assert parse_servers("ws://a:8000, ws://b:8000/ws,") == expected
    assert parse_servers(["http://a:8000", "ws://b:8000"]) == expected
    assert parse_servers("ws://a:8000,ws://b:8000,http://a:8000/ws") == expected, "a server counts once"


@pytest.mark.parametrize(
    "text", ["", " , ", "host:8000", "localhost", "ftp://host", "ws://", "ws://:8000", "ws://host:port", "ws://[::1"]
)
def test_what_is_no_url_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(AddressError, match=r"environment server .*: .*URL"):
        parse_servers(text)


@pytest.mark.parametrize("text", ["ws://me:geheim@host", "ws://geheim@host", "ws://host/?t=geheim", "ws://host#geheim"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(AddressError, match="leave user names, tokens and queries out") as refused:
        parse_servers(text)
    assert "geheim" not in str(refused.value)


def test_a_name_with_several_addresses_is_several_servers() -> None:
    several = apart(A, ["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    assert [server.address for server in several] == ["10.0.0.1", "10.0.0.2"]
    assert {server.url for server in several} == {A.url}, "the handshake and TLS still see the name"
    assert [server.name for server in several] == ["ws://a:8000 (10.0.0.1)", "ws://a:8000 (10.0.0.2)"]


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::1"], ["::1", "127.0.0.1"], ["::1", "127.0.0.1", "::1"]])
def test_a_name_with_one_address_of_each_kind_is_one_machine(addresses: Sequence[str]) -> None:
    assert apart(A, addresses) == (A,)


def test_of_both_kinds_the_more_numerous_counts() -> None:
    assert len(apart(A, ["::1", "::2", "10.0.0.1"])) == 2
    assert {server.address for server in apart(A, ["::1", "10.0.0.1", "10.0.0.2"])} == {"10.0.0.1", "10.0.0.2"}


async def test_addresses_are_looked_up() -> None:
    servers = parse_servers("ws://localhost:8000,ws://127.0.0.1:8001,ws://[::1]:8002")
    assert await look_up(servers) == servers


def test_equals_are_chosen_among_at_random() -> None:
    chosen = Counter(board_of(A, B, seed=seed).choose(0.0) for seed in range(100))
    assert min(chosen[A], chosen[B]) > 25


def test_backoffs_grow_up_to_a_bound() -> None:
    board, now, backoffs = board_of(A), 0.0, []
    for _ in range(40):
        board.failed(A, now)
        backoffs.append(board.backoff(now))
        now += backoffs[-1]
    bounds = [min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**n) for n in range(40)]
    assert all(bound / 2 <= backoff <= bound for backoff, bound in zip(backoffs, bounds, strict=True))
    assert len(set(backoffs)) == len(backoffs), "each is drawn"


def test_a_trial_that_told_nothing_does_not_block_the_server() -> None:
    board = board_of(A)
    board.failed(A, 0.0)
    retry_at = board.backoff(0.0)
    board.give_back(board.lend(A))
    assert board.choose(retry_at) == A


def test_what_ended_one_session_may_have_ended_those_that_were_begun_before() -> None:
    board = board_of(A, B)
    one, other, elsewhere = board.lend(A), board.lend(A), board.lend(B)
    assert not board.outdated(one)
    board.failed(A, 0.0, busy=True)
    assert not board.outdated(one), "a full server keeps its sessions"
    now = board.backoff(0.0)
    board.failed(A, now)
    assert [board.outdated(loan) for loan in (one, other, elsewhere)] == [True, True, False]
    trial = board.lend(A)
    board.succeeded(trial)
    assert board.outdated(other), "it is well again, which it was not when the session was lost"
    assert not board.outdated(trial)
    board.failed(A, now + board.backoff(now))
    assert board.outdated(trial)


def test_a_session_to_reuse_is_no_trial_and_may_be_on_a_server_in_backoff() -> None:
    board = board_of(A, B)
    board.failed(A, 0.0)
    loan = board.lend(B)
    assert board.choose(0.0) == B
    assert board.choose(0.0, ready=[A]) == A
    board.lend(A, reused=True)
    board.give_back(loan)
    retry_at = board.backoff(0.0)
    board.lend(B)
    assert board.choose(retry_at) in (A, B)
    assert board.choose(retry_at, skip=[B]) == A, "a reused session is not what A is judged by"


def test_the_one_that_wakes_first_when_all_rest() -> None:
    board = board_of(A, B)
    board.failed(A, 0.0)
    board.failed(B, 10.0)
    assert board.choose(10.1, skip=[A]) is None
    assert board.soonest() == A
    assert board.soonest(skip=[A]) == B
    assert board.soonest(skip=[A, B]) is None


def test_what_is_known_of_a_server_survives_another_look_up() -> None:
    board = board_of(A, B)
    board.lend(A)
    gone = board.lend(B)
    board.failed(A, 0.0)
    board.replace([A, C])
    assert board.servers == (A, C)
    assert board.choose(0.0) == C
    assert board.in_flight(A) == 1
    assert not board.failed(B, 0.0)
    assert not board.succeeded(gone)
    board.give_back(gone)
    assert board.in_flight(B) == 0


class BoardMachine(RuleBasedStateMachine):
    """Sessions come, go and fail in any order; what the board promises holds throughout."""

    @initialize(count=st.integers(1, 4), seed=st.integers(0, 1_000))
    def begin(self, count: int, seed: int) -> None:
        self.servers = [Server("ws", f"host{n}", 1) for n in range(count)]
        self.board = ServerBoard(self.servers, random.Random(seed))
        self.now = 0.0
        self.lent: list[Loan] = []
        self.trials: set[Loan] = set()
        self.failing: set[Server] = set()
        self.failed_at: dict[Server, float] = {}

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def open(self) -> None:
        server = self.board.choose(self.now)
        if server is None:
            assert set(self.servers) == self.failing, "a server that works is always chosen from"
            return
        working = [s for s in self.servers if s not in self.failing]
        assert all(self.board.in_flight(server) <= self.board.in_flight(other) for other in working)
        assert server not in {loan.server for loan in self.trials}
        if server in self.failing:
            assert self.now - self.failed_at[server] >= FIRST_BACKOFF_S / 2
        self.lend(server)

    @rule()
    def open_on_one_that_may_rest(self) -> None:
        server = self.board.soonest()
        assert server is not None
        self.lend(server)

    def lend(self, server: Server) -> None:
        loan = self.board.lend(server)
        self.lent.append(loan)
        if server in self.failing:
            self.trials.add(loan)

    @precondition(lambda self: self.lent)
    @rule()
    def reuse(self) -> None:
        self.lent.append(self.board.lend(self.lent[0].server, reused=True))

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), works=st.booleans())
    def tell(self, data: st.DataObject, works: bool) -> None:
        loan = data.draw(st.sampled_from(self.lent))
        server = loan.server
        if works:
            assert self.board.succeeded(loan) == (loan in self.trials)
            if loan in self.trials:
                self.failing.discard(server)
                self.end_trials(server)
            return
        in_backoff = self.now < self.board._standings[server].retry_at
        news = self.board.failed(server, self.now)
        assert news == (server not in self.failing)
        if not in_backoff:
            self.end_trials(server)
        if news:
            self.failed_at[server] = self.now
        self.failing.add(server)

    def end_trials(self, server: Server) -> None:
        self.trials -= {loan for loan in self.trials if loan.server == server}

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        loan = data.draw(st.sampled_from(self.lent))
        self.lent.remove(loan)
        self.trials.discard(loan)
        self.board.give_back(loan)

    @invariant()
    def every_session_is_counted(self) -> None:
        if hasattr(self, "board"):
            assert [self.board.in_flight(s) for s in self.servers] == [
                sum(loan.server == s for loan in self.lent) for s in self.servers
            ]

    @invariant()
    def no_backoff_is_longer_than_the_bound(self) -> None:
        if hasattr(self, "board"):
            assert 0.0 <= self.board.backoff(self.now) <= LONGEST_BACKOFF_S
            for server in set(self.servers) - {loan.server for loan in self.trials}:
                others = [other for other in self.servers if other != server]
                assert self.board.choose(self.now + LONGEST_BACKOFF_S, skip=others) == server


TestBoard = BoardMachine.TestCase
TestBoard.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
