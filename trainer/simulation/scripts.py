"""What is said in a simulated episode: by the policy, as real actions, and by the environment, as real replies.

A script is a whole episode as texts. It comes from a run's log, from the oracle on a data set, or is made up to given
lengths. The policy then says a script's words, tokenised before the first episode, whatever it is answered; where the
environment is simulated too, it answers with the script's replies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from env_server.dataset import Dataset, Question
from env_server.settings import EnvSettings
from env_server.types import ActionType, AnswerMode
from inference.simulated.engine import Asked
from trainer.chat.format import ChatFormat
from trainer.chat.parsing import format_action
from trainer.rollout.environments import LocalEnvironments
from trainer.rollout.episodes import EpisodeRecord
from trainer.rollout.players import OraclePlayer, play, table_names


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """The policy's words, without the end of the turn, and the reply to them."""

    text: str
    result: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """One episode. `question_id` is the data set's, where the question is one of its own."""

    question: str
    tables: str
    turns: tuple[ScriptedTurn, ...]
    question_id: str = ""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long made-up episodes are, on the average, in turns and tokens; `spread` is the deviation over the mean."""

    turns: float = 6.0
    turn_tokens: float = 60.0
    reply_tokens: float = 60.0
    question_tokens: float = 60.0
    spread: float = 0.5


def drawn(chance: random.Random, mean: float, spread: float) -> float:
    """Draw from a log-normal distribution with this mean, and this deviation over the mean."""
    if mean <= 0.0 or spread <= 0.0:
        return max(0.0, mean)
    sigma = math.sqrt(math.log1p(spread * spread))
    return chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def made_up(chat: ChatFormat, lengths: Lengths, count: int, seed: int, max_turns: int) -> list[Script]:
    """Scripts of given lengths under a policy's own tokenizer: queries for constants, and tables of them."""
    return [_made_up(chat, lengths, random.Random(f"{seed}/{number}"), max_turns) for number in range(count)]


def _made_up(chat: ChatFormat, lengths: Lengths, chance: random.Random, max_turns: int) -> Script:
    turns = min(max_turns, max(1, round(drawn(chance, lengths.turns, lengths.spread))))
    said = [round(drawn(chance, lengths.turn_tokens, lengths.spread)) for _ in range(turns)]
    heard = [round(drawn(chance, lengths.reply_tokens, lengths.spread)) for _ in range(turns)]
    acts = [_filled(chat, "QUERY SELECT 1", ", 1", tokens) for tokens in said[:-1]]
    acts.append(_filled(chat, "ANSWER 1", ", 1", said[-1]))
    replies = [_filled(chat, "1", "\n1", tokens) for tokens in heard]
    question = _filled(chat, "How many are there", " and", round(drawn(chance, lengths.question_tokens, 0.2)))
    return Script(question, "Tables: a", tuple(map(ScriptedTurn, acts, replies)))


def _filled(chat: ChatFormat, start: str, more: str, tokens: int) -> str:
    """A text of about so many tokens as a turn, its end included: `start`, and `more` as often as it takes."""
    size = len(chat.renderer.turn_ids(start))
    if tokens <= size:
        return start
    each = (len(chat.renderer.turn_ids(start + more * 16)) - size) / 16
    return start + more * round((tokens - size) / each)


def recorded(records: Iterable[EpisodeRecord]) -> list[Script]:
    """The episodes of a run's log that were played to an end."""
    return [
        Script(
            record.question,
            "Tables: a",
            tuple(ScriptedTurn(turn["text"], turn["result"], turn["error"]) for turn in record.turns),
            record.question_id,
        )
        for record in records
        if record.turns
    ]


def played_by_the_oracle(dataset: Dataset, questions: Sequence[Question], answer_mode: AnswerMode) -> list[Script]:
    """Scripts of episodes that are right, as the environment replies to them."""
    scripts = []
    local = LocalEnvironments(dataset, EnvSettings(), answer_mode)
    with closing(local), local.blocking() as environment:
        for question in questions:
            tables = ", ".join(table_names(environment.reset(question_id=question.question_id)))
            episode, _ = play(environment, question, OraclePlayer(question, answer_mode))
            turns = tuple(ScriptedTurn(turn.text, turn.result, turn.error) for turn in episode.turns)
            scripts.append(Script(question.text, f"Tables: {tables}", turns, question.question_id))
    return scripts


class ScriptedPolicy:
    """Says the words of scripts: session `key` plays the script of that number, from the first again after the last.

    A script that is used up, because the environment does not end the episode with it, ends with an ANSWER.
    """

    def __init__(self, chat: ChatFormat, scripts: Sequence[Script]) -> None:
        known: dict[str, tuple[int, ...]] = {}
        self._turns = [
            [known.get(turn.text) or known.setdefault(turn.text, self._ids(chat, turn.text)) for turn in script.turns]
            for script in scripts
        ]
        self._last = self._ids(chat, format_action(ActionType.ANSWER, "1"))

    def __call__(self, asked: Asked) -> Sequence[int]:
        """Return a turn's ids."""
        turns = self._turns[asked.key % len(self._turns)]
        return turns[asked.turn] if asked.turn < len(turns) else self._last

    @staticmethod
    def _ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
        opened = chat.renderer.opened_thought
        return tuple(chat.renderer.turn_ids(text.removeprefix(opened) if opened else text))
