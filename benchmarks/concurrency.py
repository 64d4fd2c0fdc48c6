"""How many episodes can one rollout client have in flight? Its event loop's lag, its memory, its share of the ideal.

    python -m benchmarks.concurrency [--concurrency 2000] [--episodes 6000] [--rounds 3] [--policy DIR] [--quick]

The real client with its chat format and tokenizer, in one process, on an ordinary clock; engine and environments are
simulated, and take what real ones would take of time and nothing else: no HTTP, no model. Each round plays all
episodes. Prints one JSON line:

- `lag_ms`: how late the event loop is, as quantiles of time over a whole round, its burst of starts included;
- `share_of_ideal`: how long the same episodes take where the client's work takes no time (the same code on a clock that
  does not see it), over how long they took;
- `kib_per_episode`: the most resident memory of the first round over what was there before it, by episodes in flight;
  those that have ended are kept, and count in it (later rounds find memory that the first one has freed);
- `left`: tasks, open files and resident memory after each round: equal from the second on where nothing leaks.

Other processes on the machine show in all of it: `cpu_s` beside `seconds` says how busy this one was.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from trainer.chat.format import ChatFormat
from trainer.policy.loading import resolve_policy, tokenizer_of
from trainer.rollout.episodes import Episode
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.figures import figures
from trainer.simulation.presets import PRESETS
from trainer.simulation.rehearsal import Deployment, Load, rehearse
from trainer.simulation.scripts import made_up
from trainer.tiny import BASE_CHECKPOINT

PRESET = PRESETS["gpu-1.5b"]
SEQUENCES = 256
"""Of a replica: there are as many replicas as the episodes in flight need."""
KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Round:
    """Plays once, and watches."""

    def __init__(self, chat: ChatFormat, load: Load, deployment: Deployment) -> None:
        self._ended = 0
        self._most = 0
        gc.collect()
        before = resident()
        cpu = time.process_time()
        # Looked at often enough to see the peak, and seldom enough not to cost anything.
        self._every = max(1, load.episodes // 200)
        played = rehearse(chat, load, deployment, skips_waits=False, on_episode=self._look)
        self.cpu_s = time.process_time() - cpu
        self.found = figures(played)
        self.bytes_per_episode = (self._most - before) / deployment.max_concurrency

    def _look(self, _: Episode) -> None:
        self._ended += 1
        if self._ended % self._every == 0:
            self._most = max(self._most, resident())


def left() -> dict[str, int]:
    """What is there between two rounds; no event loop runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is given back, or it would pass for what is used
    tasks = sum(issubclass(type(thing), asyncio.Task) for thing in gc.get_objects())
    return {"tasks": tasks, "files": len(list(Path("/proc/self/fd").iterdir())), "resident_kib": resident() // KIB}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="whose tokenizer and chat template are used")
    parser.add_argument("--concurrency", type=int, default=2_000)
    parser.add_argument("--episodes", type=int, default=6_000, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures little")
    args = parser.parse_args()
    concurrency, episodes, rounds = args.concurrency, args.episodes, args.rounds
    if args.quick:
        concurrency, episodes, rounds = min(concurrency, 50), min(episodes, 100), 1
    turns = 2 if args.quick else 15
    chat = ChatFormat(tokenizer_of(resolve_policy(args.policy)))
    deployment = Deployment(
        PRESET.server,
        replicas=max(1, round(concurrency / SEQUENCES)),
        environments=EnvironmentProfile(servers=16, workers=8, call_s=0.05, network_s=0.005),
        max_concurrency=concurrency,
    )
    load = Load(made_up(chat, PRESET.lengths, 512, 0, turns), episodes, TokenBudget(16_384, 32_768, 2_048))
    shown: list[Round] = []
    after: list[dict[str, int]] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        shown.append(Round(chat, load, deployment))
        after.append(left())
    print("the ideal", file=sys.stderr, flush=True)
    ideal = figures(rehearse(chat, load, deployment, counts_work=False))
    print(json.dumps(_summary(args.policy, concurrency, ideal.seconds, shown, after)))


def _summary(
    policy: str, concurrency: int, ideal_s: float, rounds: list[Round], after: list[dict[str, int]]
) -> dict[str, Any]:
    def middle(name: str) -> float:
        return round(float(1e3 * median(getattr(each.found.lag_s, name) for each in rounds)), 3)

    return {
        "benchmark": "concurrency",
        "policy": policy,
        "concurrency": concurrency,
        "episodes": rounds[0].found.episodes,
        "failed": sum(each.found.failed for each in rounds),
        "turns_per_s": round(median(each.found.turns_per_second for each in rounds), 1),
        "tokens_per_s": round(median(each.found.tokens_per_second for each in rounds)),
        "client_ms_per_turn": round(1e3 * median(each.found.client_s_per_turn for each in rounds), 4),
        "lag_ms": {name: middle(name) for name in ("mean", "p50", "p95", "p99", "max")},
        "ideal_s": round(ideal_s, 2),
        "seconds": [round(each.found.seconds, 2) for each in rounds],
        "cpu_s": [round(each.cpu_s, 2) for each in rounds],
        "share_of_ideal": round(median(ideal_s / each.found.seconds for each in rounds), 4),
        "kib_per_episode": round(rounds[0].bytes_per_episode / KIB, 1),
        "left": after,
    }


if __name__ == "__main__":
    main()
