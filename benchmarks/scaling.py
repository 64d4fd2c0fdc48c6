"""Does throughput follow the number of environment servers?

    python -m benchmarks.scaling [--servers 1 2 4 8] [--sessions 16] [--query_s 0.4] [--episodes 480] [--quick]

Real `sqlenv serve` processes on loopback, the real rollout client, and a simulated engine at the speed of a GPU that
says what the oracle said. A call of an environment takes --query_s more than it does, on the average, as if its query
had to wait for a disk: on a machine of few processors that is what makes the servers the limit, and not the processors
that they share with everything else. A server has --sessions slots, so that there are as many episodes in flight as
slots. Prints one JSON line: turns per second at each number of servers, what a turn costs the client's event loop, its
sockets included, and `ratio`, the least gain of a doubling. One server with many --sessions shows where the client
itself is full.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path

from benchmarks import harness
from benchmarks.server_process import SERVE, ServerProcess
from benchmarks.simulated import ScriptedPolicy, SimulatedEngine, oracle_scripts
from env_server.data.loading import load_dataset
from env_server.dataset import Split, round_robin
from env_server.types import SQLAction, SQLObservation
from trainer.chat.format import ChatFormat
from trainer.models import tokenizer_of
from trainer.policy import resolve_policy
from trainer.rollout.client import RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import Environments, EnvironmentSession
from trainer.rollout.episodes import Episode
from trainer.rollout.remote_environments import RemoteEnvironments
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

SCRIPTS = 128
STEP_S = 0.008
"""Of the engine, for a token: 1.5 B parameters on a GPU, estimated."""
SPREAD = 0.5
"""Of the time that a call takes, over its mean."""


class Late:
    """Environments whose calls take longer than they do."""

    def __init__(self, inner: Environments, mean_s: float) -> None:
        self._inner = inner
        self._mean_s = mean_s

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session."""
        async with self._inner.session() as session:
            yield _LateSession(session, self._mean_s)

    def close(self) -> None:
        """Release everything."""
        self._inner.close()


class _LateSession:
    def __init__(self, inner: EnvironmentSession, mean_s: float) -> None:
        self._inner = inner
        self._sigma = math.sqrt(math.log1p(SPREAD * SPREAD))
        self._mu = math.log(mean_s) - self._sigma * self._sigma / 2
        self._rng = random.Random()

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        self._rng = random.Random(episode_id)
        await self._wait()
        return await self._inner.reset(question_id, episode_id)

    async def step(self, action: SQLAction) -> SQLObservation:
        await self._wait()
        return await self._inner.step(action)

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.lognormvariate(self._mu, self._sigma))


class Bench:
    """What is played, on however many servers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._chat = ChatFormat(tokenizer_of(resolve_policy(str(BASE_CHECKPOINT))))
        self._dataset = load_dataset(args.data)
        self._questions = round_robin(self._dataset.select(Split.ALL))[:SCRIPTS]
        self._policy = ScriptedPolicy(self._chat, oracle_scripts(self._dataset, self._questions))

    def measured(self, servers: int, log: Path) -> dict[str, float]:
        """Play on so many servers."""
        settings = {"SQLENV_MAX_SESSIONS": str(self._args.sessions), "SQLENV_QUERY_WORKERS": "1,1"}
        with ExitStack() as stack:
            command = [*SERVE, "--data", self._args.data]
            running = [stack.enter_context(ServerProcess(command, log, settings)) for _ in range(servers)]
            remote = RemoteEnvironments([f"ws://127.0.0.1:{server.port}" for server in running], self._dataset)
            environments = stack.enter_context(closing(Late(remote, self._args.query_s)))
            cpu_s = sum(server.cpu_s() for server in running)
            began, worked = time.perf_counter(), time.thread_time()
            episodes = asyncio.run(self._play(servers, environments))
            seconds, worked = time.perf_counter() - began, time.thread_time() - worked
            cpu_s = sum(server.cpu_s() for server in running) - cpu_s
        if failures := [episode.failure for episode in episodes if episode.failure]:
            raise SystemExit(f"{len(failures)} of {len(episodes)} episodes failed: {failures[0]}")
        turns = sum(len(episode.turns) for episode in episodes)
        return {
            "turns_per_s": turns / seconds,
            "servers_cpu": cpu_s / seconds,
            "client_ms_per_turn": 1e3 * worked / turns,
        }

    async def _play(self, servers: int, environments: Environments) -> list[Episode]:
        engine = SimulatedEngine(self._policy, stop_ids=self._chat.stop_ids, step_s=STEP_S)
        settings = RolloutSettings(TokenBudget(4_096, 8_192, 512), max_concurrency=servers * self._args.sessions)
        client = RolloutClient(engine, environments, self._chat, settings)
        count = servers * self._args.episodes
        return await client.play(
            [request_for(self._questions[number % len(self._questions)], number) for number in range(count)]
        )


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__, "few episodes on two numbers")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8], help="each twice the one before")
    parser.add_argument("--sessions", type=int, default=16, help="of a server")
    parser.add_argument("--query_s", type=float, default=0.4, help="that a call takes longer than it does")
    parser.add_argument("--episodes", type=int, default=480, help="for each server")
    args = parser.parse_args()
    if args.quick:
        args.servers, args.sessions, args.query_s, args.episodes = [1, 2], 8, 0.02, 16
    bench = Bench(args)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for servers in args.servers:
            harness.progress(f"{servers} servers")
            found[servers] = bench.measured(servers, Path(scratch, "servers.log"))
    rates = [found[servers]["turns_per_s"] for servers in args.servers]
    gains = [later / earlier for earlier, later in pairwise(rates)]
    harness.report("scaling", ratio=min(gains, default=None), gains=gains, servers=found)


if __name__ == "__main__":
    main()
