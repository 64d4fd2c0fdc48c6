"""How fast is `sqlenv serve` beside OpenEnv's own server, and how many sessions does one process hold?

    python -m benchmarks.env_server [--only throughput sessions workers] [--sessions 10000] [--interval_s 10] [--quick]

Ours, and the same SQLEnvironment behind upstream's `create_app` (where `make openenv` has installed it), one process
of each at a time, on uvloop and the same versions of FastAPI and uvicorn. A load generator in its own process plays
whole episodes, a message per session at a time (`benchmarks/traffic.py` says what is in them). SQL runs on real
databases: the Spider folder that SQLENV_SPIDER_DIR names, else the synthetic data. Every measurement starts a fresh
server.

- `throughput`: 64 sessions without pauses, with two kinds of traffic: every query text distinct, and groups of eight
  sessions on the same question. Steps per second of both servers; medians over rounds that alternate.
- `sessions`: ours with --sessions, ours and upstream's with a tenth of them, a step of each every --interval_s, as
  policies do that think in between. A step's latency counts from when it was due. Printed are the seconds until all
  were connected and reset, the latency, and memory above the start, with all sessions open and after they have
  played.
- `workers`: ours with one worker and with two, 64 sessions without pauses: steps per second, and per second of
  processor time. The generator needs a processor, too: with fewer than three the second number says what two workers
  would do on processors of their own, and the first one does not.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path

from benchmarks import traffic
from benchmarks.harness import medians, parser, progress, ratio, report, rounded, rounds, spider_or_synthetic
from benchmarks.load_generator import Load
from benchmarks.server_process import ROOT, SERVE, Generator, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset

OURS, UPSTREAM = "ours", "upstream"
UPSTREAM_PYTHON = ROOT / ".venv-openenv/bin/python"
MODES = ("throughput", "sessions", "workers")
UNPACED_SESSIONS = 64
HEADROOM = 1.1
"""The servers admit this many times the sessions."""
FASTEST_STEPS = 25_000
"""Steps per second that the messages are written for; a server beyond that plays them again."""
WARMUP_S = 1.0


class Bench:
    """Puts loads on servers."""

    def __init__(self, args: Namespace, dataset: Dataset, folder: Path) -> None:
        self._args = args
        self._dataset = dataset
        self._folder = folder

    def unpaced(self, kind: str, name: str, seed: int, workers: int = 1) -> dict[str, float]:
        """Measure as many steps as a server can take."""
        episodes = math.ceil(FASTEST_STEPS * (self._args.seconds + WARMUP_S) / traffic.STEPS / UNPACED_SESSIONS) + 1
        texts = traffic.scripts(self._dataset, kind, UNPACED_SESSIONS, episodes, seed)
        return self._measure(name, texts, 0.0, workers)

    def paced(self, name: str, sessions: int) -> dict[str, float]:
        """Measure sessions that think between their steps."""
        steps = math.ceil((self._args.seconds + WARMUP_S) / self._args.interval_s) + 1
        texts = traffic.scripts(self._dataset, "groups", sessions, math.ceil(steps / traffic.EPISODE) + 1)
        return self._measure(name, texts, self._args.interval_s, 1)

    def _serve(self, name: str, sessions: int, workers: int) -> ServerProcess:
        limit, log = str(math.ceil(sessions * HEADROOM) * workers), self._folder / "server.log"
        if name == UPSTREAM:
            command = [str(UPSTREAM_PYTHON), "-m", "benchmarks.env_server_upstream", "{port}", self._args.data, limit]
            return ServerProcess(command, log)
        # The limit on messages stays on, beyond what a session can send.
        settings = {"SQLENV_MAX_SESSIONS": limit, "SQLENV_MESSAGES_PER_S": "100000"}
        return ServerProcess([*SERVE, "--data", self._args.data, "--workers", str(workers)], log, settings)

    def _measure(self, name: str, texts: list[list[str]], interval_s: float, workers: int) -> dict[str, float]:
        messages = self._folder / "messages.json"
        messages.write_text(json.dumps(texts))
        with self._serve(name, len(texts), workers) as server:
            load = Load(
                port=server.port,
                messages_file=messages,
                episode=traffic.EPISODE,
                warmup_s=WARMUP_S,
                seconds=self._args.seconds,
                interval_s=interval_s,
            )
            before, generator = server.rss(), Generator(load, self._folder)
            try:
                connect_s = generator.connect()
                grown, cpu = server.rss() - before, server.cpu_s()
                outcome = generator.play()
                cpu, played = server.cpu_s() - cpu, server.rss() - before
            finally:
                generator.stop()
        if outcome.failures or outcome.lost:
            raise SystemExit(f"{outcome.failures} replies were no observation, {outcome.lost} sessions were lost")
        found = {
            "steps_per_s": outcome.steps / outcome.seconds,
            "steps_per_cpu_s": outcome.messages / cpu,
            "p50_ms": outcome.p50_s * 1e3,
            "p99_ms": outcome.p99_s * 1e3,
            "connect_s": connect_s,
            "mb_open": grown / 1e6,
            "mb_played": played / 1e6,
            "server_cpu": cpu / (outcome.seconds + WARMUP_S),
            "generator_cpu": outcome.cpu_s / outcome.seconds,
        }
        return {key: rounded(number) for key, number in found.items()}


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, "one short round of 100 sessions")
    arguments.add_argument("--data", default=spider_or_synthetic(), help="the data set")
    arguments.add_argument("--only", nargs="+", choices=MODES, default=MODES)
    arguments.add_argument("--sessions", type=int, default=10_000)
    arguments.add_argument("--interval_s", type=float, default=10.0, help="between two steps of a paced session")
    arguments.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    arguments.add_argument("--rounds", type=int, default=3, help="of throughput")
    args = arguments.parse_args()
    if args.quick:
        args.sessions, args.interval_s, args.seconds, args.rounds = 100, 0.5, 2.0, 1
    if not UPSTREAM_PYTHON.exists():
        print("upstream is left out: `make openenv` installs it", file=sys.stderr)
    sides = [OURS, UPSTREAM] if UPSTREAM_PYTHON.exists() else [OURS]
    dataset = load_dataset(args.data)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, dataset, Path(scratch))
        for kind in traffic.KINDS if "throughput" in args.only else ():
            measured = rounds(sides, args.rounds, partial(bench.unpaced, kind), kind)
            found[kind] = {side: medians(each) for side, each in measured.items()}
            if len(sides) > 1:
                found[f"{kind}_to_upstream"] = ratio(measured[OURS], measured[UPSTREAM], "steps_per_s")
        if "sessions" in args.only:
            tenth = max(1, args.sessions // 10)
            for name, sessions in ((OURS, args.sessions), *((side, tenth) for side in sides)):
                progress(f"{name}, {sessions} sessions")
                found[f"{name}/{sessions}"] = bench.paced(name, sessions)
        if "workers" in args.only:
            one, two = (bench.unpaced("groups", OURS, 0, workers) for workers in (1, 2))
            gain = {name: rounded(two[name] / one[name]) for name in ("steps_per_s", "steps_per_cpu_s")}
            found["workers"] = {"1": one, "2": two, "two_to_one": gain}
    report("env_server", data=dataset.name, **found)


if __name__ == "__main__":
    main()
