"""`make base`: train the shipped base policy from scratch, and write down how well it plays.

A base model has seen good play and bad. So the tiny policy is trained in two stages: expert demonstrations on databases
with random names and on the training databases, which teach the moves; then play of mixed quality, after which it can,
but mostly does not. Evaluation databases, and their questions, take part in neither.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig

from env_server.data.loading import load_dataset
from env_server.dataset import Dataset, Split
from env_server.environment import EnvironmentFactory
from env_server.settings import EnvSettings, JudgingSettings
from policies.tiny.stumbling import StumblingPlayer
from policies.tiny.tokenizer import build_tokenizer
from trainer.chat.actions import format_action
from trainer.chat.format import ChatFormat, Conversation
from trainer.demos.demonstrations import play_demonstrations
from trainer.engines import in_process_engine
from trainer.eval.statistics import EvaluationSummary, interval_text, percent, summarize
from trainer.evaluate import choose_questions, excluded_by_reason, play_on
from trainer.models import load_policy
from trainer.rollout.client import RolloutSettings
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.players import OraclePlayer, as_shown_to_players, play
from trainer.rollout.transcript import TokenBudget
from trainer.tiny import BASE_CHECKPOINT, BASE_NOTES
from trainer.warmup import WarmupTrainer, encode

CLEAN_DATA = "scrambled:0,scrambled:1,synthetic"
MIXED_DATA = "synthetic"
GOOD_SHARE = 0.12
"""Share of the oracle's episodes in the second stage."""
SEED = 0
MAX_CONTEXT = 2_048
MAX_LENGTH = 512
"""Tokens of the longest episode that is learned."""


@dataclass(frozen=True, slots=True)
class Stage:
    """How long a stage trains, and at which rates."""

    epochs: float
    muon_rate: float
    adamw_rate: float
    warmup_steps: int = 0
    max_steps: int = -1


CLEAN = Stage(epochs=5.0, muon_rate=0.02, adamw_rate=0.02, warmup_steps=50)
MIXED = Stage(epochs=1.0, muon_rate=0.005, adamw_rate=0.003)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the hidden layers' matrices beside AdamW for embeddings, output head and norms.

    Several times faster than AdamW from scratch (Keller Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks", 2024). Both share their parameter groups with this one, so that a scheduler scales both rates.
    """

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            hidden = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if hidden else others).append(parameter)
        self._muon = torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0, momentum=0.95)
        self._adamw = torch.optim.AdamW(others, lr=adamw_lr, weight_decay=0.0, betas=(0.9, 0.98))
        super().__init__([*matrices, *others], {})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of each."""
        loss = closure() if closure is not None else None
        self._muon.step()  # type: ignore[no-untyped-call]
        self._adamw.step()
        return loss


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = SEED) -> Qwen3ForCausalLM:
    """A fresh Qwen3 for the tokenizer, about 1.1 million parameters, initialised from `seed`.

    Input and output embeddings are untied: a server that reloads weights in place may rebuild only one of the
    two copies of a tied matrix.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def mixed_play(dataset: Dataset, good_share: float, seed: int = SEED) -> Iterator[tuple[Episode, Conversation]]:
    """Play the training questions, `good_share` of them by the oracle, the others by the stumbling player."""
    rng = random.Random(seed)
    # What the oracle submits is the gold itself: to judge it on variants of the databases, too, tells nothing.
    with EnvironmentFactory(dataset, EnvSettings(judging=JudgingSettings(variants=False))) as factory:
        environment = factory.make()
        for question in dataset.select(Split.TRAIN):
            shown = as_shown_to_players(question, factory.pool)
            player = OraclePlayer(shown) if rng.random() < good_share else StumblingPlayer(shown, rng)
            yield play(environment, shown, player)


def texts(conversations: Iterable[Conversation]) -> Iterator[str]:
    """All that is said, by either side."""
    for conversation in conversations:
        yield conversation.opening
        for action, reply in conversation.turns:
            yield format_action(action.action_type, action.argument)
            yield reply


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    stage: Stage,
    target: Path,
) -> None:
    """Train on the conversations and save the policy in `target`."""
    chat = ChatFormat(tokenizer)
    rows = [row for each in conversations if len((row := encode(each, chat))["input_ids"]) <= MAX_LENGTH]
    config = SFTConfig(
        output_dir=str(target),
        num_train_epochs=stage.epochs,
        max_steps=stage.max_steps,
        warmup_steps=stage.warmup_steps,
        learning_rate=stage.adamw_rate,
        lr_scheduler_type="linear",
        per_device_train_batch_size=16,
        train_sampling_strategy="group_by_length",
        max_length=MAX_LENGTH,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=100,
        seed=SEED,
    )
    trainer: Any = WarmupTrainer(
        model=model,
        args=config,
        train_dataset=HubDataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(MuonAdamW(model, stage.muon_rate, stage.adamw_rate), None),
    )
    trainer.train()
    trainer.save_model(str(target))


def build(target: Path) -> None:
    """Train the policy and save it, with its notes, in `target`."""
    clean_play = play_demonstrations(CLEAN_DATA.split(","), SEED, Console(file=sys.stderr))
    tokenizer = build_tokenizer(texts(clean_play))
    model = build_model(tokenizer)
    mixed_conversations = [conversation for _, conversation in mixed_play(load_dataset(MIXED_DATA), GOOD_SHARE)]
    with tempfile.TemporaryDirectory() as folder:
        clean, mixed = Path(folder) / "clean", Path(folder) / "mixed"
        train(model, tokenizer, clean_play, CLEAN, clean)
        train(model, tokenizer, mixed_conversations, MIXED, mixed)
        notes = _notes(evaluate(clean), evaluate(mixed))
        target.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(mixed / name, target / name)
        shutil.copyfile(mixed / "chat_template.jinja", target / "chat_template.jinja")
    (target / BASE_NOTES).write_text(notes, encoding="utf-8")


def evaluate(checkpoint: Path) -> EvaluationSummary:
    """Greedy play on all evaluation questions of `synthetic`."""
    dataset = load_dataset("synthetic")
    model, tokenizer = load_policy(str(checkpoint))
    settings = RolloutSettings(budget=TokenBudget(1_024, MAX_CONTEXT, 64), temperature=0.0)
    questions = choose_questions(dataset, Split.EVAL, -1)
    with closing(LocalEnvironments(dataset)) as environments:
        chat = ChatFormat(tokenizer)
        engine = in_process_engine(model, tokenizer, chat, settings)
        episodes = play_on(engine, chat, environments, questions, settings, 0, lambda _: None)
    return summarize([record(e) for e in episodes], excluded_by_reason(dataset))


def _notes(clean: EvaluationSummary, mixed: EvaluationSummary) -> str:
    return (
        "The base policy has the Qwen3 architecture, about a million parameters and a tokenizer of its own, and was "
        "trained from random weights (TRL's SFTTrainer) in two stages. Stage 1: "
        f"{CLEAN.epochs:g} epoch(s) of clean play by the oracle on `{CLEAN_DATA}`. Stage 2: {MIXED.epochs:g} epoch(s) "
        f"of play of mixed quality on `{MIXED_DATA}`: {GOOD_SHARE:.0%} of the episodes clean, the others by a player "
        "who guesses from a sample, wanders, damages the right query or misreads its result. Only training databases "
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
