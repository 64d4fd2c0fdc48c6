"""Does anything leak, hang or go unexplained when many clients behave badly for long?

    python benchmarks/soak.py [--steps 200000 --episodes 20000]

Processes of clients (`benchmarks/soak_client.py`) play against one server and leave in every way that a client can; one
of the processes is killed every few seconds. The server admits fewer sessions than they want, so that some wait and
some are refused. After a warm-up and then a few times more, all clients pause, and the server is looked at once no
session is left: silent clients, whose sockets are still open on their side, must be gone by then.

Prints one JSON line; `problems` says what is wrong, and the exit status is 1 when anything is. Judged are: sessions,
threads and handles that stay; memory that grows with sessions (what the cache of results holds is taken off); refusals
and closed sessions that the metrics do not account for; replies that are late, missing, out of order or unexpected;
the log; the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks import traffic
from benchmarks.server_process import ROOT, SERVE, ServerProcess
from benchmarks.soak_client import Soak
from env_server.data.loading import load_dataset

PROCESSES = 3
SESSIONS = 24
"""Sessions that each process of clients wants at once; most of the time they are on their way in or out."""
PLACES = 12
IDLE_S = 3.0
SETTINGS = {
    "SQLENV_MAX_SESSIONS": str(PLACES),
    "SQLENV_QUEUE_SIZE": "4",
    "SQLENV_QUEUE_TIMEOUT_S": "0.05",
    "SQLENV_IDLE_TIMEOUT_S": str(IDLE_S),
}
SILENT = 2
"""Sessions of a process, at most, that fall silent: they hold places until the server lets go of them."""
EPISODES = 300
"""Different episodes: few enough for what they ask to be in the server's cache after the warm-up."""
WARM_UP = 0.2
"""Share of the steps."""
KILL_EVERY_S = 4.0
SETTLE_S = 90.0
"""Longest time until the server has let go of everything, also of those who do not read."""
OWN_SOCKETS = 2
"""Connections of the one who looks, on their way out."""
POOLED_FILES = 32
"""Databases that the server and its query processes may keep open beyond those of the warm-up."""
POLL_S = 0.2
LEAK_BYTES = 300
"""Memory that may stay for each session."""
NOISE_BYTES = 8_000_000
"""Memory that may come and go."""


UNEXPLAINED = (
    ("sqlenv_refused_total", "other"),
    ("sqlenv_sessions_closed_total", "other"),
    ("sqlenv_sessions_closed_total", "error"),
)
"""What must not be counted."""


class Look(NamedTuple):
    """The server while nobody plays."""

    sessions_opened: float
    rss: int
    cache_bytes: float
    threads: int
    sockets: int
    files: int


class Crowd:
    """One process of clients; its last report is kept by a thread that reads them."""

    def __init__(self, spec: Soak, folder: Path) -> None:
        file = folder / f"clients-{spec.seed}.json"
        file.write_text(spec.model_dump_json())
        self.counts: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak_client", str(file)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            report = json.loads(line)
            self.counts, self.surprises = Counter(report["counts"]), report["surprises"]

    def pause(self) -> None:
        """Stop playing; silent sessions stay open."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """End the process as it wants."""
        assert self._process.stdin
        self._process.stdin.close()
        if self._process.wait(SETTLE_S):
            self.surprises.append(f"a process of clients ended with code {self._process.returncode}")
        self._reader.join()

    def kill(self) -> None:
        """Kill it: the kernel closes what it had open."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()


class SoakTest:
    """One server and its crowds."""

    def __init__(self, server: ServerProcess, episodes_file: Path, folder: Path) -> None:
        self._server = server
        self._episodes_file = episodes_file
        self._folder = folder
        self._chance = random.Random(0)
        self._made = 0
        self.counts: Counter[str] = Counter()
        """What all clients have reported; those that were killed, up to their last report."""
        self.problems: list[str] = []

    def play(self, steps: float, episodes: int) -> None:
        """Let crowds play until the server has counted so many steps, and the clients so many episodes, in all.

        One of them is killed half-way, and every few seconds.
        """
        crowds = [self._crowd() for _ in range(PROCESSES)]
        half = (self.counts["episodes"] + episodes) / 2
        next_kill = time.monotonic() + KILL_EVERY_S
        while True:
            time.sleep(POLL_S)
            played = self.counts["episodes"] + sum(crowd.counts["episodes"] for crowd in crowds)
            if half == math.inf and played >= episodes and self._server.metric("sqlenv_steps_total") >= steps:
                break
            if played >= half or time.monotonic() > next_kill:
                half, next_kill = math.inf, time.monotonic() + KILL_EVERY_S
                victim = crowds.pop(self._chance.randrange(PROCESSES))
                victim.kill()
                self.counts["killed"] += 1
                self._take(victim)
                crowds.append(self._crowd())
        for crowd in crowds:
            crowd.pause()
        self._settle()
        for crowd in crowds:
            crowd.end()
            self._take(crowd)

    def look(self) -> Look:
        """Look at the server while nobody plays."""
        return Look(
            self._server.metric("sqlenv_sessions_opened_total"),
            self._server.rss(),
            self._server.metric("sqlenv_cache_bytes"),
            self._server.threads(),
            *self._server.handles(),
        )

    def _crowd(self) -> Crowd:
        self._made += 1
        spec = Soak(
            port=self._server.port,
            episodes_file=self._episodes_file,
            sessions=SESSIONS,
            seed=self._made,
            silent=SILENT,
        )
        return Crowd(spec, self._folder)

    def _take(self, crowd: Crowd) -> None:
        self.counts += crowd.counts
        self.problems += crowd.surprises

    def _settle(self) -> None:
        """Wait until the server has let go of every session, and its pools of every query."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            ready = json.loads(self._server.get("/ready"))
            left = {
                "sessions": ready["active_sessions"],
                "waiting": ready["waiting"],
                "open": self._server.metric("sqlenv_sessions_opened_total")
                - self._server.metric("sqlenv_sessions_closed_total"),
                "pools": self._server.metric("sqlenv_pool_waiting") + self._server.metric("sqlenv_pool_running"),
            }
            if not any(left.values()):
                return
            if time.monotonic() > deadline:
                self.problems.append(f"still there {SETTLE_S:g} s after the last client: {left}")
                return
            time.sleep(POLL_S)

    def judge(self, looks: list[Look]) -> None:
        """Compare the looks: the first is after the warm-up."""
        first, last = looks[0], looks[-1]
        if last.threads > first.threads:
            self.problems.append(f"threads grew from {first.threads} to {last.threads}")
        if last.sockets > first.sockets + OWN_SOCKETS:
            self.problems.append(f"sockets grew from {first.sockets} to {last.sockets}")
        if last.files > first.files + POOLED_FILES:
            self.problems.append(f"open files grew from {first.files} to {last.files}")
        sessions = last.sessions_opened - first.sessions_opened
        grown = last.rss - first.rss - (last.cache_bytes - first.cache_bytes)
        if grown > max(NOISE_BYTES, LEAK_BYTES * sessions):
            self.problems.append(f"memory grew by {grown / 1e6:.1f} MB in {sessions:.0f} sessions")
        explained = self._server.metric("sqlenv_refused_total")
        if not explained:
            self.problems.append("nobody was refused, so that was not tried: the server admits more than clients want")
        if self.counts["refused"] > explained:
            self.problems.append(f"clients saw {self.counts['refused']} refusals, the metrics {explained:.0f}")
        for name, reason in UNEXPLAINED:
            if count := self._server.metric_by_label(name).get(reason):
                self.problems.append(f"{name} counts {count:.0f} with the reason {reason}")


def complaints(log: str) -> list[str]:
    """Return the lines of a server's log that tell of errors."""
    return [line for line in log.splitlines() if "Traceback" in line or '"level": "error"' in line]


def main() -> int:
    """Soak, judge and print."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=f"spider:{folder}" if folder else "synthetic", help="the data set")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--looks", type=int, default=8, help="times that the server is looked at after the warm-up")
    args = parser.parse_args()
    dataset = load_dataset(args.data)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        episodes_file = scratch / "episodes.json"
        texts = traffic.scripts(dataset, "groups", EPISODES, 1)
        episodes_file.write_text(json.dumps(texts))
        with ServerProcess([*SERVE, "--data", args.data], scratch / "server.log", SETTINGS) as server:
            soak = SoakTest(server, episodes_file, scratch)
            looks: list[Look] = []
            for turn in range(args.looks + 1):
                share = WARM_UP + (1 - WARM_UP) * turn / args.looks
                print(f"\r{share:.0%}   ", end="", file=sys.stderr, flush=True)
                soak.play(args.steps * share, int(args.episodes * share))
                looks.append(soak.look())
            soak.judge(looks)
            steps = server.metric("sqlenv_steps_total")
            closed = server.metric_by_label("sqlenv_sessions_closed_total")
            refused = server.metric_by_label("sqlenv_refused_total")
            status = server.stop()
            if status:
                soak.problems.append(f"the server ended with code {status}")
            soak.problems += complaints(server.log_text())
    report: dict[str, Any] = {
        "benchmark": "soak",
        "problems": soak.problems[:50],
        "steps": steps,
        "episodes": soak.counts["episodes"],
        "seconds": time.monotonic() - began,
        "sessions_closed": closed,
        "refused": refused,
        "clients": dict(soak.counts),
        "looks": [look._asdict() for look in looks],
        "data": dataset.name,
    }
    print(json.dumps(report))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
