"""What a simulated server is like: how fast, how large, how often it fails. Plain data; times are in seconds.

A replica is a server with continuous batching, as vLLM is. It decodes up to `max_sequences` requests together, one
token each per step; a step takes `step_s`, and `step_s_per_sequence` more for each request beside the first. Prompt
tokens that are in no cache are read at `prefill_tokens_per_s`, and everybody waits meanwhile. Before that, a request
goes through the server's front end, `request_s` one after another, and over the network, `network_s` there and back.

What this leaves out: the memory of the key-value cache (`max_sequences` stands for it) and its evictions, and that a
step takes longer when contexts are long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """The speed and size of one replica."""

    max_sequences: int
    step_s: float
    step_s_per_sequence: float
    prefill_tokens_per_s: float
    request_s: float = 0.0
    network_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_sequences < 1 or not self.prefill_tokens_per_s > 0:
            raise ValueError(f"a replica must have room for a sequence and read prompts at some speed: {self}")
        times = [getattr(self, each.name) for each in fields(self) if each.name.endswith(("_s", "_sequence"))]
        if not all(0.0 <= seconds < math.inf for seconds in times) or self.step_s == 0.0:
            raise ValueError(f"times must be finite and not negative, and a step must take some: {self}")

    def decode_step_s(self, running: int) -> float:
        """How long one token of each of `running` sequences takes."""
        return self.step_s + self.step_s_per_sequence * (running - 1)

    def tokens_per_s(self, running: int) -> float:
        """How many tokens `running` sequences get in a second, together."""
        return running / self.decode_step_s(running)


@dataclass(frozen=True, slots=True)
class Faults:
    """How often replicas fail; all of it drawn from `seed`.

    `request_share`: of requests that a replica loses on the way. `mean_uptime_s`: after so long, on the average, a
    replica dies with all that it holds, and is back `restart_s` later. Lost requests go to another replica, as those of
    the engine on vLLM servers do.
    """

    request_share: float = 0.0
    mean_uptime_s: float = math.inf
    restart_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.request_share < 1.0 or self.mean_uptime_s <= 0.0 or self.restart_s < 0.0:
            raise ValueError(f"a share is below 1 and a time above 0: {self}")
