"""How fast is `sqlenv serve` beside upstream's server and beside a bare echo?

    python benchmarks/env_server.py [--quick]

Three servers, one process of each at a time: ours; the same SQLEnvironment behind upstream's `create_app` (needs the
virtual environment that `make openenv` makes); and a FastAPI echo of the same messages, which is the ceiling. All on
uvloop and the same versions of FastAPI and uvicorn. A load generator in its own process plays whole episodes, a message
per session at a time (`benchmarks/traffic.py` says what is in them), with 64 and 1,000 sessions and two kinds of
traffic: every query text distinct, and groups of eight sessions on the same question. Rewards are on; SQL runs on real
databases: the Spider folder that SQLENV_SPIDER_DIR names, else the synthetic data.

Every measurement starts a fresh server. The order of the servers rotates from round to round; what is printed is the
median over the rounds, and ratios are medians of the rounds' ratios. One JSON line: steps per second, the steps'
p50 and p99 latency, the time until all sessions were connected and reset, and the memory of a session.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks import traffic
from benchmarks.load_generator import Load
from benchmarks.server_process import ROOT, SERVE, Generator, ServerProcess
from env_server.data.loading import load_dataset

OURS, UPSTREAM, ECHO = "ours", "upstream", "echo"
UPSTREAM_PYTHON = ROOT / ".venv-openenv/bin/python"
SESSIONS = (64, 1_000)
HEADROOM = 1.1
"""The servers admit this many times the sessions."""
FASTEST_STEPS = 25_000
"""Steps per second that the messages are written for; a server beyond that plays them again."""
WARM_SESSIONS = 8
WARM_MESSAGES = 2 * traffic.EPISODE
BUSY = 0.9
"""A generator that computes for more than this share of the time is the bottleneck."""


class Measurement(NamedTuple):
    """One server under one load."""

    steps_per_s: float
    p50_ms: float
    p99_ms: float
    connect_s: float
    kb_per_session: float
    server_cpu: float
    """Processors in use by the server's processes."""
    generator_cpu: float
    failures: float
    """Replies that were no observation, and lost connections: anything but 0 makes the rest worthless."""
    repeated: float
    """Sessions that ran out of messages and began again."""


def serve(name: str, data: str, sessions: int, log: Path, upstream: Path, workers: int = 1) -> ServerProcess:
    """Start one of the servers; `workers` are of ours."""
    limit = str(math.ceil(sessions * HEADROOM))
    match name:
        case "ours":
            # The limit on messages stays on, beyond what a session can send.
            settings = {"SQLENV_MAX_SESSIONS": limit, "SQLENV_MESSAGES_PER_S": "100000"}
            return ServerProcess([*SERVE, "--data", data, "--workers", str(workers)], log, settings)
        case "upstream":
            command = [str(upstream), "-m", "benchmarks.env_server_upstream", "{port}", data, limit]
            return ServerProcess(command, log)
    return ServerProcess([sys.executable, "-m", "benchmarks.env_server_echo", "{port}"], log)


def measure(name: str, server: ServerProcess, messages: Path, seconds: float, folder: Path) -> Measurement:
    """Put one load on a server that has just started."""
    load = Load(port=server.port, messages_file=messages, episode=traffic.EPISODE, seconds=seconds, echo=name == ECHO)
    warm = folder / "warm.json"
    texts: list[list[str]] = json.loads(messages.read_bytes())
    warm.write_text(json.dumps([own[-WARM_MESSAGES:] for own in texts[-WARM_SESSIONS:]]))
    first = Generator(load.model_copy(update={"messages_file": warm, "rounds": WARM_MESSAGES}), folder)
    first.connect()
    first.start()
    first.outcome()
    memory = server.rss()
    generator = Generator(load, folder)
    try:
        ready = generator.connect()
        grown = server.rss() - memory
        cpu = server.cpu_s()
        generator.start()
        outcome = generator.outcome()
        cpu = server.cpu_s() - cpu
    finally:
        generator.stop()
    return Measurement(
        steps_per_s=outcome.steps / outcome.seconds,
        p50_ms=outcome.p50_s * 1e3,
        p99_ms=outcome.p99_s * 1e3,
        connect_s=ready.connect_s,
        kb_per_session=grown / len(texts) / 1e3,
        server_cpu=cpu / (outcome.seconds + load.warmup_s),
        generator_cpu=outcome.cpu_s / outcome.seconds,
        failures=outcome.failures + outcome.lost,
        repeated=outcome.repeated,
    )


def summary(rounds: Sequence[Measurement]) -> dict[str, float]:
    """Return the median of each number."""
    return {field: rounded(median(getattr(each, field) for each in rounds)) for field in Measurement._fields}


def ratio(above: Iterable[Measurement], below: Iterable[Measurement], field: str) -> float:
    """Return the median of the rounds' ratios."""
    pairs = zip(above, below, strict=True)
    return rounded(median(getattr(a, field) / getattr(b, field) for a, b in pairs if getattr(b, field)))


def rounded(number: float) -> float:
    """Keep four digits."""
    return float(f"{number:.4g}")


def compare(found: Mapping[str, Sequence[Measurement]]) -> dict[str, object]:
    """Return both sides and their ratios for one load."""
    ours, echo = found[OURS], found[ECHO]
    result: dict[str, object] = {name: summary(rounds) for name, rounds in found.items()}
    if UPSTREAM in found:
        result["steps_to_upstream"] = ratio(ours, found[UPSTREAM], "steps_per_s")
        result["p99_to_upstream"] = ratio(ours, found[UPSTREAM], "p99_ms")
    result["steps_to_echo"] = ratio(ours, echo, "steps_per_s")
    result["connect_to_echo"] = ratio(ours, echo, "connect_s")
    beyond = [a.kb_per_session - b.kb_per_session for a, b in zip(ours, echo, strict=True)]
    result["kb_per_session_above_echo"] = rounded(median(beyond))
    result["generator_bound"] = [
        name for name, rounds in found.items() if median(each.generator_cpu for each in rounds) > BUSY
    ]
    return result


def main() -> None:
    """Measure and print."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"spider:{folder}" if folder else "synthetic", help="the data set")
    parser.add_argument("--sessions", type=int, nargs="+", default=SESSIONS)
    parser.add_argument("--traffic", nargs="+", choices=traffic.KINDS, default=traffic.KINDS)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--upstream", type=Path, default=UPSTREAM_PYTHON, help="its Python")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures little")
    args = parser.parse_args()
    seconds, count = (2.0, 1) if args.quick else (args.seconds, args.rounds)
    names = [OURS, UPSTREAM, ECHO] if args.upstream.exists() else [OURS, ECHO]
    if UPSTREAM not in names:
        print("upstream is left out: `make openenv` installs it", file=sys.stderr)
    dataset = load_dataset(args.data)
    loads = [(kind, sessions) for kind in args.traffic for sessions in args.sessions]
    found: dict[tuple[str, int], dict[str, list[Measurement]]] = {load: defaultdict(list) for load in loads}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for turn in range(count):
            for kind, sessions in loads:
                episodes = math.ceil(FASTEST_STEPS * (seconds + 1) / traffic.STEPS / sessions) + 1
                messages = scratch / "messages.json"
                messages.write_text(json.dumps(traffic.scripts(dataset, kind, sessions, episodes, seed=turn)))
                for place in range(len(names)):
                    name = names[(turn + place) % len(names)]
                    print(
                        f"\rround {turn + 1}/{count}: {kind}, {sessions} sessions, {name}   ", end="", file=sys.stderr
                    )
                    with serve(name, args.data, sessions, scratch / f"{name}.log", args.upstream) as server:
                        measured = measure(name, server, messages, seconds, scratch)
                        found[kind, sessions][name].append(measured)
    results = {f"{kind}/{sessions}": compare(found[kind, sessions]) for kind, sessions in loads}
    print(json.dumps({"benchmark": "env_server", "data": dataset.name, "rounds": count, "results": results}))


if __name__ == "__main__":
    main()
