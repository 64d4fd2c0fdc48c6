"""`make base`: train the shipped base policy from scratch, and write down how well it plays.

A base model has seen good play and bad. So the tiny policy is trained in two stages: clean play on databases with
random names and on the training databases, which teaches the moves; then play of mixed quality, after which it
can, but mostly does not. Evaluation databases, and their questions, take part in neither.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import torch

from env_server.data.loading import load_dataset
from env_server.dataset import Split
from trainer.chat.format import ChatFormat
from trainer.evaluation.evaluate import choose_questions, excluded_by_reason, play_model
from trainer.policy.loading import load_policy
from trainer.results.statistics import EvaluationSummary, summarize
from trainer.results.summary_table import interval_text, percent
from trainer.rollout.client import RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import record
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT, BASE_NOTES
from trainer.tiny.model import MAX_CONTEXT
from trainer.warmup import warmup

CLEAN_DATA = "scrambled:0,scrambled:1,synthetic"
MIXED_DATA = "synthetic"
EPOCHS, MIXED_EPOCHS = 5.0, 1.0
GOOD_SHARE = 0.12
"""Share of clean episodes in the second stage."""

COMMON = [
    *("--use_cpu", "true", "--bf16", "false", "--gradient_checkpointing", "false", "--torch_threads", "1"),
    *("--per_device_train_batch_size", "16", "--train_sampling_strategy", "group_by_length", "--max_length", "512"),
    *("--lr_scheduler_type", "linear", "--save_strategy", "no", "--report_to", "none", "--logging_steps", "100"),
    *("--seed", "0", "--max_episodes", "-1", "--gradient_accumulation_steps", "1", "--warmup_steps", "0"),
]


def rates(muon: float, adamw: float) -> list[str]:
    """The flags of the two learning rates."""
    return ["--muon_learning_rate", str(muon), "--learning_rate", str(adamw)]


def build(target: Path) -> None:
    """Raise the policy and save it, with its notes, in `target`."""
    with tempfile.TemporaryDirectory() as folder:
        clean, mixed = str(Path(folder) / "clean"), str(Path(folder) / "mixed")
        stage_1 = ["--new_tiny_policy", "true", "--data", CLEAN_DATA, "--num_train_epochs", str(EPOCHS)]
        warmup.run([*COMMON, *stage_1, *rates(0.02, 0.02), "--warmup_steps", "50", "--output_dir", clean])
        stage_2 = ["--model_name_or_path", clean, "--data", MIXED_DATA, "--num_train_epochs", str(MIXED_EPOCHS)]
        warmup.run([*COMMON, *stage_2, *rates(0.005, 0.003), "--good", str(GOOD_SHARE), "--output_dir", mixed])
        notes = _notes(evaluate(clean), evaluate(mixed))
        target.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(mixed) / name, target / name)
        shutil.copyfile(Path(mixed) / "chat_template.jinja", target / "chat_template.jinja")
    (target / BASE_NOTES).write_text(notes, encoding="utf-8")


def evaluate(checkpoint: str) -> EvaluationSummary:
    """Greedy play on all evaluation questions of `synthetic`."""
    dataset = load_dataset("synthetic")
    model, tokenizer = load_policy(checkpoint)
    settings = RolloutSettings(budget=TokenBudget(1_024, MAX_CONTEXT, 64), temperature=0.0)
    questions = choose_questions(dataset, Split.EVAL, -1)
    with closing(LocalEnvironments(dataset)) as environments:
        episodes = play_model(
            model, tokenizer, environments, questions, settings, 0, lambda _: None, ChatFormat(tokenizer)
        )
    return summarize([record(e) for e in episodes], excluded_by_reason(dataset))


def _notes(clean: EvaluationSummary, mixed: EvaluationSummary) -> str:
    return (
        "The base policy has the Qwen3 architecture, about a million parameters and a tokenizer of its own, and was "
        "trained from random weights by `sqlenv warmup` (TRL's SFTTrainer) in two stages. Stage 1: "
        f"{EPOCHS:g} epoch(s) of clean play by the oracle on `{CLEAN_DATA}`. Stage 2: {MIXED_EPOCHS:g} epoch(s) of "
        f"play of mixed quality on `{MIXED_DATA}`: {GOOD_SHARE:.0%} of the episodes clean, the others by a player who "
        "guesses from a sample, wanders, damages the right query or misreads its result. Only training databases "
        "were played on. The words of the evaluation databases are in the tokenizer's vocabulary and occur as random "
        "names in `scrambled`; their schemas and questions do not. Measured when it was built, greedy, on all "
        f"{clean.episodes} evaluation questions: {percent(clean.success_rate)} ({interval_text(clean.interval)}) "
        "after stage 1 (the control: clean supervised play alone), "
        f"{percent(mixed.success_rate)} ({interval_text(mixed.interval)}) after stage 2, which is the base policy "
        "that GRPO starts from. GRPO so brings out a skill that is there and badly used; it does not teach one from "
        "nothing.\n"
    )


def main() -> int:
    """Build into the package."""
    torch.set_num_threads(1)
    build(BASE_CHECKPOINT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
