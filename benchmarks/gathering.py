"""What the ranks of a run tell each other of a batch: its episodes, or their summaries and the log's lines.

    python -m benchmarks.gathering [--ranks 2] [--episodes 512] [--rounds 5] [--policy DIR] [--quick]

Real ranks over gloo, each with so many scripted episodes of 7 turns with some 90 tokens each. Two ways to have the
results of all on every rank, and all episodes in one file, in turn:

- `episodes`: every rank gets the episodes of all, and the main one writes them;
- `summaries`: every rank gets numbers (`trainer.training.batch_stats`), and the main one the lines that each made.

Prints one JSON line: for each way the seconds that it takes, the processor time of the main rank and of another in
milliseconds for each episode of the batch, the bytes that each sends for an episode, and the ratio of the seconds. What
a rank reads of others grows with --ranks, its own work does not: two runs tell them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainingArguments

from benchmarks.server_process import ROOT
from benchmarks.simulated import LONG_SCRIPT, ScriptedPolicy, SimulatedEngine
from env_server.data.loading import load_dataset
from env_server.dataset import Split, round_robin
from trainer.chat.format import ChatFormat
from trainer.models import tokenizer_of
from trainer.policy import resolve_policy
from trainer.ranks import Ranks
from trainer.rollout.client import RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.batch_stats import BatchRecords, of_all_ranks, without_texts
from trainer.training.run_log import episode_lines

GENERATIONS = 8


def scripted(policy: str, count: int) -> list[Episode]:
    """Play so many episodes."""
    chat = ChatFormat(tokenizer_of(resolve_policy(policy)))
    dataset = load_dataset("synthetic")
    questions = round_robin(dataset.select(Split.ALL))
    engine = SimulatedEngine(ScriptedPolicy(chat, [LONG_SCRIPT]), stop_ids=chat.stop_ids)
    with closing(LocalEnvironments(dataset)) as environments:
        client = RolloutClient(engine, environments, chat, RolloutSettings(TokenBudget(16_384, 32_768, 2_048)))
        requests = [request_for(questions[number % len(questions)], number) for number in range(count)]
        return asyncio.run(client.play(requests))


class Rank:
    """One of the ranks."""

    def __init__(self, ranks: Ranks, episodes: Sequence[Episode], log: Path) -> None:
        self._ranks = ranks
        self._own = list(episodes)
        self._log = log
        self._records = [record(episode, with_versions=True) for episode in self._own]

    def tell_episodes(self) -> int:
        """Every rank gets all of it. Returns how many it got."""
        everything = self._ranks.gather(self._own)
        if self._ranks.is_main:
            self._log.write_text(episode_lines(1, [record(each, with_versions=True) for each in everything]))
        return len(everything)

    def tell_summaries(self) -> int:
        """As training does. Returns of how many episodes it was told."""
        whole = of_all_ranks(self._ranks.gather([self._part()]), GENERATIONS)
        parts = self._ranks.gather_on_main(episode_lines(1, self._records))
        if self._ranks.is_main:
            self._log.write_text("".join(parts))
        return len(whole.rows)

    def sent(self) -> dict[str, int]:
        """Bytes of both ways."""
        return {
            "episodes": len(pickle.dumps(self._own)),
            "summaries": len(pickle.dumps(self._part())) + len(episode_lines(1, self._records).encode()),
        }

    def _part(self) -> BatchRecords:
        return BatchRecords([without_texts(each) for each in self._records])

    def timed(self, way: Callable[[], int]) -> tuple[float, float]:
        """Seconds, and milliseconds of the processor for each episode of the batch."""
        self._ranks.gather([])  # together
        began, worked = time.perf_counter(), time.process_time()
        count = way()
        # The main one's end is the end: training goes on when it does.
        self._ranks.gather([])
        return time.perf_counter() - began, 1e3 * (time.process_time() - worked) / count


def work(policy: str, count: int, rounds: int, out: Path) -> None:
    """Be one rank; the main one writes what came out."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks = Ranks.of(TrainingArguments(output_dir=str(out), use_cpu=True, bf16=False))
    rank = Rank(ranks, scripted(policy, count), out / "episodes.jsonl")
    ways = {"episodes": rank.tell_episodes, "summaries": rank.tell_summaries}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(rank.timed(way))
    middles = {name: [median(column) for column in zip(*taken, strict=True)] for name, taken in found.items()}
    everyone = ranks.gather([middles])
    if ranks.is_main:
        result: dict[str, Any] = {
            "benchmark": "gathering",
            "policy": policy,
            "ranks": ranks.count,
            "episodes_per_rank": count,
        }
        sent = rank.sent()
        for name in ways:
            result[name] = {
                "seconds": round(max(middle[name][0] for middle in everyone), 4),
                "main_cpu_ms": round(everyone[0][name][1], 4),
                "other_cpu_ms": round(everyone[-1][name][1], 4),
                "bytes": round(sent[name] / count),
            }
        result["ratio"] = round(result["episodes"]["seconds"] / result["summaries"]["seconds"], 2)
        (out / "result.json").write_text(json.dumps(result))
    ranks.disconnect()


def main() -> None:
    """Start the ranks, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="whose tokenizer and chat template are used")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=512, help="of a rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few episodes: shows that it runs, measures little")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    episodes, rounds = (16, 1) if args.quick else (args.episodes, args.rounds)
    if args.out:
        work(args.policy, episodes, rounds, Path(args.out))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks), "--standalone"]
        command += ["-m", "benchmarks.gathering", "--out", folder, "--policy", args.policy]
        command += ["--episodes", str(episodes), "--rounds", str(rounds)]
        subprocess.run(command, cwd=ROOT, check=True)
        print((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    main()
