"""How much faster the training part of a step, GRPO's or a warm-up's, is than with TRL's trainer as it is.

The training part is everything after the rollout: old logprobs, loss, gradients, optimizer. Rows are episodes that were
really played, by the oracle and by a player who stumbles, a group to a question, as a chat format writes them. Each
side is a process of its own, on the same weights, and takes the same steps: the time is its fastest step's, on the
clock and in processor seconds, which others on the machine disturb less; the memory is its peak. Loss and gradients of
the first step are compared; nothing else of the two sides differs than the trainer.

One JSON line: tokens a second of both sides, their ratio, memory, and how far loss and gradients are apart.

    python -m benchmarks.step                  # SmolLM2-135M, bfloat16 autocast; needs Spider in SQLENV_SPIDER_DIR
    python -m benchmarks.step --policy tiny    # the demo's policy and configuration
    python -m benchmarks.step --warmup         # a step of `sqlenv warmup` instead of one of `sqlenv train`
    python -m benchmarks.step --quick          # a few short episodes of the tiny policy
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks import harness
from env_server.data.loading import load_dataset
from env_server.dataset import Split
from env_server.environment import EnvironmentFactory
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from policies.tiny.stumbling import StumblingPlayer
from tests.small_model import SMALL_MODEL
from trainer.chat.format import ChatFormat
from trainer.grpo import SQLEnvTrainer, use_engine
from trainer.logprobs import IGNORED
from trainer.rollout.players import OraclePlayer, play
from trainer.tiny import BASE_CHECKPOINT
from trainer.warmup import WarmupTrainer

GROUP = 8
SIDES = ("stock", "ours")
GRPO: dict[str, type[GRPOTrainer]] = {"stock": GRPOTrainer, "ours": SQLEnvTrainer}
WARMUP: dict[str, type[SFTTrainer]] = {"stock": SFTTrainer, "ours": WarmupTrainer}


class _Weights:
    """TRL asks to sync an engine; there is none."""

    def sync_weights(self) -> None:
        """Nothing to do."""


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Times steps from the end of the rollout on, and keeps the first step's gradients."""

    def __init__(self) -> None:
        self.began = (0.0, 0.0)
        self.seconds: list[tuple[float, float]] = []
        self.gradients: torch.Tensor | None = None

    def start(self) -> None:
        """Start the clock."""
        self.began = (time.perf_counter(), time.process_time())

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """A warm-up's step begins here; a rollout starts the clock again."""
        self.start()

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        """Copy the gradients; it takes a small part of a step, on both sides."""
        if self.gradients is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            self.gradients = torch.cat(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]
            )

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        began, spent = self.began
        self.seconds.append((time.perf_counter() - began, time.process_time() - spent))


def play_rows(data: str, policy: str, episodes: int, seed: int, longest: int) -> dict[str, list[list[int]]]:
    """Play groups of episodes, a question each, and write them as rows; the longest are left out."""
    chat = ChatFormat(AutoTokenizer.from_pretrained(policy))
    dataset = load_dataset(data)
    rng = random.Random(seed)
    questions = list(dataset.select(Split.TRAIN))
    rng.shuffle(questions)
    rows: dict[str, list[list[int]]] = {"prompt_ids": [], "completion_ids": [], "env_mask": []}
    with EnvironmentFactory(dataset, EnvSettings(judging=JudgingSettings(variants=False)), AnswerMode.VALUE) as factory:
        environment = factory.make()
        for question in questions:
            group = []
            for number in range(GROUP):
                player = OraclePlayer(question) if number % 4 == 0 else StumblingPlayer(question, rng)
                _, conversation = play(environment, question, player)
                group.append(chat.encode(conversation))
            if max(len(ids) for ids, _ in group) > longest:
                continue
            for ids, own in group:
                begin = own.index(True)
                rows["prompt_ids"].append(ids[:begin])
                rows["completion_ids"].append(ids[begin:])
                rows["env_mask"].append([int(said) for said in own[begin:]])
            if len(rows["prompt_ids"]) >= episodes:
                break
    return {name: lists[:episodes] for name, lists in rows.items()}


def grpo_trainer(
    side: str, rows: dict[str, list[list[int]]], arguments: argparse.Namespace, common: dict[str, Any], watch: _Watch
) -> GRPOTrainer:
    """One of the trainers, with a rollout that returns the rows."""
    draw = random.Random(0)
    logprobs = [[-draw.uniform(0.1, 2.0) for _ in ids] for ids in rows["completion_ids"]]

    def rollout(prompts: Sequence[Any], _trainer: GRPOTrainer) -> dict[str, Any]:
        watch.start()
        return rows | {"logprobs": logprobs, "worth": [float(index % 3) for index in range(len(prompts))]}

    def reward(worth: list[float], **_: Any) -> list[float]:
        return worth

    grpo = GRPOConfig(
        **common,
        num_generations=GROUP,
        max_completion_length=max(len(ids) for ids in rows["completion_ids"]),
        loss_type="dapo",
        beta=0.0,
        vllm_importance_sampling_mode="token_truncate",
    )
    trainer = GRPO[side](
        model=AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=torch.float32),
        reward_funcs=reward,
        args=grpo,
        train_dataset=HubDataset.from_list([{"prompt": [{"role": "user", "content": "?"}]}] * len(logprobs)),
        processing_class=AutoTokenizer.from_pretrained(arguments.policy),
        rollout_func=rollout,
        callbacks=[watch],
    )
    use_engine(trainer, _Weights())
    return trainer


def warmup_trainer(
    side: str, rows: dict[str, list[list[int]]], arguments: argparse.Namespace, common: dict[str, Any], watch: _Watch
) -> SFTTrainer:
    """One of the trainers, on the rows as demonstrations."""
    demonstrations = [
        {
            "input_ids": prompt + completion,
            "labels": [IGNORED] * len(prompt)
            + [token if said else IGNORED for token, said in zip(completion, mask, strict=True)],
        }
        for prompt, completion, mask in zip(*rows.values(), strict=True)
    ]
    sft = SFTConfig(**common, max_length=None, train_sampling_strategy="group_by_length")
    return WARMUP[side](
        model=AutoModelForCausalLM.from_pretrained(arguments.policy, dtype=torch.float32),
        args=sft,
        train_dataset=HubDataset.from_list(demonstrations),
        processing_class=AutoTokenizer.from_pretrained(arguments.policy),
        callbacks=[watch],
    )


def take_steps(side: str, rows: dict[str, list[list[int]]], arguments: argparse.Namespace, keep: Path) -> None:
    """Train on the rows with one of the trainers; writes what was measured, and the gradients."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    torch.set_num_threads(arguments.threads)
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": arguments.micro_batch,
            "gradient_accumulation_steps": len(rows["prompt_ids"]) // arguments.micro_batch,
            "max_steps": arguments.steps,
            "bf16": arguments.autocast,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        make = warmup_trainer if arguments.warmup else grpo_trainer
        trainer = make(side, rows, arguments, common, watch)
        trainer.train()
    torch.save(watch.gradients, keep / f"{side}.pt")
    measured = {
        "seconds": min(seconds for seconds, _ in watch.seconds),
        "processor_seconds": min(seconds for _, seconds in watch.seconds),
        "loss": trainer.state.log_history[0]["loss"],
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    (keep / f"{side}.json").write_text(json.dumps(measured))


def main() -> None:
    """Play, measure both sides and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--policy", default="smollm2", help="smollm2, tiny or a checkpoint's folder")
    parser.add_argument("--data", default="", help="a data set; Spider for smollm2, synthetic for tiny")
    parser.add_argument("--episodes", type=int, default=64, help="episodes of a step, in groups of eight")
    parser.add_argument(
        "--longest", type=int, default=900, help="questions with longer episodes are left out, in tokens"
    )
    parser.add_argument("--micro_batch", type=int, default=0, help="rows; 8 for smollm2 and 16 for tiny")
    parser.add_argument("--steps", type=int, default=1, help="steps; the fastest counts")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 2 for smollm2 and 1 for tiny")
    parser.add_argument("--warmup", action="store_true", help="a step of supervised warm-up, in micro-batches of 4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="16 episodes of the tiny policy")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.policy, arguments.episodes = "tiny", 16
    small = arguments.policy == "tiny"
    arguments.autocast = not small
    spider = f"spider:{os.environ.get('SQLENV_SPIDER_DIR', '')}"
    arguments.data = arguments.data or ("synthetic" if small else spider)
    arguments.policy = {"tiny": str(BASE_CHECKPOINT), "smollm2": str(SMALL_MODEL)}.get(
        arguments.policy, arguments.policy
    )
    arguments.micro_batch = min(
        arguments.micro_batch or (4 if arguments.warmup else 16 if small else 8), arguments.episodes
    )
    arguments.threads = arguments.threads or (1 if small else 2)
    if arguments.side:
        take_steps(arguments.side, json.loads((arguments.keep / "rows.json").read_text()), arguments, arguments.keep)
        return
    with tempfile.TemporaryDirectory() as folder:
        keep = Path(folder)
        rows = play_rows(arguments.data, arguments.policy, arguments.episodes, arguments.seed, arguments.longest)
        (keep / "rows.json").write_text(json.dumps(rows))
        for side in SIDES:
            print(f"{side}: {len(rows['prompt_ids'])} episodes", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "benchmarks.step", *sys.argv[1:], "--side", side, "--keep", folder]
            # A thread that waits for another one must not count as one that computes.
            surroundings = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
            subprocess.run(command, check=True, stdout=sys.stderr, env=surroundings)
        stock, ours = (json.loads((keep / f"{side}.json").read_text()) for side in SIDES)
        expected, found = (torch.load(keep / f"{side}.pt").double() for side in SIDES)
    lengths = [len(a) + len(b) for a, b in zip(rows["prompt_ids"], rows["completion_ids"], strict=True)]
    harness.report(
        "step",
        faster=round(stock["seconds"] / ours["seconds"], 2),
        faster_in_processor_seconds=round(stock["processor_seconds"] / ours["processor_seconds"], 2),
        tokens_per_second=round(sum(lengths) / ours["seconds"], 1),
        stock=stock,
        ours=ours,
        gradients_apart=harness.rounded(((found - expected).norm() / expected.norm()).item()),
        episodes=len(lengths),
        tokens=sum(lengths),
        trained_tokens=sum(map(sum, rows["env_mask"])),
        micro_batch=arguments.micro_batch,
        threads=arguments.threads,
        autocast=arguments.autocast,
        policy=arguments.policy,
    )


if __name__ == "__main__":
    main()
