"""`sqlenv warmup`: supervised warm-up on multi-turn play that the environment has verified (TRL's SFTTrainer).

Only the policy's own tokens are learned: labels are -100 on the prompt and on everything the environment says. The
ids are assembled exactly as a rollout assembles them, so what is learned here is what is seen there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as HubDataset
from rich.console import Console
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import SFTTrainer, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from env_server.data.loading import load_dataset
from env_server.data.questions import Question, Split
from env_server.factory import EnvironmentFactory
from env_server.types import AnswerMode
from trainer.arguments import parse_warmup_arguments
from trainer.demonstrations import demonstrate
from trainer.optimizers import MuonAdamW
from trainer.play_settings import PlaySettings
from trainer.players import Conversation
from trainer.policies import init_kwargs, load_tokenizer
from trainer.prompts import ChatRenderer, system_prompt
from trainer.quantisation import keep_gradients
from trainer.tiny.model import MAX_CONTEXT, build_model
from trainer.tiny.tokenizer import build_tokenizer

IGNORED = -100
"""The label that the loss leaves out."""


class Deadline(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Stops training once its minutes are over."""

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._started = time.monotonic()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask the trainer to stop when the time is over."""
        control.should_training_stop |= time.monotonic() - self._started >= self._seconds


def encode(conversation: Conversation, renderer: ChatRenderer) -> dict[str, list[int]]:
    """An episode as `input_ids` and `labels`; the labels are the ids where the policy speaks, else IGNORED."""
    prompt = [
        {"role": "system", "content": system_prompt(AnswerMode.VALUE)},
        {"role": "user", "content": conversation.opening},
    ]
    ids = renderer.prompt_ids(prompt)
    labels = [IGNORED] * len(ids)
    for text, reply in conversation.turns:
        turn = renderer.turn_ids(text)
        ids += turn
        labels += turn
        if reply:
            reply_ids = renderer.observation_ids(reply, closed=True)
            ids += reply_ids
            labels += [IGNORED] * len(reply_ids)
    return {"input_ids": ids, "labels": labels}


def play_demonstrations(specs: Sequence[str], good: float, seed: int, console: Console) -> list[Conversation]:
    """Play every training question of the data sets once, `good` of them well."""
    conversations: list[Conversation] = []
    for spec in specs:
        dataset = load_dataset(spec)
        questions: Sequence[Question] = dataset.select(Split.TRAIN)
        with EnvironmentFactory(dataset) as factory:
            played = list(demonstrate(factory.make(), questions, good, seed))
        correct = sum(episode.correct for episode, _ in played)
        console.print(f"{spec}: {len(played)} episodes played, {correct / max(1, len(played)):.0%} of them right")
        conversations += [conversation for _, conversation in played]
    return conversations


def _texts(conversations: Iterable[Conversation]) -> Iterable[str]:
    for conversation in conversations:
        yield conversation.opening
        for turn in conversation.turns:
            yield from turn


def run(argv: Sequence[str]) -> int:
    """Parse the flags, play, train and save. Raises SQLEnvError."""
    arguments, sft, model_config = parse_warmup_arguments(argv, str(__doc__))
    if arguments.torch_threads:
        torch.set_num_threads(arguments.torch_threads)
    console = Console(file=sys.stderr)
    conversations = play_demonstrations(arguments.data.split(","), arguments.good, sft.seed, console)
    tokenizer: PreTrainedTokenizerBase
    if arguments.new_tiny_policy:
        tokenizer = build_tokenizer(_texts(conversations))
        model = build_model(tokenizer, seed=sft.seed)
    else:
        tokenizer = load_tokenizer(model_config, trust_remote_code=sft.trust_remote_code)
        model = create_model_from_path(
            model_config.model_name_or_path,
            **init_kwargs(model_config, sft),
            quantization_config=get_quantization_config(model_config),
        )
        keep_gradients(model, model_config)
        sft.model_init_kwargs = None  # SFTTrainer gets a model, and would say that it ignores them
    renderer = ChatRenderer(tokenizer)
    limit = sft.max_length or MAX_CONTEXT
    rows = [row for row in (encode(c, renderer) for c in conversations) if len(row["input_ids"]) <= limit]
    tokens = sum(len(row["input_ids"]) for row in rows)
    console.print(f"{len(rows)} episodes, {tokens:,} tokens; {len(conversations) - len(rows)} longer than {limit}")
    optimizer = None
    if arguments.muon_learning_rate > 0:
        optimizer = MuonAdamW(model, arguments.muon_learning_rate, sft.learning_rate, sft.weight_decay)
    trainer = SFTTrainer(
        model=model,
        args=sft,
        train_dataset=HubDataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_config),
        optimizers=(optimizer, None),
        callbacks=[Deadline(arguments.max_minutes)] if arguments.max_minutes > 0 else None,
    )
    trainer.train(resume_from_checkpoint=sft.resume_from_checkpoint)
    target = Path(sft.output_dir)
    trainer.save_model(str(target))
    tokenizer.save_pretrained(str(target))
    sources = arguments.data.split(",")
    settings = PlaySettings(data=sources[0]) if len(sources) == 1 else PlaySettings()
    settings.save(target)
    console.print(f"saved to {target}")
    return 0
