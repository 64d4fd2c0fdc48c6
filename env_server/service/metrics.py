"""What the server counts, for Prometheus.

With several workers prometheus_client's multiprocess mode sums over them: /metrics of any worker shows all, and what a
worker that died had counted stays counted. Every label value comes from a fixed list of the server's own; nothing that
an agent types, and nothing of a question or its gold, becomes a label.
"""

from __future__ import annotations

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `render` returns."""
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that turns the multiprocess mode on; set before a worker starts."""
SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the latency histograms' buckets; a last one is unbounded."""

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sqlenv_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"sqlenv_{name}", text, labels, registry=registry, multiprocess_mode="livesum")

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"sqlenv_{name}", text, labels, registry=registry, buckets=SECONDS)

        self.sessions = gauge("sessions", "Sessions open now.")
        self.sessions_waiting = gauge("sessions_waiting", "Sessions that wait for a free slot.")
        self.sessions_max = gauge("sessions_max", "Sessions that may be open.")
        self.opened = counter("sessions_opened", "Sessions opened.")
        self.closed = counter("sessions_closed", "Sessions closed.", "reason")
        self.refused = counter("refused", "Connections and requests refused.", "reason")
        self.frame_errors = counter("frame_errors", "Error frames sent.", "code")
        self.steps = counter("steps", "Steps taken.", "action", "outcome")
        self.step_seconds = histogram("step_seconds", "Time of a step in the server, by its result's source.", "source")
        self.queue_wait = histogram("queue_wait_seconds", "Time that a session waited for a free slot.")
        self.pool_waiting = gauge("pool_waiting", "Queries that wait for a worker pool.", "pool")
        self.pool_running = gauge("pool_running", "Queries that a worker pool runs.", "pool")
        self.pool_restarts = gauge("pool_restarts", "Processes of a worker pool that were replaced.", "pool")
        self.cache_entries = gauge("cache_entries", "Results of queries that are kept.")
        self.cache_bytes = gauge("cache_bytes", "Size of the results that are kept.")

    def render(self) -> bytes:
        """Return everything, over all workers, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._all())

    def total(self, name: str) -> int:
        """Return a gauge without labels, over all workers."""
        return int(self._all().get_sample_value(f"sqlenv_{name}") or 0)

    def _all(self) -> CollectorRegistry:
        if not os.environ.get(SHARED_FOLDER):
            return self._registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return registry
