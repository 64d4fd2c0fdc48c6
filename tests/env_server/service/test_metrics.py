"""What the server counts: readable by Prometheus, over one process and over several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from env_server.service.metrics import SHARED_FOLDER, Metrics


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """What is rendered, read by Prometheus' own parser."""
    found = [
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len({sample[:2] for sample in found}) == len(found)
    return {(name, labels): value for name, labels, value in found}


def test_counts_gauges_and_times() -> None:
    metrics = Metrics()
    metrics.sessions.inc()
    metrics.closed.labels("idle").inc()
    metrics.steps.labels("QUERY", "ok").inc()
    metrics.step_seconds.labels("inline").observe(0.003)
    found = series(metrics.render().decode())
    assert found["sqlenv_sessions", frozenset()] == metrics.total("sessions") == 1
    assert found["sqlenv_sessions_closed_total", frozenset({("reason", "idle")})] == 1
    assert found["sqlenv_steps_total", frozenset({("action", "QUERY"), ("outcome", "ok")})] == 1
    for bound, count in (("0.002", 0), ("0.005", 1), ("+Inf", 1)):
        assert found["sqlenv_step_seconds_bucket", frozenset({("source", "inline"), ("le", bound)})] == count
    assert not any(name.endswith("_created") for name, _ in found)


WORKER = """
from env_server.service.metrics import Metrics
metrics = Metrics()
metrics.opened.inc()
metrics.sessions.inc()
print(metrics.render().decode() if {last} else "")
if {dead}:
    import os
    from prometheus_client.multiprocess import mark_process_dead
    mark_process_dead(os.getpid())
"""


def test_several_workers_are_summed_and_a_dead_one_keeps_its_counts(tmp_path: Path) -> None:
    variables = {**os.environ, SHARED_FOLDER: str(tmp_path)}
    for dead, last in ((True, False), (False, False), (False, True)):
        code = WORKER.format(dead=dead, last=last)
        text = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, check=True).stdout
    found = series(text.decode())
    assert found["sqlenv_sessions_opened_total", frozenset()] == 3
    assert found["sqlenv_sessions", frozenset()] == 2
