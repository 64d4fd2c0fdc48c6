"""What a warm-up learns from: episodes that were really played on the training databases, as token ids with labels.

Only the policy's own tokens are learned, and of those no mistake's: labels are -100 on the prompt, on everything the
environment says, and on the turns that a conversation calls unlearned. The ids are assembled exactly as a rollout
assembles them, so what is learned here is what is seen there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from env_server.data.loading import load_dataset
from env_server.dataset import in_turn
from env_server.factory import EnvironmentFactory
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from sqlenv.progress import reported
from trainer.chat.format import ChatFormat, Conversation
from trainer.config import ConfigError
from trainer.rollout.players import as_shown_to_players, with_sql
from trainer.training.questions import ALL_QUESTIONS, QuestionFilter
from trainer.warmup.demonstrations import demonstrate

IGNORED = -100
"""The label that the loss leaves out."""


def encode(conversation: Conversation, chat: ChatFormat) -> dict[str, list[int]]:
    """An episode as `input_ids` and `labels`; the labels are the ids of what is learned, else IGNORED."""
    ids, learned = chat.encode(conversation)
    return {"input_ids": ids, "labels": [token if its else IGNORED for token, its in zip(ids, learned, strict=True)]}


def play_demonstrations(
    specs: Sequence[str],
    seed: int,
    console: Console,
    *,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    settings: EnvSettings | None = None,
    limit: int = -1,
    explore: float = 0.0,
    kept: QuestionFilter = ALL_QUESTIONS,
) -> list[Conversation]:
    """Play training questions of the data sets once: `limit` of each data set, or all for -1.

    `explore` is the share of the episodes that take other ways than the shortest, `kept` says which questions are
    played.

    A limit is spread evenly over the databases. Raises ConfigError when a data set has no such training questions.
    """
    # What the oracle submits is the gold itself: to judge it on variants of the databases, too, tells nothing.
    settings = replace(settings or EnvSettings(), judging=JudgingSettings(variants=False))
    conversations: list[Conversation] = []
    for spec in specs:
        dataset = load_dataset(spec, answer_mode=answer_mode)
        everything = with_sql(kept.asked(dataset, spec), f"a warm-up on --data {spec}")
        questions = everything if limit < 0 else in_turn(everything)[:limit]
        if not questions:
            raise ConfigError(f"--data {spec} has no usable question for training")
        with EnvironmentFactory(dataset, settings, answer_mode) as factory:
            shown_to = [as_shown_to_players(question, factory.pool) for question in questions]
            playing = demonstrate(factory.make(), shown_to, seed, answer_mode, explore)
            played = []
            with reported(f"playing {spec}", len(questions), console) as progress:
                for episode, conversation in playing:
                    played.append((episode, conversation))
                    progress.advance(episode.correct)
        correct = sum(episode.correct for episode, _ in played)
        of_all = "" if len(questions) == len(everything) else f" on {len(questions):,} of {len(everything):,} questions"
        console.print(
            f"{spec}: {len(played):,} episodes played{of_all}, {correct / max(1, len(played)):.0%} of them right",
            highlight=False,
        )
        conversations += [conversation for _, conversation in played]
    return conversations
