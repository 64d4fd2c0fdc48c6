"""Many open sessions on one server process, and one worker against two.

    python -m benchmarks.sessions [--sessions 10000] [--interval_s 10] [--quick]

Three servers of one process, one after the other: ours with --sessions and with a tenth of them, and upstream's, as in
`benchmarks/env_server.py`, with that tenth (where `make openenv` has installed it). All sessions connect and reset at
once; then each plays whole episodes, a step every --interval_s, for --seconds, as policies do that think in between. A
step's latency counts from when it was due. Printed are the milliseconds of steps, the seconds until all sessions had
the reply to their first reset, and the memory of the server's processes above what it was after its start: with all
sessions open, and after they have played, which includes the results that the server keeps.

Then ours with one worker and with two, 64 sessions without pauses: steps a second, and steps for each second of
processor time that the server used. The load generator needs a processor, too: with fewer than three the second number
says what two workers would do on processors of their own, and the first one does not. Prints one JSON line; `ratio` is
the p99 of --sessions sessions of ours to that of upstream's tenth.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path

from benchmarks import traffic
from benchmarks.env_server import OURS, UPSTREAM, UPSTREAM_PYTHON, rounded, serve
from benchmarks.load_generator import Load
from benchmarks.server_process import Generator, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset

UNPACED_SESSIONS = 64
UNPACED_STEPS = 12_000
"""Steps per second that the messages are written for."""
WARMUP_S = 1.0


def measure(server: ServerProcess, load: Load, folder: Path) -> dict[str, float]:
    """Put the load on a server that has just started."""
    before, generator = server.rss(), Generator(load, folder)
    try:
        ready = generator.connect()
        grown, cpu = server.rss() - before, server.cpu_s()
        generator.start()
        outcome = generator.outcome()
        cpu = server.cpu_s() - cpu
        played = server.rss() - before
    finally:
        generator.stop()
    if outcome.failures or outcome.lost:
        raise SystemExit(f"{outcome.failures} replies were no observation, {outcome.lost} sessions were lost")
    found = {
        "connect_s": ready.connect_s,
        "mb_open": grown / 1e6,
        "mb_played": played / 1e6,
        "p50_ms": outcome.p50_s * 1e3,
        "p99_ms": outcome.p99_s * 1e3,
        "steps_per_s": outcome.steps / outcome.seconds,
        "steps_per_cpu_s": outcome.messages / cpu,
        "server_cpu": cpu / (outcome.seconds + load.warmup_s),
        "generator_cpu": outcome.cpu_s / outcome.seconds,
    }
    return {name: rounded(number) for name, number in found.items()}


def paced(name: str, dataset: Dataset, args: argparse.Namespace, sessions: int, folder: Path) -> dict[str, float]:
    """Measure sessions that think between their steps."""
    messages = folder / "messages.json"
    steps = math.ceil((args.seconds + WARMUP_S) / args.interval_s) + 1
    texts = traffic.scripts(dataset, "groups", sessions, math.ceil(steps / traffic.EPISODE) + 1)
    messages.write_text(json.dumps(texts))
    with serve(name, args.data, sessions, folder / "server.log", UPSTREAM_PYTHON) as server:
        load = Load(port=server.port, messages_file=messages, episode=traffic.EPISODE, seconds=args.seconds)
        return measure(server, load.model_copy(update={"interval_s": args.interval_s}), folder)


def unpaced(dataset: Dataset, args: argparse.Namespace, workers: int, folder: Path) -> dict[str, float]:
    """Measure as many steps as a number of workers can take."""
    messages = folder / "messages.json"
    episodes = math.ceil(UNPACED_STEPS * (args.seconds + WARMUP_S) / traffic.STEPS / UNPACED_SESSIONS) + 1
    messages.write_text(json.dumps(traffic.scripts(dataset, "groups", UNPACED_SESSIONS, episodes)))
    with serve(OURS, args.data, UNPACED_SESSIONS, folder / "server.log", UPSTREAM_PYTHON, workers) as server:
        load = Load(port=server.port, messages_file=messages, episode=traffic.EPISODE, seconds=args.seconds)
        return measure(server, load, folder)


def main() -> None:
    """Measure and print."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"spider:{folder}" if folder else "synthetic", help="the data set")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--interval_s", type=float, default=10.0, help="between two steps of a session")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="100 sessions, 2 seconds: shows that it runs")
    args = parser.parse_args()
    if args.quick:
        args.sessions, args.interval_s, args.seconds = 100, 0.5, 2.0
    dataset = load_dataset(args.data)
    tenth = max(1, args.sessions // 10)
    sides = [(OURS, args.sessions), (OURS, tenth)]
    if UPSTREAM_PYTHON.exists():
        sides.append((UPSTREAM, tenth))
    else:
        print("upstream is left out: `make openenv` installs it", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        found = {}
        for name, sessions in sides:
            print(f"{name}, {sessions} sessions", file=sys.stderr)
            found[f"{name}/{sessions}"] = paced(name, dataset, args, sessions, place)
        workers = {count: unpaced(dataset, args, count, place) for count in (1, 2)}
    beside = found.get(f"{UPSTREAM}/{tenth}")
    result = {
        "benchmark": "sessions",
        "data": dataset.name,
        "interval_s": args.interval_s,
        "ratio": beside and rounded(found[f"{OURS}/{args.sessions}"]["p99_ms"] / beside["p99_ms"]),
        **found,
        "workers": workers,
        "two_workers_to_one": {
            name: rounded(workers[2][name] / workers[1][name]) for name in ("steps_per_s", "steps_per_cpu_s")
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
