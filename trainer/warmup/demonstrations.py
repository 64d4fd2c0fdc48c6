"""Play to learn from: clean play by the oracle, play that explores, and play of mixed quality, all verified.

GRPO sharpens a skill that a policy has and uses badly; it does not teach a new one. A base model is exactly that:
it has seen good and bad play. So a base policy is trained on clean episodes beside episodes of a player who knows
the moves and stumbles: who guesses from a sample, wanders, damages the right query, or misreads its result.
A policy that is to play well learns from the oracle, and from a player who explores, errs and recovers (`exploring`).
Every episode is really played; what the environment answered is what the policy learns to expect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from env_server.dataset import Question
from env_server.environment import SQLEnvironment
from env_server.types import ActionType, AnswerMode, SQLAction, SQLObservation
from trainer.chat.format import Conversation
from trainer.rollout.episodes import Episode
from trainer.rollout.players import OraclePlayer, mentioned_tables, play, table_names
from trainer.warmup.exploring import ExploringPlayer
from trainer.warmup.nearby import damage

GUESS = ""
"""Stands for an answer that is made up from what was seen last: a cell, or the query that was run last."""
TRIES = 4
"""Ways that an exploring player draws for a question until one comes out as it was meant."""


class StumblingPlayer:
    """Knows the moves and plays badly, in one of five ways drawn per episode."""

    STYLES = ("peek", "peek", "hasty", "wander", "damaged", "misread")

    def __init__(self, question: Question, rng: random.Random, answer_mode: AnswerMode = AnswerMode.VALUE) -> None:
        self._question = question
        self._rng = rng
        self._answer_mode = answer_mode
        self._query = ""
        self._plan: Iterator[tuple[ActionType, str]] | None = None

    def act(self, observation: SQLObservation) -> SQLAction:
        """Return the next move of the plan; a GUESS is filled in from the last result."""
        if self._plan is None:
            self._plan = iter(self._make_plan(table_names(observation)))
        kind, argument = next(self._plan)
        if kind is ActionType.QUERY:
            self._query = argument
        if kind is ActionType.ANSWER and argument == GUESS:
            if self._answer_mode is AnswerMode.SQL:
                argument = self._guess_sql(table_names(observation))
            else:
                argument = self._guess(observation.result)
        return SQLAction(action_type=kind.value, argument=argument)

    def _make_plan(self, tables: Sequence[str]) -> list[tuple[ActionType, str]]:
        rng, sql = self._rng, self._question.gold_sql
        needed = mentioned_tables(sql, tables)
        answer = (ActionType.ANSWER, GUESS)
        describe_needed = [(ActionType.DESCRIBE, table) for table in needed]
        damaged = (ActionType.QUERY, damage(sql, rng))
        match rng.choice(self.STYLES):
            case "peek":
                return [(ActionType.SAMPLE, rng.choice(needed)), answer]
            case "hasty":
                return [damaged, answer]
            case "wander":
                looks = [(ActionType.DESCRIBE, rng.choice(tables)) for _ in range(rng.randint(1, 2))]
                return [*looks, (ActionType.SAMPLE, rng.choice(tables)), answer]
            case "damaged":
                return [*describe_needed, damaged, answer]
            case _:
                return [*describe_needed, (ActionType.QUERY, sql), (ActionType.SAMPLE, needed[0]), answer]

    def _guess_sql(self, tables: Sequence[str]) -> str:
        """The query that was run last, which was wrong or is damaged now, or a count where none was run."""
        sql = self._question.gold_sql
        if not self._query:
            return f'SELECT COUNT(*) FROM "{self._rng.choice(mentioned_tables(sql, tables))}"'
        return damage(sql, self._rng) if self._query == sql else self._query

    def _guess(self, result: str) -> str:
        rows = [line for line in result.splitlines()[1:] if line.strip()]
        cells = [cell.strip() for row in rows for cell in row.split(" | ")]
        return self._rng.choice(cells) if cells else "0"


def demonstrate(
    environment: SQLEnvironment,
    questions: Sequence[Question],
    good: float,
    seed: int,
    answer_mode: AnswerMode = AnswerMode.VALUE,
    explore: float = 0.0,
) -> Iterator[tuple[Episode, Conversation]]:
    """Play each question once, a share `good` of them well, the others by the stumbling player.

    Of the good ones a share `explore` is played by the exploring player, the others by the oracle. `answer_mode` is the
    environment's. What the environment does not judge correct of good play is left out: it would teach a wrong answer.
    """
    for name, share in (("good", good), ("explore", explore)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"the share of {name} play must lie in [0, 1], not {share}")
    rng = random.Random(seed)
    for question in questions:
        if rng.random() >= good:
            yield play(environment, question, StumblingPlayer(question, rng, answer_mode))
            continue
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
