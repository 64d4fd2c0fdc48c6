"""Does --dynamic_sampling leave fewer groups without signal, and does the success that a run logs stay unbiased?

Where most groups have none.

    python -m benchmarks.refill [--batches 40] [--dynamic_sampling 4]

Real batches, rollout client, environments and judging on the synthetic data set; the policy is scripted, so that its
success is known: of the questions, 30% are never solved, 30% always, the others by the toss of a coin. So 60% of the
groups teach nothing by themselves. The same batches are played without and with refill.

One JSON line: `useful` is the share of rows in groups whose rewards differ; `extra` the episodes that were played for
each that is trained on, beyond it; `success` what the run logs as rollout/success_rate, the mean over batches, with its
standard error; `true` the success of the questions that were drawn; `trained` what one would read off the rows that are
trained on, which refill chooses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig

from benchmarks.simulated import SimulatedEngine, TurnRequest
from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Question, Split
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.types import ActionType, AnswerMode
from trainer.chat.actions import format_action
from trainer.chat.format import ChatFormat
from trainer.models import tokenizer_of
from trainer.policy import resolve_policy
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient, RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import EpisodeRecord, has_signal
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT
from trainer.training.batch_shape import BatchSettings
from trainer.training.batches import Batches
from trainer.training.questions import EpochOrder

GROUPS, SIZE = 8, 8
WEIGHTS = [1.0, 0.0, 0.0, 0.0]
"""Correctness alone."""


def chance_of(question: Question) -> float:
    """The probability that the scripted policy solves it."""
    place = int.from_bytes(sha256(question.text.encode()).digest()[:4], "big") / 2**32
    return 0.0 if place < 0.3 else 1.0 if place < 0.6 else 0.5


class Scripted:
    """Answers at once: rightly, or not."""

    def __init__(self, questions: Sequence[Question], chat: ChatFormat, tokenizer: PreTrainedTokenizerBase) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._questions = {question.text: question for question in questions}

    def __call__(self, request: TurnRequest) -> Sequence[int]:
        """Return the ids of an ANSWER."""
        text = self._chat.text_of(request.prompt_ids)
        # The longest: one question's text may begin another's.
        found = max((each for each in self._questions if each in text), key=len)
        question = self._questions[found]
        solved = (request.seed % 1_000) / 1_000 < chance_of(question)
        answer = format_answer(question.gold.rows) if solved else "nobody knows"
        ids: list[int] = self._tokenizer.encode(format_action(ActionType.ANSWER, answer), add_special_tokens=False)
        return [*ids, self._chat.stop_ids[0]]


def play(dataset: Dataset, refill: float, batches: int) -> dict[str, float]:
    """Play the batches of a run, and read what it logs."""
    grpo = GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=GROUPS * SIZE,
        num_generations=SIZE,
        reward_weights=WEIGHTS,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    questions = dataset.select(Split.TRAIN)
    tokenizer = tokenizer_of(resolve_policy(str(BASE_CHECKPOINT)))
    chat = ChatFormat(tokenizer)
    engine = SimulatedEngine(Scripted(questions, chat, tokenizer), stop_ids=chat.stop_ids)
    metrics: dict[str, list[float]] = defaultdict(list)
    trained: list[float] = []
    played = 0

    def told(_: int, episodes: Sequence[EpisodeRecord]) -> None:
        nonlocal played
        played += len(episodes)
        rows = episodes[: GROUPS * SIZE]
        trained.append(fmean(episode.correct for episode in rows))
        groups = [rows[first : first + SIZE] for first in range(0, len(rows), SIZE)]
        useful.append(fmean(map(has_signal, groups)))

    useful: list[float] = []
    with RolloutLoop() as loop, closing(LocalEnvironments(dataset, EnvSettings(), AnswerMode.VALUE)) as environments:
        order = EpochOrder([question.question_id for question in questions], seed=0)
        client = RolloutClient(engine, environments, chat, RolloutSettings(TokenBudget(512, 2_048, 256)))
        source = Batches(
            dataset, order, grpo, Ranks(), loop, client, BatchSettings(dynamic_sampling=refill), on_batch=told
        )
        for step in range(batches):
            engine.policy_version = step
            trainer: Any = SimpleNamespace(
                state=SimpleNamespace(global_step=step, max_steps=batches), _metrics={"train": metrics}
            )
            source.prepare(trainer)
            print(f"\rrefill {refill:g}: batch {step + 1}/{batches} ", end="", file=sys.stderr, flush=True)
        loop.run(engine.aclose())
    print(file=sys.stderr)
    drawn = [order.draw(step, GROUPS)[:GROUPS] for step in range(batches)]
    rates = metrics["rollout/success_rate"]
    return {
        "useful": round(fmean(useful), 3),
        "extra": round(played / (batches * GROUPS * SIZE) - 1, 3),
        "success": round(fmean(rates), 4),
        "standard_error": round(stdev(rates) / math.sqrt(len(rates)), 4),
        "true": round(fmean(chance_of(dataset.question(each)) for batch in drawn for each in batch), 4),
        "trained": round(fmean(trained), 4),
    }


def main() -> None:
    """Play both, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--dynamic_sampling", type=float, default=4.0)
    args = parser.parse_args()
    dataset = load_dataset("synthetic")
    results = {
        name: play(dataset, value, args.batches) for name, value in (("without", 0.0), ("with", args.dynamic_sampling))
    }
    print(json.dumps({"benchmark": "refill", "batches": args.batches, "refill": args.dynamic_sampling, **results}))


if __name__ == "__main__":
    main()
