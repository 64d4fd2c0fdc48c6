"""Does throughput follow the number of environment servers? Measured on real ones, beside the simulation of the same.

    python -m benchmarks.scaling [--servers 1 2 4 8] [--sessions 16] [--query_s 0.4] [--episodes 480] [--quick]

Real `sqlenv serve` processes on loopback, the real rollout client, and a simulated engine at the speed of a GPU that
says what the oracle said. A call of an environment takes --query_s more than it does, on the average, as if its query
had to wait for a disk: on a machine of few processors that is what makes the servers the limit, and not the processors
that they share with everything else. A server has --sessions places, so that there are as many episodes in flight as
places. The simulation is that of `sqlenv simulate`, with calls as long and engine and client the same. Prints one JSON
line: turns a second at each number of servers, measured and simulated, what a turn costs the client's event loop, its
sockets included, and `ratio`, the least gain of a doubling. One server with many --sessions shows where the client
itself is full.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path

from benchmarks.server_process import SERVE, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split, in_turn
from env_server.types import AnswerMode, SQLAction, SQLObservation
from trainer.chat.format import ChatFormat
from trainer.policy.loading import resolve_policy, tokenizer_of
from trainer.rollout.environments import Environments, EnvironmentSession
from trainer.rollout.remote_environments import RemoteEnvironments
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.environments import EnvironmentProfile
from trainer.simulation.figures import figures
from trainer.simulation.presets import PRESETS
from trainer.simulation.rehearsal import Deployment, Load, rehearse
from trainer.simulation.scripts import drawn, played_by_the_oracle
from trainer.tiny import BASE_CHECKPOINT

SCRIPTS = 128
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
        self._mean_s = mean_s
        self._chance = random.Random()

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        self._chance = random.Random(episode_id)
        await self._wait()
        return await self._inner.reset(question_id, episode_id)

    async def step(self, action: SQLAction) -> SQLObservation:
        await self._wait()
        return await self._inner.step(action)

    async def _wait(self) -> None:
        await asyncio.sleep(drawn(self._chance, self._mean_s, SPREAD))


class Bench:
    """What is played, on however many servers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._chat = ChatFormat(tokenizer_of(resolve_policy(str(BASE_CHECKPOINT))))
        self._dataset: Dataset = load_dataset(args.data)
        questions = in_turn(self._dataset.select(Split.ALL))[:SCRIPTS]
        self._scripts = played_by_the_oracle(self._dataset, questions, AnswerMode.VALUE)

    def measured(self, servers: int, log: Path) -> dict[str, float]:
        """Play on real servers."""
        settings = {"SQLENV_MAX_SESSIONS": str(self._args.sessions), "SQLENV_LANES": "1,1"}
        with ExitStack() as stack:
            command = [*SERVE, "--data", self._args.data]
            running = [stack.enter_context(ServerProcess(command, log, settings)) for _ in range(servers)]
            cpu_s = sum(server.cpu_s() for server in running)
            remote = RemoteEnvironments([f"ws://127.0.0.1:{server.port}" for server in running], self._dataset)
            environments = stack.enter_context(closing(Late(remote, self._args.query_s)))
            found = figures(rehearse(self._chat, self._load(servers), self._deployment(servers), environments))
            cpu_s = sum(server.cpu_s() for server in running) - cpu_s
        if found.failed:
            raise SystemExit(f"{found.failed} of {found.episodes} episodes failed")
        return {
            "turns_per_s": found.turns_per_second,
            "servers_cpu": cpu_s / found.seconds,
            "client_ms_per_turn": 1e3 * found.client_s_per_turn,
        }

    def simulated(self, servers: int) -> float:
        """Play in the simulation; returns turns a second."""
        return figures(rehearse(self._chat, self._load(servers), self._deployment(servers))).turns_per_second

    def _load(self, servers: int) -> Load:
        return Load(self._scripts, self._args.episodes * servers, TokenBudget(4_096, 8_192, 512))

    def _deployment(self, servers: int) -> Deployment:
        calls = EnvironmentProfile(servers, self._args.sessions, self._args.query_s, SPREAD)
        return Deployment(PRESETS["gpu-1.5b"].server, environments=calls, max_concurrency=servers * self._args.sessions)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8], help="each twice the one before")
    parser.add_argument("--sessions", type=int, default=16, help="of a server")
    parser.add_argument("--query_s", type=float, default=0.4, help="that a call takes longer than it does")
    parser.add_argument("--episodes", type=int, default=480, help="for each server")
    parser.add_argument("--quick", action="store_true", help="few episodes on two numbers: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.servers, args.sessions, args.query_s, args.episodes = [1, 2], 8, 0.02, 16
    bench = Bench(args)
    found: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for servers in args.servers:
            print(f"{servers} servers", file=sys.stderr)
            found[servers] = {
                **bench.measured(servers, Path(scratch, "servers.log")),
                "simulated": bench.simulated(servers),
            }
    rates = [found[servers]["turns_per_s"] for servers in args.servers]
    gains = [later / earlier for earlier, later in pairwise(rates)]
    print(json.dumps({"benchmark": "scaling", "ratio": min(gains, default=None), "gains": gains, "servers": found}))


if __name__ == "__main__":
    main()
