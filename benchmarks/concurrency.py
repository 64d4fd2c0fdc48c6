"""How many episodes can one rollout client have in flight? Its event loop's lag, its work, its memory.

    python -m benchmarks.concurrency [--concurrency 2000] [--episodes 6000] [--rounds 3] [--policy DIR] [--quick]

The real client with its chat format and tokenizer, in one process; engine and environments are simulated, and take what
real ones would take of time and nothing else: no HTTP, no model, no SQL. Each round plays all episodes, of seven turns
with some 90 tokens each. Prints one JSON line:

- `lag_ms`: how late the event loop is, as quantiles of time over a whole round, its burst of starts included;
- `client_ms_per_turn`: the processor time of the client's event loop;
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.simulated import LONG_SCRIPT, ScriptedPolicy, SimulatedEngine
from env_server.types import ActionType, RewardComponents, SQLAction, SQLObservation, Verdict
from trainer.chat.format import ChatFormat
from trainer.models import tokenizer_of
from trainer.policy import resolve_policy
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings
from trainer.rollout.environments import EnvironmentSession
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

STEP_S = 0.008
"""Of the engine, for a token: 1.5 B parameters on a GPU, estimated."""
CALL_S = 0.05
"""Of an environment."""
PROBE_S = 0.01
KIB = 1024
_PAGE = os.sysconf("SC_PAGE_SIZE")


class SimulatedEnvironments:
    """Environments that answer each call after `CALL_S` with the same rows; an ANSWER is correct and the end."""

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session."""
        yield _SimulatedSession()

    def close(self) -> None:
        """Nothing is held."""


class _SimulatedSession:
    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        await asyncio.sleep(CALL_S)
        return SQLObservation(question="How many are there?", schema_info="Tables: a", budget_remaining=15)

    async def step(self, action: SQLAction) -> SQLObservation:
        await asyncio.sleep(CALL_S)
        done = action.action_type == ActionType.ANSWER
        return SQLObservation(
            done=done,
            question="How many are there?",
            schema_info="Tables: a",
            result="" if done else "1" + "\n1" * 45,
            budget_remaining=15,
            metadata={"reward_components": RewardComponents().model_dump(), "verdict": Verdict.CORRECT},
        )


def resident() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Round:
    """Plays once, and watches."""

    def __init__(self, chat: ChatFormat, episodes: int, concurrency: int, step_s: float) -> None:
        self._ended = 0
        self._most = 0
        self._late_s: list[float] = []
        gc.collect()
        before, cpu, began = resident(), time.process_time(), time.perf_counter()
        # Looked at often enough to see the peak, and seldom enough not to cost anything.
        self._every = max(1, episodes // 200)
        played, client_s = asyncio.run(self._play(chat, episodes, concurrency, step_s))
        self.seconds = time.perf_counter() - began
        self.cpu_s = time.process_time() - cpu
        self.bytes_per_episode = (self._most - before) / concurrency
        turns = sum(len(episode.turns) for episode in played)
        self.failed = sum(episode.outcome is Outcome.FAILED for episode in played)
        self.turns_per_s = turns / self.seconds
        self.tokens_per_s = sum(sum(episode.row.env_mask) for episode in played) / self.seconds
        self.client_ms_per_turn = 1e3 * client_s / turns
        percentiles = quantiles(self._late_s, n=100)
        self.lag_ms = {
            name: 1e3 * seconds
            for name, seconds in (
                ("mean", fmean(self._late_s)),
                *((f"p{share}", percentiles[share - 1]) for share in (50, 95, 99)),
                ("max", max(self._late_s)),
            )
        }

    async def _play(
        self, chat: ChatFormat, episodes: int, concurrency: int, step_s: float
    ) -> tuple[list[Episode], float]:
        engine = SimulatedEngine(ScriptedPolicy(chat, [LONG_SCRIPT]), stop_ids=chat.stop_ids, step_s=step_s)
        settings = RolloutSettings(TokenBudget(16_384, 32_768, 2_048), max_concurrency=concurrency)
        client = RolloutClient(engine, SimulatedEnvironments(), chat, settings)
        requests = [EpisodeRequest(str(number), number) for number in range(episodes)]
        probe = asyncio.create_task(self._probe())
        began = time.thread_time()
        played = await client.play(requests, self._look)
        client_s = time.thread_time() - began
        probe.cancel()
        return played, client_s

    async def _probe(self) -> None:
        """Sample how late a timer is, and add the samples that its lateness prevented: quantiles are of time."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            late_s = max(0.0, loop.time() - due)
            self._late_s.append(late_s)
            while (late_s := late_s - PROBE_S) > 0.0:
                self._late_s.append(late_s)

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
    concurrency, episodes, rounds, step_s = args.concurrency, args.episodes, args.rounds, STEP_S
    if args.quick:
        concurrency, episodes, rounds, step_s = min(concurrency, 50), min(episodes, 100), 1, 0.0
    chat = ChatFormat(tokenizer_of(resolve_policy(args.policy)))
    shown: list[Round] = []
    after: list[dict[str, int]] = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        shown.append(Round(chat, episodes, concurrency, step_s))
        after.append(left())

    def middle(name: str, digits: int) -> float:
        return round(float(median(getattr(each, name) for each in shown)), digits)

    found: dict[str, Any] = {
        "benchmark": "concurrency",
        "policy": args.policy,
        "concurrency": concurrency,
        "episodes": episodes,
        "failed": sum(each.failed for each in shown),
        "turns_per_s": middle("turns_per_s", 1),
        "tokens_per_s": middle("tokens_per_s", 0),
        "client_ms_per_turn": middle("client_ms_per_turn", 4),
        "lag_ms": {name: round(median(each.lag_ms[name] for each in shown), 3) for name in shown[0].lag_ms},
        "seconds": [round(each.seconds, 2) for each in shown],
        "cpu_s": [round(each.cpu_s, 2) for each in shown],
        "kib_per_episode": round(shown[0].bytes_per_episode / KIB, 1),
        "left": after,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
