"""How fast does the Hugging Face engine play when it keeps the KV cache between turns? Are the episodes the same?

    python -m benchmarks.hf_generate [--policy tiny | DIR] [--episodes 16] [--seeds 1] [--quick]

The same episodes twice, with the same seeds: by an engine that prefills the whole prompt at each turn
(`kv_cache_bytes=0`, `transformers` generate), and by the one that a user gets. Real environments in this process, on
the Spider folder that SQLENV_SPIDER_DIR names, else on synthetic data. Sides alternate. Prints one JSON line: seconds
of each side, the median of the ratios, and how many episodes are equal, token by token; for the tokens before the
first one that differs, the largest gap of logprobs: batches of other shapes round otherwise, and a draw that falls
between two roundings then takes another token.

`--worked N` puts worked episodes into the prompt: without, a model that was not trained on SQLEnv says little of use.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from benchmarks.harness import parser, report, rounds, spider_or_synthetic
from env_server.data.loading import load_dataset
from env_server.dataset import Question, Split
from env_server.types import AnswerMode
from inference.hf.engine import KV_CACHE_BYTES, HFEngine
from tests.small_model import SMALL_MODEL
from trainer.chat.format import ChatFormat
from trainer.models import load_policy
from trainer.rollout.client import RolloutClient, RolloutSettings, derive_seed, request_for
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.players import Examples
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT

SIDES = {"whole_prompts": 0, "kept": KV_CACHE_BYTES}


class Played(NamedTuple):
    """What one side did with a batch; `read` are the ids that the model read, padding included."""

    seconds: float
    read: int
    episodes: list[Episode]


class Bench:
    """Plays batches of episodes by one side or the other."""

    def __init__(self, policy: str, data: str, settings: Namespace) -> None:
        dataset = load_dataset(data)
        self._model, tokenizer = load_policy(policy)
        examples = Examples.play(dataset, settings.worked, AnswerMode.VALUE, settings.step_budget)
        self._questions: Sequence[Question] = examples.without(
            dataset.select(Split.EVAL) or dataset.select(Split.TRAIN)
        )
        self._chat = ChatFormat(tokenizer, examples=examples.conversations)
        self._pad = self._chat.stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._environments = LocalEnvironments(dataset, threads=2)
        self._args = settings
        self._read = 0
        self._model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, _: object, given: tuple[torch.Tensor, ...]) -> None:
        self._read += given[0].numel()

    def play(self, side: str, seed: int) -> Played:
        """Play the episodes of a seed."""
        args = self._args
        context = int(self._model.config.max_position_embeddings)
        budget = TokenBudget(min(args.max_completion_length, context), context, args.max_turn_length)
        settings = RolloutSettings(budget, args.temperature, max_concurrency=args.concurrency)
        engine = HFEngine(
            self._model,
            stop_ids=self._chat.stop_ids,
            pad_id=self._pad,
            max_batch=args.concurrency,
            max_context=context,
            kv_cache_bytes=SIDES[side],
        )
        client = RolloutClient(engine, self._environments, self._chat, settings)
        step = max(1, len(self._questions) // args.episodes)
        chosen = [self._questions[(index * step) % len(self._questions)] for index in range(args.episodes)]
        requests = [request_for(question, derive_seed(seed, index)) for index, question in enumerate(chosen)]

        async def run() -> list[Episode]:
            try:
                return await client.play(requests)
            finally:
                await engine.aclose()

        before, began = self._read, time.perf_counter()
        episodes = asyncio.run(run())
        return Played(time.perf_counter() - began, self._read - before, episodes)

    def close(self) -> None:
        """Release everything."""
        self._environments.close()


def summary(sides: Sequence[Played]) -> dict[str, float]:
    """One side over all seeds."""
    episodes = [episode for played in sides for episode in played.episodes]
    generated = sum(sum(episode.row.env_mask) for episode in episodes)
    seconds = sum(played.seconds for played in sides)
    return {
        "seconds": round(seconds, 2),
        "episodes_per_s": round(len(episodes) / seconds, 3),
        "generated_tokens_per_s": round(generated / seconds, 1),
        "turns": round(fmean(len(episode.turns) for episode in episodes), 2),
        "tokens_generated": generated,
        "tokens_read": sum(played.read for played in sides),
        "failed": sum(episode.outcome is Outcome.FAILED for episode in episodes),
    }


def agreement(pairs: Sequence[tuple[Episode, Episode]]) -> dict[str, float]:
    """How alike the episodes of both sides are."""
    equal, gap, compared = 0, 0.0, 0
    for one, other in pairs:
        rows = one.row, other.row
        equal += rows[0].prompt_ids == rows[1].prompt_ids and rows[0].completion_ids == rows[1].completion_ids
        tokens = zip(rows[0].completion_ids, rows[1].completion_ids, strict=False)
        for index, (a, b) in enumerate(tokens):
            if a != b or one.truncated_turns or other.truncated_turns:
                break
            gap = max(gap, abs(rows[0].logprobs[index] - rows[1].logprobs[index]))
            compared += rows[0].env_mask[index]
    return {
        "episodes": len(pairs),
        "equal": equal,
        "tokens_compared": compared,
        "largest_logprob_gap": float(f"{gap:.2e}"),
    }


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__, "few episodes of few turns")
    arguments.add_argument("--policy", default=str(SMALL_MODEL), help="'tiny', or a checkpoint's folder")
    arguments.add_argument("--data", help="default: the Spider folder, if there is one; for the tiny policy synthetic")
    arguments.add_argument("--episodes", type=int, default=16)
    arguments.add_argument("--concurrency", type=int, default=64, help="episodes in flight at most")
    arguments.add_argument("--seeds", type=int, default=1, help="how many batches each side plays")
    arguments.add_argument("--temperature", type=float, default=1.0)
    arguments.add_argument("--worked", type=int, help="worked episodes in the prompt (default: 2; tiny: 0)")
    arguments.add_argument("--step_budget", type=int, default=15)
    arguments.add_argument("--max_turn_length", type=int, default=64)
    arguments.add_argument("--max_completion_length", type=int, default=4_096)
    arguments.add_argument("--threads", type=int, default=0, help="torch's threads (0: its own choice)")
    args = arguments.parse_args()
    tiny = args.policy == "tiny"
    if args.worked is None:
        args.worked = 0 if tiny else 2
    if args.quick:
        args.episodes, args.step_budget, args.max_turn_length = min(args.episodes, 4), 3, 16
    if args.threads:
        torch.set_num_threads(args.threads)
    data = args.data or ("synthetic" if tiny else spider_or_synthetic())
    bench = Bench(str(BASE_CHECKPOINT) if tiny else args.policy, data, args)
    played = rounds(list(SIDES), args.seeds, bench.play)
    bench.close()
    both = list(zip(played["whole_prompts"], played["kept"], strict=True))
    report(
        "hf_generate",
        policy=args.policy,
        data=data,
        **{side: summary(batches) for side, batches in played.items()},
        ratio=round(median(whole.seconds / kept.seconds for whole, kept in both), 2),
        agreement=agreement([pair for whole, kept in both for pair in zip(whole.episodes, kept.episodes, strict=True)]),
    )


if __name__ == "__main__":
    main()
