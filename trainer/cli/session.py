"""A policy that plays for a person: loaded once, it is asked one question after another, and each turn is shown.

The play is that of training and evaluation, by the same rollout client, chat format and engine; what was saved with
the policy decides its actions, its prompt, what it answers with, and its limits. It plays greedily, or draws several
samples; either way, the same question is played the same way.

Nobody knows whether an answer to a question without a gold is right. Whether the policy read it off the database, or
made it up, can be told: `basis_of` finds which of its queries returned the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain, combinations, count, islice
from typing import TYPE_CHECKING

from env_server.data.loading import load_dataset
from env_server.data.own_questions import typed_question
from env_server.dataset import Dataset, Gold, Question, Row
from env_server.errors import DataError, SQLError
from env_server.jobs import QueryJob
from env_server.judging.answers import parse_answer
from env_server.judging.submissions import submitted_query
from env_server.judging.verdict import judge_value
from env_server.outcomes import query_outcome
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool, run_query
from env_server.types import ActionType, AnswerMode
from inference.engine import Engine
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError
from trainer.engines import open_to_play, token_budget
from trainer.eval.summaries import agreeing, rows_key, typed_key
from trainer.policy import PlaySettings, resolve_policy, saved_play, settle
from trainer.rollout.client import RolloutClient, RolloutSettings, derive_seed, explore, request_for
from trainer.rollout.environments import Environments, LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome, Turn, record
from trainer.rollout.players import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_CONCURRENCY = 8
"""Episodes in flight, of all who ask."""
SAMPLING_TEMPERATURE = 1.0
"""Of several samples: what the policy was trained to sample from."""


@dataclass(frozen=True, slots=True)
class PolicyPlayer:
    """A policy, ready to play. It is used from one event loop at a time; `aclose` ends it."""

    name: str
    play_settings: PlaySettings
    engine: Engine
    chat: ChatFormat
    settings: RolloutSettings
    samples: int = 1

    @property
    def env_settings(self) -> EnvSettings:
        """What its environments must have been made with."""
        return self.play_settings.environment

    async def play(
        self, question: Question, environments: Environments, on_turn: Callable[[Turn], None], key: int = 0
    ) -> list[Episode]:
        """Play a question as often as it has samples; `on_turn` is called after each turn of any.

        What the infrastructure fails at is a failed episode. `key` tells the plays apart that are under way at once.
        """
        playing = partial(explore, on_turn=on_turn)
        client = RolloutClient(self.engine, environments, self.chat, self.settings, play_episode=playing)
        seeds = (derive_seed(self.play_settings.seed, sample) for sample in range(self.samples))
        return await client.play([request_for(question, seed) for seed in seeds], first=key * self.samples)

    async def aclose(self) -> None:
        """Release what the engine holds."""
        await self.engine.aclose()


def load_player(
    name: str,
    *,
    say: Callable[[str], object],
    few_shot: int | None = None,
    samples: int = 1,
    vllm_urls: str | None = None,
    trust_remote_code: bool = False,
) -> PolicyPlayer:
    """Load the policy, here or, of `vllm_urls`, on the servers that hold it. Raises SQLEnvError.

    `few_shot` is the number of worked episodes in its prompt, as saved with it where None. One of `samples` is played
    greedily. `say` gets a line about what was taken over from what was saved with it.
    """
    given = {} if few_shot is None else {"few_shot": few_shot}
    settled = settle(name, saved_play(resolve_policy(name).ref), given)
    chosen = settled.settings
    for line in settled.lines:
        say(line)
    examples = _examples(name, chosen)

    def chat_of(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        chat = ChatFormat(tokenizer, chosen.chat, examples.conversations)
        for line in chat.lines:
            say(line)
        return chat

    def settings_of(context: int, chat: ChatFormat) -> RolloutSettings:
        temperature = 0.0 if samples == 1 else SAMPLING_TEMPERATURE
        budget = token_budget(chosen, context, chat)
        return RolloutSettings(budget, temperature, MAX_CONCURRENCY, max_failure_share=1.0)

    engine, chat, settings, _ = open_to_play(
        name, vllm_urls, chat_of, settings_of, say, trust_remote_code=trust_remote_code
    )
    # With the template's variables in force.
    chosen = replace(chosen, chat_template_kwargs=chat.settings.chat_template_kwargs)
    return PolicyPlayer(name, chosen, engine, chat, settings, samples)


def _examples(name: str, chosen: PlaySettings) -> Examples:
    """Have the worked episodes of its prompt played. Raises ConfigError where their data is not here."""
    if not chosen.few_shot:
        return Examples()
    try:
        dataset = load_dataset(chosen.data, answer_mode=chosen.answer_mode)
    except DataError as error:
        raise ConfigError(
            f"{name} is played with {chosen.few_shot} worked episodes of {chosen.data} in its prompt, and that data "
            f"set is not here: {error}. --few_shot 0 plays it without"
        ) from error
    return Examples.play(dataset, chosen.few_shot, chosen.answer_mode, chosen.step_budget)


MAX_CHOICES = 100
"""Choices of columns that are compared with an answer."""


class Support(StrEnum):
    """How a query supports an answer, from the most to the least."""

    ROWS = "rows"
    """The answer is its rows, or some of their columns."""
    CELLS = "cells"
    """Every value of the answer is among its rows."""
    NONE = "none"
    """It ran, and the answer is not in what it returned."""


_ORDER = tuple(Support)


@dataclass(frozen=True, slots=True)
class Ran:
    """A query that succeeded, and the rows that the policy saw; `complete`: there are no more."""

    sql: str
    rows: Sequence[Row]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Basis:
    """A query, and how it supports the answer."""

    sql: str
    support: Support


def basis_of(answer: str, queries: Sequence[Ran]) -> Basis | None:
    """Return the query that supports a typed answer best, the latest of several; None where none was run."""
    bases = [Basis(ran.sql, support_of(answer, ran)) for ran in reversed(queries)]
    return min(bases, key=lambda basis: _ORDER.index(basis.support), default=None)


def support_of(answer: str, ran: Ran) -> Support:
    """Tell how a query supports a typed answer."""
    if not ran.rows:
        return Support.ROWS if () in parse_answer(answer, 1) else Support.NONE
    if ran.complete and any(_is(answer, chosen) for chosen in _choices(ran.rows)):
        return Support.ROWS
    cells = [((cell,),) for row in ran.rows for cell in row]
    readings = [[cell.text for row in reading for cell in row] for reading in parse_answer(answer, 1)]
    found = any(reading and all(any(_is(text, cell) for cell in cells) for text in reading) for reading in readings)
    return Support.CELLS if found else Support.NONE


def successful_queries(turns: Sequence[Turn]) -> list[str]:
    """Return the statements of the turns that ran one, in order."""
    return [turn.argument for turn in turns if turn.action_type == ActionType.QUERY and not turn.error]


def _is(answer: str, rows: Sequence[Row]) -> bool:
    return judge_value(answer, Gold(tuple(rows), ordered=False)).correct


def _choices(rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """The rows, then choices of their columns, the wider ones first."""
    width = len(rows[0])
    columns = chain.from_iterable(combinations(range(width), n) for n in range(width, 0, -1))
    for chosen in islice(columns, MAX_CHOICES):
        yield tuple(tuple(row[i] for i in chosen) for row in rows)


OnTurn = Callable[[Turn], None]

NO_ANSWER = {
    Outcome.OUT_OF_BUDGET: "no answer: the policy ran out of steps",
    Outcome.OUT_OF_TOKENS: "no answer: the policy ran out of tokens",
}
_BASES = {
    Support.ROWS: "which this query returned:",
    Support.CELLS: "which is among what this query returned:",
    Support.NONE: "which none of its queries returned; the last one was:",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """How a question was answered.

    `answer` is empty where none was given. Where it is a query, `query` is that query and `rows` what it returns, as
    text; else `query` is the one that it rests on, empty where none succeeded, and `basis` says how. `agreed` is how
    many of `samples` gave that answer; `episode` is the first of them.
    """

    episode: Episode
    answer: str = ""
    query: str = ""
    rows: str = ""
    basis: str = ""
    agreed: int = 1
    samples: int = 1


class Asked:
    """A policy and the databases that it is asked about. One event loop at a time; `aclose` ends both."""

    def __init__(self, player: PolicyPlayer, dataset: Dataset) -> None:
        self.player = player
        self._dataset = dataset
        self._mode = player.play_settings.answer_mode
        self._environments = LocalEnvironments(dataset, player.env_settings, self._mode, threads=1)
        self._plays = count()
        self._databases = DatabasePool(dataset.databases, player.env_settings.sandbox)

    def tables(self, database: str) -> tuple[str, ...]:
        """Name a database's tables. Raises DataError."""
        return self._databases.schema(database).table_names

    async def ask(self, text: str, database: str | None, on_turn: OnTurn) -> Reply:
        """Ask a question of one's own. Raises DataError where it is not clear which database is meant."""
        asked = typed_question(text, self._dataset.databases, database)
        return await self._play(asked, asked.questions[0].question_id, self._environments.asking(asked), on_turn)

    async def ask_known(self, question_id: str, on_turn: OnTurn) -> Reply:
        """Ask a question of the data set, which is judged. Raises UnknownQuestionError."""
        return await self._play(self._dataset, question_id, self._environments, on_turn)

    async def aclose(self) -> None:
        """Release the policy and the databases."""
        await self.player.aclose()
        self._environments.close()
        self._databases.close()

    async def _play(self, dataset: Dataset, question_id: str, environments: Environments, on_turn: OnTurn) -> Reply:
        question = dataset.question(question_id)
        if self.player.samples > 1:
            return await self._vote(question, environments, on_turn)
        (episode,) = await self.player.play(question, environments, on_turn, next(self._plays))
        return await self._reply(episode)

    async def _vote(self, question: Question, environments: Environments, on_turn: OnTurn) -> Reply:
        """Answer as most samples do, and show the turns of the first of them."""
        episodes = await self.player.play(question, environments, lambda _: None, next(self._plays))
        records = [record(episode) for episode in episodes]
        key = rows_key(self._databases) if self._mode is AnswerMode.SQL else typed_key
        agreed = await asyncio.to_thread(agreeing, records, key)
        chosen = episodes[records.index(agreed[0])] if agreed else episodes[0]
        for turn in chosen.turns:
            on_turn(turn)
        return replace(await self._reply(chosen), agreed=len(agreed), samples=len(episodes))

    async def _reply(self, episode: Episode) -> Reply:
        last = episode.turns[-1] if episode.turns else None
        if last is None or last.action_type != ActionType.ANSWER or last.error:
            return Reply(episode)
        return await asyncio.to_thread(self._answered, episode, last.argument.strip())

    def _answered(self, episode: Episode, answer: str) -> Reply:
        db_id = episode.db_id
        if self._mode is AnswerMode.SQL:
            query = submitted_query(answer)
            outcome = query_outcome(
                run_query(self._databases, self._job(db_id, query)), self.player.env_settings.display
            )
            return Reply(episode, answer, query, outcome.result or outcome.error)
        found = basis_of(answer, self._ran(db_id, successful_queries(episode.turns)))
        return Reply(episode, answer, found.sql if found else "", basis=_words(found))

    def _ran(self, db_id: str, queries: Sequence[str]) -> list[Ran]:
        """Run the queries once more: a turn keeps the text of its rows alone."""
        ran = []
        for sql in dict.fromkeys(queries):
            result = run_query(self._databases, self._job(db_id, sql))
            if not isinstance(result, SQLError):
                ran.append(Ran(sql, result.rows, complete=not result.more))
        return ran

    def _job(self, db_id: str, sql: str) -> QueryJob:
        return QueryJob(db_id, sql, self.player.env_settings.display.max_rows)


def _words(basis: Basis | None) -> str:
    return "which rests on no query that succeeded" if basis is None else _BASES[basis.support]
