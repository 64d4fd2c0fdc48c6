"""What servers say of themselves: read from Prometheus's text, and summed up over a step."""

from __future__ import annotations

import pytest

from inference.vllm.pressure import Pressure, PressureGauge, computed_tokens


def says(waiting: float, used: float, preemptions: float, queries: float, hits: float) -> str:
    """As vLLM 0.31 says it, with two engines in a server, the second of which does nothing."""
    numbers = {
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": used,
        "num_preemptions_total": preemptions,
        "num_preemptions_created": 1.7e9,
        "prefix_cache_queries_total": queries,
        "prefix_cache_hits_total": hits,
    }
    lines = ["# HELP vllm:num_requests_waiting Number of requests waiting to be processed."]
    for name, value in numbers.items():
        lines += [f'vllm:{name}{{engine="{engine}",model_name="m x"}} {value * (1 - engine)}' for engine in (0, 1)]
    return "\n".join([*lines, "python_gc_objects_collected_total 5.0", ""])


def test_gauges_are_of_all_looks_and_counters_are_what_was_added() -> None:
    gauge = PressureGauge()
    assert gauge.take() is None
    gauge.add("a", says(0, 0.25, 3, 100, 50))
    gauge.add("b", says(4, 0.5, 0, 0, 0))
    gauge.add("a", says(8, 0.125, 5, 200, 130))
    assert gauge.take() == Pressure(waiting=4.0, kv_cache=0.5, preemptions=2, prefix_hits=0.8)
    assert gauge.take() is None
    gauge.add("a", says(0, 0.0, 5, 200, 130))
    assert gauge.take() == Pressure(waiting=0.0, kv_cache=0.0, preemptions=0, prefix_hits=None)


def test_a_server_that_was_restarted_counts_from_nothing() -> None:
    gauge = PressureGauge()
    gauge.add("a", says(0, 0.0, 5, 1_000, 900))
    gauge.add("a", says(0, 0.0, 1, 10, 5))
    pressure = gauge.take()
    assert pressure is not None
    assert (pressure.preemptions, pressure.prefix_hits) == (1, 0.5)


@pytest.mark.parametrize("text", ["", "vllm:num_requests_waiting 3.0", '{"detail":"Not Found"}'])
def test_a_server_that_does_not_tell_is_left_out(text: str) -> None:
    gauge = PressureGauge()
    gauge.add("a", text)
    assert gauge.take() is None
    assert computed_tokens(text) == 0


def test_what_was_read_and_what_was_generated_are_summed_over_engines() -> None:
    kinds = {"prompt": 100, "prompt_tokens_by_source": 7, "generation": 20}
    lines = [
        f'vllm:{kind}_tokens_total{{engine="{engine}",model_name="m x"}} {tokens + engine}'
        for kind, tokens in kinds.items()
        for engine in (0, 1)
    ]
    assert computed_tokens("\n".join(lines)) == 100 + 101 + 20 + 21
