"""When a worker that died is started again, and what becomes of one that does not end. Whole servers: test_run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.service.settings import ServiceSettings
from env_server.service.workers.supervisor import LONGEST_DELAY_S, SETTLED_S, START_TRIES, Restarts, Supervisor

deaths = st.lists(st.tuples(st.floats(0, 2 * SETTLED_S), st.booleans()), max_size=60)


def test_one_that_had_served_is_replaced_at_once() -> None:
    restarts = Restarts()
    assert [restarts.delay(SETTLED_S, others_serve=False) for _ in range(100)] == [0.0] * 100


def test_one_that_does_not_start_is_tried_ever_later_and_then_given_up() -> None:
    restarts = Restarts()
    assert [restarts.delay(0.0, others_serve=False) for _ in range(START_TRIES)] == [0.0, 0.1, 0.2, 0.4, None]


def test_while_others_serve_it_is_tried_for_ever() -> None:
    restarts = Restarts()
    delays = [restarts.delay(0.0, others_serve=True) for _ in range(1000)]
    assert None not in delays
    assert delays[-1] == LONGEST_DELAY_S


@given(deaths)
def test_delays_are_bounded_and_only_repeated_failures_without_others_end_it(deaths: list[tuple[float, bool]]) -> None:
    restarts = Restarts()
    failures = 0
    before = 0.0
    for served_s, others_serve in deaths:
        delay = restarts.delay(served_s, others_serve=others_serve)
        failures = 0 if served_s >= SETTLED_S else failures + 1
        if delay is None:
            assert failures >= START_TRIES
            assert not others_serve
            continue
        assert 0.0 <= delay <= LONGEST_DELAY_S
        if failures > 1:
            assert delay >= before
        before = delay
        assert (delay == 0.0) == (failures <= 1)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A parent that has not started its worker."""

    def create_app(*_: object) -> object:
        raise AssertionError("no worker is started")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Supervisor(ServiceSettings(), None, create_app, [[listening]])  # type: ignore[arg-type]


def test_a_worker_that_outlasts_the_grace_period_is_killed(supervisor: Supervisor) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            supervisor._workers[0].pid = process.pid
            supervisor._stop(signal.SIGTERM)
            supervisor._next_check = 0.0
            supervisor._check()
            assert process.poll() is None, "it has the grace period"
            supervisor._next_check = supervisor._kill_at = 0.0
            supervisor._check()
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_worker_that_has_served_quotes_no_statement_in_its_exit_reason(supervisor: Supervisor) -> None:
    (worker,), error = supervisor._workers, ValueError("near SECRET")
    assert supervisor._exit_reason(worker, error) == b"ValueError: near SECRET"
    supervisor._beats.row(worker.number)[0] += 1
    assert supervisor._exit_reason(worker, error) == b"ValueError"
