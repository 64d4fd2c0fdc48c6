"""The queue of a simulated server, against sums done by hand and against properties that hold for every load."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.simulated.profile import Faults, ServerProfile
from inference.simulated.replica import Job, Replica

PLAIN = ServerProfile(max_sequences=4, step_s=0.1, step_s_per_sequence=0.05, prefill_tokens_per_s=100.0)


def ends(replica: Replica, arrivals: list[tuple[float, Job]]) -> dict[int, float]:
    """Run to the end; when each job ended, by its place in the list."""
    places = {id(job): place for place, (_, job) in enumerate(arrivals)}
    found: dict[int, float] = {}
    left = sorted(arrivals, key=lambda arrival: arrival[0])
    now = 0.0
    while left or replica.in_flight:
        now = min(left[0][0] if left else math.inf, replica.next_event())
        for job in replica.advance(now):
            found[places[id(job)]] = now
        while left and left[0][0] <= now:
            replica.submit(now, left.pop(0)[1])
    return found


def test_one_request_reads_its_prompt_and_takes_a_step_for_each_token() -> None:
    found = ends(Replica(PLAIN), [(1.0, Job(50, 10))])
    assert found[0] == pytest.approx(1.0 + 0.5 + 10.5 * 0.1)


def test_the_front_end_and_the_network_come_before_the_batch() -> None:
    profile = ServerProfile(4, 0.1, 0.0, 100.0, request_s=0.2, network_s=0.3)
    found = ends(Replica(profile), [(0.0, Job(0, 1)), (0.0, Job(0, 1))])
    assert found[0] == pytest.approx(0.3 + 0.2 + 0.15)
    assert found[1] == pytest.approx(0.3 + 0.4 + 0.15)


def test_sequences_share_their_steps_and_a_prompt_stops_them() -> None:
    found = ends(Replica(PLAIN), [(0.0, Job(0, 2)), (0.0, Job(0, 4)), (0.0, Job(20, 4))])
    # Three of them: steps of 0.2 s, after 0.2 s for the prompt; then two: steps of 0.15 s.
    assert found[0] == pytest.approx(0.2 + 2.5 * 0.2)
    assert found[1] == found[2] == pytest.approx(0.2 + 2.5 * 0.2 + 2 * 0.15)


def test_who_finds_the_batch_full_waits_for_a_place() -> None:
    replica = Replica(ServerProfile(1, 0.1, 0.0, 1e9))
    found = ends(replica, [(0.0, Job(0, 10)), (0.0, Job(0, 10))])
    assert found[0] == pytest.approx(1.05)
    assert found[1] == pytest.approx(2.10)
    assert replica.usage.full_s == pytest.approx(1.05)
    assert (replica.usage.jobs, replica.usage.new_tokens) == (2, 20)


def test_who_leaves_makes_room_and_the_others_are_faster() -> None:
    replica = Replica(PLAIN)
    kept, left = Job(0, 10), Job(0, 10)
    for job in (kept, left):
        replica.submit(0.0, job)
    assert replica.advance(0.75) == []
    replica.withdraw(left)
    # Five of 10.5 steps took 0.15 s each; the others take 0.1 s.
    assert replica.next_event() == pytest.approx(0.75 + 5.5 * 0.1)
    assert replica.advance(2.0) == [kept]


def test_a_server_that_dies_names_what_is_lost_and_comes_back_empty() -> None:
    replica = Replica(ServerProfile(1, 0.1, 0.0, 1e9))
    running, waiting = Job(0, 10), Job(0, 5)
    replica.submit(0.0, running)
    replica.submit(0.0, waiting)
    replica.advance(0.5)
    assert replica.stop(0.5) == [running, waiting]
    assert (replica.is_up, replica.in_flight, replica.next_event()) == (False, 0, math.inf)
    replica.start(3.0)
    assert replica.usage.down_s == pytest.approx(2.5)
    replica.submit(3.0, waiting)
    assert replica.advance(10.0) == [waiting]


JOBS = st.lists(
    st.tuples(
        st.floats(0.0, 20.0),
        st.builds(Job, st.integers(0, 300), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=40,
)


@given(JOBS)
def test_every_request_ends_once_and_none_faster_than_alone(arrivals: list[tuple[float, Job]]) -> None:
    replica = Replica(PLAIN)
    found = ends(replica, arrivals)
    assert sorted(found) == list(range(len(arrivals)))
    for place, (came, job) in enumerate(arrivals):
        alone = job.prompt_tokens / 100.0 + (job.new_tokens + 0.5) * 0.1
        assert found[place] >= came + alone - 1e-6
    usage = replica.usage
    assert usage.new_tokens == sum(job.new_tokens for _, job in arrivals)
    assert usage.sequence_s <= usage.busy_s * PLAIN.max_sequences + 1e-6
    # No faster than its fastest: all reading, and all tokens in full batches.
    read = sum(job.prompt_tokens for _, job in arrivals) / 100.0
    assert usage.busy_s >= read + usage.new_tokens / PLAIN.tokens_per_s(PLAIN.max_sequences) - 1e-6


@given(JOBS)
def test_the_same_load_ends_in_the_same_way(arrivals: list[tuple[float, Job]]) -> None:
    assert ends(Replica(PLAIN), arrivals) == ends(Replica(PLAIN), arrivals)


@pytest.mark.parametrize(
    "wrong", [{"max_sequences": 0}, {"step_s": 0.0}, {"prefill_tokens_per_s": 0.0}, {"request_s": -1.0}]
)
def test_a_profile_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    right = {"max_sequences": 4, "step_s": 0.1, "step_s_per_sequence": 0.0, "prefill_tokens_per_s": 1.0}
    with pytest.raises(ValueError, match="must"):
        ServerProfile(**(right | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"request_share": 1.0}, {"mean_uptime_s": 0.0}, {"restart_s": -1.0}])
def test_faults_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share"):
        Faults(**wrong)  # type: ignore[arg-type]
