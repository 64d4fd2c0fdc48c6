"""Expert demonstrations: by the oracle, and by a player who explores, errs and recovers (`exploring`).

Every episode is really played and judged; what the environment answered is what the policy learns to expect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from env_server.dataset import Question
from env_server.environment import SQLEnvironment
from env_server.types import AnswerMode
from trainer.chat.format import Conversation
from trainer.rollout.episodes import Episode
from trainer.rollout.players import OraclePlayer, play
from trainer.warmup.exploring import ExploringPlayer

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
        player = ExploringPlayer(question, rng, answer_mode)
        episode, conversation = play(environment, question, player)
        if player.convincing(episode):
            return episode, replace(conversation, unlearned=player.unlearned)
    return None
