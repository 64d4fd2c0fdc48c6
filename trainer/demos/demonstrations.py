"""Expert demonstrations: by the oracle, and by the noisy expert, who errs and recovers.

Every episode is really played and judged; what the environment answered is what the policy learns to expect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from env_server.data.loading import load_dataset
from env_server.dataset import Question, round_robin
from env_server.environment import EnvironmentFactory, SQLEnvironment
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from sqlenv.progress import reported
from trainer.chat.format import Conversation
from trainer.config import ConfigError
from trainer.demos.noisy_expert import NoisyExpert
from trainer.rollout.episodes import Episode
from trainer.rollout.players import OraclePlayer, as_shown_to_players, play, with_sql
from trainer.training.questions import ALL_QUESTIONS, QuestionFilter

TRIES = 4
"""Ways that an exploring player draws for a question until one comes out as it was meant."""


def demonstrate(
    environment: SQLEnvironment,
    questions: Sequence[Question],
    seed: int,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    explore: float = 0.0,
) -> Iterator[tuple[Episode, Conversation]]:
    """Play each question once, a share `explore` of them by the exploring player, the others by the oracle.

    `answer_mode` is the environment's. What the environment does not judge correct is left out: it would teach a wrong
    answer.
    """
    if not 0.0 <= explore <= 1.0:
        raise ValueError(f"the share of exploring play must lie in [0, 1], not {explore}")
    for question in questions:
        # Of its own, so that the play of a question depends on no other one.
        ways = random.Random(f"{seed} {question.question_id}")
        found = _explored(environment, question, ways, answer_mode) if ways.random() < explore else None
        episode, conversation = found or play(environment, question, OraclePlayer(question, answer_mode))
        if episode.correct:
            yield episode, conversation


def _explored(
    environment: SQLEnvironment, question: Question, rng: random.Random, answer_mode: AnswerMode
) -> tuple[Episode, Conversation] | None:
    """Play a question by a way that comes out as it was meant; None where none of some does."""
    for _ in range(TRIES):
        player = NoisyExpert(question, rng, answer_mode)
        episode, conversation = play(environment, question, player)
        if player.convincing(episode):
            return episode, replace(conversation, masked_turns=player.masked_turns)
    return None


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
        questions = everything if limit < 0 else round_robin(everything)[:limit]
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
