"""What the server counts: exact over all workers, labels from fixed lists alone, readable by Prometheus."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from env_server.service.capacity import Capacity, PlaceTable
from env_server.service.metrics import (
    ACTIONS,
    CLOSE_REASONS,
    FRAME_ERRORS,
    LANES,
    OUTCOMES,
    REFUSALS,
    SECONDS,
    Metrics,
    metrics_table,
)

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: Metrics) -> Series:
    """What is rendered, read by Prometheus' own parser."""
    found: Series = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[name, frozenset(labels.items())]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(Capacity(10))


def test_everything_is_there_from_the_start(metrics: Metrics) -> None:
    found = series(metrics)
    assert set(found.values()) == {0.0, 10.0, 1.0}
    assert found["sqlenv_sessions_max", frozenset()] == 10
    assert found["sqlenv_workers", frozenset()] == 1
    for code in FRAME_ERRORS:
        assert found["sqlenv_frame_errors_total", frozenset({("code", code)})] == 0


def test_sessions(metrics: Metrics) -> None:
    metrics.session_opened()
    metrics.session_opened()
    metrics.session_closed("idle")
    metrics.refused("capacity")
    metrics.frame_error("INVALID_JSON")
    assert value(metrics, "sqlenv_sessions_opened_total") == 2
    assert value(metrics, "sqlenv_sessions_closed_total", reason="idle") == 1
    assert value(metrics, "sqlenv_refused_total", reason="capacity") == 1
    assert value(metrics, "sqlenv_frame_errors_total", code="INVALID_JSON") == 1


async def test_places_are_those_of_the_capacity() -> None:
    capacity = Capacity(10)
    metrics = Metrics(capacity)
    assert capacity.try_acquire()
    assert value(metrics, "sqlenv_sessions") == 1
    capacity.release()
    assert value(metrics, "sqlenv_sessions") == 0


def test_gauges(metrics: Metrics) -> None:
    metrics.set_gauges(medium_waiting=3, slow_running=1, cache_bytes=12)
    metrics.set_gauges(medium_waiting=2)
    assert value(metrics, "sqlenv_lane_waiting", lane="medium") == 2
    assert value(metrics, "sqlenv_lane_running", lane="slow") == 1
    assert value(metrics, "sqlenv_cache_bytes") == 12
    with pytest.raises(KeyError):
        metrics.set_gauges(slow_runing=1)


steps = st.tuples(
    st.sampled_from(ACTIONS),
    st.sampled_from(OUTCOMES),
    st.floats(0, 20) | st.sampled_from(SECONDS),
    st.sampled_from(LANES),
)


@given(st.lists(st.tuples(st.integers(0, 2), steps), max_size=40))
def test_steps_are_summed_over_the_workers(taken: list[tuple[int, tuple[str, str, float, str]]]) -> None:
    table = metrics_table(3)
    workers = [Metrics(Capacity(1), table, worker) for worker in range(3)]
    for worker, step in taken:
        workers[worker].step(*step)
    counts = Counter((action, outcome) for _, (action, outcome, _, _) in taken)
    found = series(workers[0])
    assert found == series(workers[2])
    for action in ACTIONS:
        for outcome in OUTCOMES:
            labels = frozenset({("action", action), ("outcome", outcome)})
            assert found["sqlenv_steps_total", labels] == counts[action, outcome]
    for lane in LANES:
        times = [seconds for _, (_, _, seconds, where) in taken if where == lane]
        if not times:
            assert ("sqlenv_step_seconds_count", frozenset({("lane", lane)})) not in found
            continue
        assert found["sqlenv_step_seconds_count", frozenset({("lane", lane)})] == len(times)
        assert math.isclose(
            found["sqlenv_step_seconds_sum", frozenset({("lane", lane)})], math.fsum(times), abs_tol=1e-9
        )
        for bound in (*SECONDS, math.inf):
            le = "+Inf" if bound == math.inf else repr(bound)
            labels = frozenset({("lane", lane), ("le", le)})
            assert found["sqlenv_step_seconds_bucket", labels] == sum(seconds <= bound for seconds in times)


@given(st.text(), st.text(), st.text())
def test_nothing_that_is_typed_becomes_a_label(action: str, outcome: str, other: str) -> None:
    metrics = Metrics(Capacity(1))
    metrics.step("QUERY", "ok", 0.1, "other")
    names = set(series(metrics))
    metrics.step(action, outcome, 0.1, "other" if other not in LANES else other)
    metrics.step("QUERY", outcome, 0.1, "other")
    metrics.step(action, "ok", 0.1, "other")
    metrics.session_closed(other)
    metrics.refused(other)
    metrics.frame_error(other)
    found = series(metrics)
    assert {key for key in found if "step_seconds" not in key[0]} == {
        key for key in names if "step_seconds" not in key[0]
    }
    assert sum(count for (name, _), count in found.items() if name == "sqlenv_steps_total") == 4
    for family, known in (
        ("sqlenv_sessions_closed_total", CLOSE_REASONS),
        ("sqlenv_refused_total", REFUSALS),
        ("sqlenv_frame_errors_total", FRAME_ERRORS),
    ):
        counted = {dict(labels).popitem()[1] for (name, labels), count in found.items() if name == family and count}
        assert counted == {other if other in known else "other"}


def test_the_wait_in_the_queue_is_a_histogram(metrics: Metrics) -> None:
    metrics.queue_wait(0.003)
    metrics.queue_wait(30)
    assert value(metrics, "sqlenv_queue_wait_seconds_bucket", le="0.002") == 0
    assert value(metrics, "sqlenv_queue_wait_seconds_bucket", le="0.005") == 1
    assert value(metrics, "sqlenv_queue_wait_seconds_bucket", le="10.0") == 1
    assert value(metrics, "sqlenv_queue_wait_seconds_bucket", le="+Inf") == 2
    assert value(metrics, "sqlenv_queue_wait_seconds_sum") == 30.003


def test_a_dead_worker_keeps_its_counts_and_loses_its_gauges() -> None:
    places = PlaceTable(2)
    table = metrics_table(2)
    one, other = (Metrics(Capacity(10, 0, places, worker), table, worker) for worker in range(2))
    one.session_opened()
    one.set_gauges(medium_running=2, cache_entries=5)
    one.set_lane_restarts("medium", 3)
    other.set_gauges(medium_running=1)
    other.set_lane_restarts("medium", 1)
    assert value(other, "sqlenv_lane_running", lane="medium") == 3
    one.worker_died(lost_sessions=1)
    assert value(other, "sqlenv_lane_running", lane="medium") == 1
    assert value(other, "sqlenv_cache_entries") == 0
    assert value(other, "sqlenv_sessions_opened_total") == 1
    assert value(other, "sqlenv_sessions_closed_total", reason="worker_died") == 1
    assert value(other, "sqlenv_worker_deaths_total") == 1
    assert value(other, "sqlenv_lane_restarts_total", lane="medium") == 4
    successor = Metrics(Capacity(10, 0, places, 0), table, 0)
    successor.set_lane_restarts("medium", 2)
    assert value(other, "sqlenv_lane_restarts_total", lane="medium") == 6, "a counter never goes down"
    places.close()
