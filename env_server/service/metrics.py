"""What the server counts, for Prometheus.

Promises:

- /metrics of any worker shows the sum over all workers. What a killed worker had counted stays counted; its gauges go,
  and the sessions that it took with it are closed with the reason `worker_died`.
- Every label value is one of a fixed list; what is on no list counts as `other`. Nothing that an agent types, and
  nothing of a question or its gold, can become a label.
- Counting a step and its time costs 0.4 microseconds of a step's 150: the series are laid out once, in a row of shared
  memory, and a count is an addition to a cell. Only `render` builds Prometheus' objects. prometheus_client's own way to
  sum over processes takes 5 microseconds for the same, and leaves a file for each process that there has ever been.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from env_server.service.capacity import Capacity
from env_server.service.shared_table import SharedTable
from env_server.types import ActionType, ErrorCode, Verdict

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Of what `render` returns."""

OTHER = "other"
ACTIONS = (*(action.value for action in ActionType), "invalid", OTHER)
OUTCOMES = ("ok", "error", *(verdict.value for verdict in Verdict), OTHER)
LANES = ("none", "inline", "cached", "lane", OTHER)
CLOSE_REASONS = ("client", "disconnect", "idle", "drain", "error", "worker_died", OTHER)
REFUSALS = ("capacity", "queue_full", "draining", "token", "origin", OTHER)
FRAME_ERRORS = (*(code.value for code in ErrorCode), OTHER)
SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the latency histograms' buckets; a last one is unbounded."""

_BUCKETS = len(SECONDS) + 1
_BOUNDS = (*(repr(bound) for bound in SECONDS), "+Inf")


@dataclass(frozen=True)
class _Family:
    """A metric with its labels; a histogram has `_BUCKETS` cells for each label set and one for the sum."""

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def width(self) -> int:
        return _BUCKETS + 1 if self.kind == "histogram" else 1

    def label_sets(self) -> Iterator[tuple[str, ...]]:
        return product(*(values for _, values in self.labels))


_QUERY_LANES = (("lane", ("medium", "slow", "judge")),)

_OPENED = _Family("sqlenv_sessions_opened", "Sessions opened.", "counter")
_CLOSED = _Family("sqlenv_sessions_closed", "Sessions closed.", "counter", (("reason", CLOSE_REASONS),))
_REFUSED = _Family("sqlenv_refused", "Connections and requests refused.", "counter", (("reason", REFUSALS),))
_FRAME_ERRORS = _Family("sqlenv_frame_errors", "Error frames sent.", "counter", (("code", FRAME_ERRORS),))
_STEPS = _Family("sqlenv_steps", "Steps taken.", "counter", (("action", ACTIONS), ("outcome", OUTCOMES)))
_STEP_SECONDS = _Family(
    "sqlenv_step_seconds", "Time of a step in the server, by where its query ran.", "histogram", (("lane", LANES),)
)
_QUEUE_SECONDS = _Family("sqlenv_queue_wait_seconds", "Time that a session waited for a free place.", "histogram")
_LANE_WAITING = _Family("sqlenv_lane_waiting", "Queries that wait for a lane.", "gauge", _QUERY_LANES)
_LANE_RUNNING = _Family("sqlenv_lane_running", "Queries that a lane runs.", "gauge", _QUERY_LANES)
_LANE_RESTARTS = _Family("sqlenv_lane_restarts", "Lane processes replaced.", "counter", _QUERY_LANES)
_CACHE_ENTRIES = _Family("sqlenv_cache_entries", "Results of queries that are kept.", "gauge")
_CACHE_BYTES = _Family("sqlenv_cache_bytes", "Size of the results that are kept.", "gauge")
_DEATHS = _Family("sqlenv_worker_deaths", "Workers that died and were replaced.", "counter")

_FAMILIES = (
    _OPENED,
    _CLOSED,
    _REFUSED,
    _FRAME_ERRORS,
    _STEPS,
    _STEP_SECONDS,
    _QUEUE_SECONDS,
    _LANE_WAITING,
    _LANE_RUNNING,
    _LANE_RESTARTS,
    _CACHE_ENTRIES,
    _CACHE_BYTES,
    _DEATHS,
)


def _layout() -> tuple[dict[tuple[_Family, tuple[str, ...]], int], int]:
    """Give each series of each family its first cell; return them and the number of cells."""
    cells: dict[tuple[_Family, tuple[str, ...]], int] = {}
    used = 0
    for family in _FAMILIES:
        for labels in family.label_sets():
            cells[family, labels] = used
            used += family.width
    return cells, used


_CELLS, _COLUMNS = _layout()


def _by_label(family: _Family) -> dict[str, int]:
    return {labels[0]: _CELLS[family, labels] for labels in family.label_sets()}


_OPENED_CELL = _CELLS[_OPENED, ()]
_QUEUE_SECONDS_CELL = _CELLS[_QUEUE_SECONDS, ()]
_CLOSED_CELLS = _by_label(_CLOSED)
_REFUSED_CELLS = _by_label(_REFUSED)
_FRAME_ERROR_CELLS = _by_label(_FRAME_ERRORS)
_STEP_CELLS = {(action, outcome): _CELLS[_STEPS, (action, outcome)] for action, outcome in _STEPS.label_sets()}
_STEP_SECONDS_CELLS = _by_label(_STEP_SECONDS)
_GAUGE_CELLS = {
    **{f"{lane}_waiting": cell for lane, cell in _by_label(_LANE_WAITING).items()},
    **{f"{lane}_running": cell for lane, cell in _by_label(_LANE_RUNNING).items()},
    "cache_entries": _CELLS[_CACHE_ENTRIES, ()],
    "cache_bytes": _CELLS[_CACHE_BYTES, ()],
}
_LANE_RESTARTS_CELLS = _by_label(_LANE_RESTARTS)


def metrics_table(workers: int = 1) -> SharedTable:
    """Return the memory that the workers' `Metrics` share."""
    return SharedTable(workers, _COLUMNS)


class Metrics:
    """A worker's counts, and the sum over all workers."""

    def __init__(self, capacity: Capacity, table: SharedTable | None = None, worker: int = 0) -> None:
        self._capacity = capacity
        self._table = table or metrics_table()
        self._row = self._table.row(worker)
        self._restarts_before = {lane: self._row[cell] for lane, cell in _LANE_RESTARTS_CELLS.items()}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def session_opened(self) -> None:
        """Count a session that got a place."""
        self._row[_OPENED_CELL] += 1

    def session_closed(self, reason: str) -> None:
        """Count a session that gave its place back; `reason` is one of `CLOSE_REASONS`."""
        self._row[_CLOSED_CELLS.get(reason, _CLOSED_CELLS[OTHER])] += 1

    def step(self, action_type: str, outcome: str, seconds: float, lane: str = "none") -> None:
        """Count a step: one of `ACTIONS`, of `OUTCOMES` and of `LANES`, the time from its frame to its reply."""
        row = self._row
        cell = _STEP_CELLS.get((action_type, outcome))
        if cell is None:
            known = action_type if action_type in ACTIONS else OTHER
            cell = _STEP_CELLS[known, outcome if outcome in OUTCOMES else OTHER]
        row[cell] += 1
        self._observe(_STEP_SECONDS_CELLS.get(lane, _STEP_SECONDS_CELLS[OTHER]), seconds)

    def refused(self, reason: str) -> None:
        """Count a connection or request that was refused; `reason` is one of `REFUSALS`."""
        self._row[_REFUSED_CELLS.get(reason, _REFUSED_CELLS[OTHER])] += 1

    def queue_wait(self, seconds: float) -> None:
        """Count a session's wait for a place."""
        self._observe(_QUEUE_SECONDS_CELL, seconds)

    def frame_error(self, code: str) -> None:
        """Count an error frame; `code` is one of `FRAME_ERRORS`."""
        self._row[_FRAME_ERROR_CELLS.get(code, _FRAME_ERROR_CELLS[OTHER])] += 1

    def set_gauges(self, **values: float) -> None:
        """Set this worker's gauges: `LANE_waiting`, `LANE_running` for each lane, `cache_entries`, `cache_bytes`."""
        for name, value in values.items():
            self._row[_GAUGE_CELLS[name]] = value

    def set_lane_restarts(self, lane: str, restarts: int) -> None:
        """Say how often this worker has replaced a process of the lane since it started."""
        self._row[_LANE_RESTARTS_CELLS[lane]] = self._restarts_before[lane] + restarts

    def worker_died(self, lost_sessions: int) -> None:
        """Account for a worker that is gone: its gauges, and the sessions that it took with it."""
        for cell in _GAUGE_CELLS.values():
            self._row[cell] = 0
        self._row[_CLOSED_CELLS["worker_died"]] += lost_sessions
        self._row[_CELLS[_DEATHS, ()]] += 1

    def render(self) -> bytes:
        """Return everything, over all workers, in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the families; what prometheus_client asks of a collector."""
        yield _gauge("sqlenv_sessions", "Sessions open now.", self._capacity.active())
        yield _gauge("sqlenv_sessions_waiting", "Sessions that wait for a free place.", self._capacity.waiting())
        yield _gauge("sqlenv_sessions_max", "Sessions that may be open.", self._capacity.limit)
        yield _gauge("sqlenv_workers", "Worker processes.", self._table.rows)
        cells = self._table.totals()
        for family in _FAMILIES:
            yield _collected(family, cells)

    def _observe(self, cell: int, seconds: float) -> None:
        row = self._row
        row[cell + bisect_left(SECONDS, seconds)] += 1
        row[cell + _BUCKETS] += seconds


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _collected(family: _Family, cells: list[float]) -> Metric:
    names = [name for name, _ in family.labels]
    metric = _EMPTY[family.kind](family.name, family.help, labels=names)
    for labels in family.label_sets():
        cell = _CELLS[family, labels]
        if isinstance(metric, HistogramMetricFamily):
            if labels and not any(cells[cell : cell + _BUCKETS]):
                continue
            metric.add_metric(labels, _cumulative(cells[cell : cell + _BUCKETS]), cells[cell + _BUCKETS])
        else:
            metric.add_metric(labels, cells[cell])
    return metric


def _cumulative(counts: list[float]) -> list[tuple[str, float]]:
    buckets = []
    so_far = 0.0
    for bound, count in zip(_BOUNDS, counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return buckets


_EMPTY: Mapping[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
