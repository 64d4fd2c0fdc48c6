"""What it takes to look at many episodes: `sqlenv view` on a run of 50,000, as a user waits for it.

The run's episodes are real play of the random player on the synthetic data, repeated over the training steps. The
server is the real command in a process of its own, asked over HTTP: `start_s` from the command to the first answer,
`all_s` from then until the page has all episodes and its first list of them. The requests are the median of several: a
filter by kind of failure, a search, the curves, an episode with the others of its question. `plain` is the other side,
a script without us: json reads the file, and a loop looks for the same words. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from benchmarks.server_process import ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from env_server.settings import EnvSettings
from env_server.types import AnswerMode
from trainer.eval.run_files import RunFolder, episode_line
from trainer.evaluate import play_scripted
from trainer.rollout.environments import LOCAL, open_environments
from trainer.rollout.episodes import EpisodeRecord, record

RUN = "run"
STEP = 64
"""Episodes of a training step."""
WORDS = "Lagos"
REPEATS = 9


def real_play(count: int) -> list[EpisodeRecord]:
    """Return episodes of the random player."""
    dataset = load_dataset("synthetic")
    questions = list(islice(cycle(dataset.select(Split.TRAIN)), count))
    with closing(open_environments(LOCAL, None, dataset, EnvSettings(), AnswerMode.VALUE)) as environments:
        played = play_scripted("random", environments, questions, AnswerMode.VALUE, 0, lambda _: None)
    return [record(episode) for episode in played]


def write_run(folder: Path, records: Sequence[EpisodeRecord], count: int) -> RunFolder:
    """Write a run of so many episodes."""
    run = RunFolder.create(folder / RUN, {"sqlenv": {"data": "synthetic"}, "grpo": {}, "model": {}})
    with run.episodes_writer() as episodes, run.metrics_writer() as metrics:
        for number, one in enumerate(islice(cycle(records), count)):
            episodes.write_lines(episode_line(1 + number // STEP, one))
            if number % STEP == 0:
                metrics.write({"step": 1 + number // STEP, "loss": 0.0, "reward": one.reward})
    return run


def ask(server: ServerProcess, path: str, **values: Any) -> Any:
    """Return what the server answers."""
    with urllib.request.urlopen(f"{server.url}/api/{path}?{urlencode(values)}", timeout=120) as reply:
        return json.load(reply)


def seconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def opening(server: ServerProcess, started: float) -> dict[str, float]:
    """Wait as the page does, until all is there."""
    answered = time.perf_counter()
    ask(server, "state")
    ask(server, "episodes")
    return {"start_s": answered - started, "all_s": time.perf_counter() - answered}


def measure(folder: Path, count: int) -> dict[str, float]:
    """Open the run, and ask."""
    command = [sys.executable, "-m", "sqlenv", "view", str(folder), "--port", "{port}"]
    started = time.perf_counter()
    with ServerProcess(command, folder.parent / "log") as server:
        results = opening(server, started)
        middle = ask(server, "episodes", offset=count // 2, limit=1)["episodes"][0]["id"]
        requests = {
            "filter": lambda: ask(server, "episodes", kind="never_queried"),
            "search": lambda: ask(server, "episodes", text=f'"{WORDS}"'),
            "curves": lambda: ask(server, "curves", source=RUN),
            "episode": lambda: ask(server, f"episodes/{middle}"),
        }
        for request, work in requests.items():
            results[f"{request}_s"] = statistics.median(seconds(work) for _ in range(REPEATS))
        results["found"] = ask(server, "episodes", text=f'"{WORDS}"')["total"]
        results["server_mb"] = server.rss() / 1e6
    return results


def plain(run: RunFolder) -> dict[str, float]:
    """Read the episodes and search them without an index."""
    start = time.perf_counter()
    with run.episodes_path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    read = time.perf_counter() - start
    found = sum(any(WORDS in turn["result"] for turn in row["turns"]) for row in rows)
    return {"read_s": read, "search_s": time.perf_counter() - start - read, "found": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--played", type=int, default=2_000, help="of these, played; the others repeat them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        run = write_run(folder / "runs", real_play(args.played), args.episodes)
        results = {
            "episodes": args.episodes,
            "file_mb": run.episodes_path.stat().st_size / 1e6,
            **measure(folder / "runs", args.episodes),
            "plain": plain(run),
            "load": os.getloadavg()[0],
            "cores": os.cpu_count(),
        }
    rounded = json.loads(json.dumps(results), parse_float=lambda text: round(float(text), 4))
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
