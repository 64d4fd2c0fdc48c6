"""How hard inference servers are pressed, in their own words: vLLM's `/metrics`, read and summed up. Pure.

A server that is asked for more than its key-value cache holds lets requests wait, puts some off that it had begun
(preemption, which computes them again), and forgets prefixes that a next turn would have found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

_WAITING = "vllm:num_requests_waiting"
_USED = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_COUNTERS = (_PREEMPTIONS, _QUERIES, _HITS)
_COMPUTED = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


@dataclass(frozen=True, slots=True)
class Pressure:
    """What servers said since the last time."""

    waiting: float
    """Requests that a server let wait, on average over the looks at it."""
    kv_cache: float
    """The largest share of a server's cache that running requests held."""
    preemptions: float
    prefix_hits: float | None
    """Share of prompt tokens that servers had in their caches; None when there were none."""


class PressureGauge:
    """Collects what servers say."""

    def __init__(self) -> None:
        self._waiting: list[float] = []
        self._used: list[float] = []
        self._counted: defaultdict[str, float] = defaultdict(float)
        self._last: dict[str, Mapping[str, float]] = {}

    def add(self, url: str, text: str) -> None:
        """Take what a server's `/metrics` says; a server that says nothing of this is left out."""
        found = _read_pressure(text)
        if found is None:
            return
        self._waiting.append(found[_WAITING])
        self._used.append(found[_USED])
        if (last := self._last.get(url)) is not None:
            for name in _COUNTERS:
                # One that was restarted counts from 0 again.
                self._counted[name] += found[name] - last[name] if found[name] >= last[name] else found[name]
        self._last[url] = found

    def take(self) -> Pressure | None:
        """What was collected since the last time; None when nobody looked."""
        if not self._waiting:
            return None
        counted = self._counted
        hits = counted[_HITS] / counted[_QUERIES] if counted[_QUERIES] else None
        pressure = Pressure(fmean(self._waiting), max(self._used), counted[_PREEMPTIONS], hits)
        self._waiting, self._used = [], []
        self._counted = defaultdict(float)
        return pressure


def computed_tokens(text: str) -> float:
    """Tokens that a server has read and generated since it was started; 0 when it does not say."""
    return sum(map(sum, _read(text, _COMPUTED).values()))


def _read_pressure(text: str) -> dict[str, float] | None:
    """The numbers that are looked at, over all engines of a server: the fullest cache, and sums of the rest."""
    found = _read(text, (_WAITING, _USED, *_COUNTERS))
    if not all(found.values()):
        return None
    return {name: max(values) if name == _USED else sum(values) for name, values in found.items()}


def _read(text: str, names: Sequence[str]) -> dict[str, list[float]]:
    """What each engine of a server says of these."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if name in found:
            found[name].append(float(rest.rpartition(" ")[2]))
    return found
