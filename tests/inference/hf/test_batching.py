"""The batch rule, without a clock."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.hf.batching import Batcher, Start, WaitUntil

LINGER = 0.25


def batcher(*keys: int, max_batch: int = 64) -> Batcher:
    made = Batcher(max_batch, LINGER)
    for key in keys:
        made.join(key)
    return made


def test_starts_at_once_when_every_open_session_waits() -> None:
    b = batcher(3, 1, 2)
    for key in (3, 1, 2):
        b.submit(key, 0.0)
    assert b.poll(0.0) == Start((1, 2, 3))
    assert b.running


def test_starts_at_once_when_a_full_batch_waits() -> None:
    b = batcher(0, 1, 2, 3, max_batch=2)
    b.submit(3, 0.0)
    assert b.poll(0.0) == WaitUntil(LINGER)
    b.submit(1, 0.0)
    assert b.poll(0.0) == Start((1, 3))


def test_lingers_for_missing_sessions_and_no_longer() -> None:
    b = batcher(0, 1)
    b.submit(0, 10.0)
    assert b.poll(10.0) == WaitUntil(10.0 + LINGER)
    assert b.poll(10.0 + LINGER) == Start((0,))


def test_lingering_counts_from_when_the_engine_is_free() -> None:
    b = batcher(0, 1)
    b.submit(0, 0.0)
    b.submit(1, 0.0)
    assert b.poll(0.0) == Start((0, 1))
    b.submit(1, 1.0)
    assert b.poll(1.0) == WaitUntil(math.inf)
    b.finish(5.0)
    assert b.poll(5.0) == WaitUntil(5.0 + LINGER)


def test_a_session_that_leaves_is_no_longer_waited_for() -> None:
    b = batcher(0, 1)
    b.submit(0, 0.0)
    assert isinstance(b.poll(0.0), WaitUntil)
    b.leave(1)
    assert b.poll(0.0) == Start((0,))


def test_leaving_withdraws_the_request() -> None:
    b = batcher(0, 1)
    b.submit(0, 0.0)
    b.leave(0)
    assert b.poll(100.0) == WaitUntil(math.inf)


def test_earlier_turns_go_first_then_smaller_keys() -> None:
    b = batcher(0, 1, 2, max_batch=2)
    b.submit(0, 0.0)
    b.submit(1, 0.0)
    assert b.poll(0.0) == Start((0, 1))
    b.finish(0.0)
    for key in (1, 0, 2):
        b.submit(key, 0.0)
    assert b.poll(0.0) == Start((2, 0))


def test_a_key_is_open_once_and_waits_once() -> None:
    b = batcher(0)
    with pytest.raises(ValueError, match="open already"):
        b.join(0)
    b.submit(0, 0.0)
    with pytest.raises(ValueError, match="waits already"):
        b.submit(0, 0.0)


@pytest.mark.parametrize(("max_batch", "linger_s"), [(0, 0.1), (1, -0.1), (1, math.inf), (1, math.nan)])
def test_refuses_settings_that_cannot_work(max_batch: int, linger_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Batcher(max_batch, linger_s)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "submit", "withdraw", "finish", "tick"]),
        st.integers(min_value=0, max_value=5),
    ),
    max_size=60,
)


@given(EVENTS, st.integers(min_value=1, max_value=4))
def test_every_request_leaves_once_in_a_legal_batch(events: list[tuple[str, int]], max_batch: int) -> None:
    b = Batcher(max_batch, LINGER)
    turns: dict[int, int] = {}
    waiting: dict[int, int] = {}
    now, idle_since, oldest = 0.0, 0.0, 0.0
    for event, key in events:
        if event == "join" and key not in turns:
            b.join(key)
            turns[key] = 0
        elif event == "leave" and key in turns:
            b.leave(key)
            del turns[key]
            waiting.pop(key, None)
        elif event == "submit" and key in turns and key not in waiting:
            b.submit(key, now)
            waiting[key] = turns[key]
            turns[key] += 1
            oldest = now if len(waiting) == 1 else oldest
        elif event == "withdraw" and key in waiting:
            b.withdraw(key)
            del waiting[key]
        elif event == "finish" and b.running:
            b.finish(now)
            idle_since = now
        elif event == "tick":
            now += 0.1 * key
        was_running = b.running
        decision = b.poll(now)
        assert b.sessions == len(turns)
        if isinstance(decision, Start):
            ranked = sorted(waiting, key=lambda k: (waiting[k], k))
            assert not was_running
            assert decision.keys == tuple(ranked[:max_batch])
            for k in decision.keys:
                del waiting[k]
        elif waiting and not was_running:
            assert len(waiting) < min(max_batch, len(turns))
            assert max(oldest, idle_since) <= decision.deadline - LINGER + 1e-9
            assert now < decision.deadline <= now + LINGER
        else:
            assert decision.deadline == math.inf
