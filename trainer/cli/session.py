"""A policy that plays for a person, in the terminal or in a page: loaded once, it is asked one question after another.

The play is that of training and evaluation, by the same rollout client, chat format and engine; what was saved with
the policy decides its actions, its prompt, what it answers with, and its limits. It plays greedily, or draws several
samples; either way, the same question is played the same way.

Whether an answer to a question without a gold is right is unknown. Whether the policy read it off the database, or
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

from env_server.actions import query_outcome
from env_server.data.loading import load_dataset, typed_question
from env_server.dataset import Dataset, Gold, Row
from env_server.errors import DataError, SQLError
from env_server.judging.answers import parse_answer
from env_server.judging.submissions import submitted_query
from env_server.judging.verdict import judge_value
from env_server.sql.pool import DatabasePool, QueryJob, run_query
from env_server.types import ActionType, AnswerMode
from inference.engine import Engine
from trainer.chat.actions import format_action
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
MAX_CHOICES = 100
"""Choices of columns that are compared with an answer."""
NO_ANSWER = {
    Outcome.OUT_OF_BUDGET: "no answer: the policy ran out of steps",
    Outcome.OUT_OF_TOKENS: "no answer: the policy ran out of tokens",
}
OnTurn = Callable[[Turn], None]


class Support(StrEnum):
    """How an answer rests on a query that succeeded, from the most to the least; the values say it to the user."""

    ROWS = "which this query returned:"
    """The answer is its rows, or some of their columns."""
    CELLS = "which is among what this query returned:"
    """Every value of the answer is among its rows."""
    NONE = "which none of its queries returned; the last one was:"
    NO_QUERY = "which rests on no query that succeeded"


@dataclass(frozen=True, slots=True)
class Ran:
    """A query that succeeded, and the rows that the policy saw; `complete`: there are no more."""

    sql: str
    rows: Sequence[Row]
    complete: bool = True


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


class PolicySession:
    """A policy and the databases that it is asked about. One event loop at a time; `aclose` ends both."""

    def __init__(
        self,
        name: str,
        dataset: Dataset,
        play_settings: PlaySettings,
        engine: Engine,
        chat: ChatFormat,
        settings: RolloutSettings,
        samples: int = 1,
    ) -> None:
        self.name = name
        self._dataset, self._samples = dataset, samples
        self._mode, self._seed = play_settings.answer_mode, play_settings.seed
        self._env_settings = play_settings.environment
        self._engine, self._chat, self._settings = engine, chat, settings
        self._environments = LocalEnvironments(dataset, self._env_settings, self._mode, threads=1)
        self._plays = count()
        self._databases = DatabasePool(dataset.databases, self._env_settings.sandbox)

    @classmethod
    def load(
        cls,
        name: str,
        dataset: Dataset,
        *,
        say: Callable[[str], object],
        few_shot: int | None = None,
        samples: int = 1,
        vllm_urls: str | None = None,
        trust_remote_code: bool = False,
    ) -> PolicySession:
        """Load the policy, here or, of `vllm_urls`, on the servers that hold it. Raises SQLEnvError.

        `few_shot` is the number of worked episodes in its prompt, as saved with it where None. One of `samples` is
        played greedily. `say` gets a line about what was taken over from what was saved with it.
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
        return cls(name, dataset, chosen, engine, chat, settings, samples)

    def tables(self, database: str) -> tuple[str, ...]:
        """Name a database's tables. Raises DataError."""
        return self._databases.schema(database).table_names

    async def ask(self, text: str, database: str | None, on_turn: OnTurn) -> Reply:
        """Ask a question of the user's own. Raises DataError where it is not clear which database is meant."""
        asked = typed_question(text, self._dataset.databases, database)
        return await self._play(asked, asked.questions[0].question_id, self._environments.asking(asked), on_turn)

    async def ask_known(self, question_id: str, on_turn: OnTurn) -> Reply:
        """Ask a question of the data set, which is judged. Raises UnknownQuestionError."""
        return await self._play(self._dataset, question_id, self._environments, on_turn)

    async def aclose(self) -> None:
        """Release the policy and the databases."""
        await self._engine.aclose()
        self._environments.close()
        self._databases.close()

    async def _play(self, dataset: Dataset, question_id: str, environments: Environments, on_turn: OnTurn) -> Reply:
        """Play a question once, or answer as most samples do and show the turns of the first of those."""
        question, one = dataset.question(question_id), self._samples == 1
        playing = partial(explore, on_turn=on_turn) if one else explore
        client = RolloutClient(self._engine, environments, self._chat, self._settings, play_episode=playing)
        requests = [request_for(question, derive_seed(self._seed, sample)) for sample in range(self._samples)]
        # The number tells apart the plays that are under way at once.
        episodes = await client.play(requests, first=next(self._plays) * self._samples)
        if one:
            return await self._reply(episodes[0])
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
        display = self._env_settings.display
        if self._mode is AnswerMode.SQL:
            query = submitted_query(answer)
            job = QueryJob(episode.db_id, query, display.max_rows)
            outcome = query_outcome(run_query(self._databases, job), display)
            return Reply(episode, answer, query, outcome.result or outcome.error)
        ran = []
        # A turn keeps the text of its rows alone, so that its query is run once more.
        queries = [turn.argument for turn in episode.turns if turn.action_type == ActionType.QUERY and not turn.error]
        for sql in dict.fromkeys(queries):
            result = run_query(self._databases, QueryJob(episode.db_id, sql, display.max_rows))
            if not isinstance(result, SQLError):
                ran.append(Ran(sql, result.rows, complete=not result.more))
        support, query = basis_of(answer, ran)
        return Reply(episode, answer, query, basis=support)


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


def written(turn: Turn) -> str:
    """Return a turn's action in one form, whatever the policy's format is."""
    try:
        return format_action(turn.action_type, turn.argument)
    except ValueError:
        return f"{turn.action_type} {turn.argument}".strip()


def basis_of(answer: str, queries: Sequence[Ran]) -> tuple[Support, str]:
    """Return how a typed answer is supported, and by which query: the best one, the latest of several."""
    found = [(support_of(answer, ran), ran.sql) for ran in reversed(queries)]
    order = list(Support)
    return min(found, key=lambda each: order.index(each[0]), default=(Support.NO_QUERY, ""))


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


def _is(answer: str, rows: Sequence[Row]) -> bool:
    return judge_value(answer, Gold(tuple(rows), ordered=False)).correct


def _choices(rows: Sequence[Row]) -> Iterator[tuple[Row, ...]]:
    """The rows, then choices of their columns, the wider ones first."""
    width = len(rows[0])
    columns = chain.from_iterable(combinations(range(width), n) for n in range(width, 0, -1))
    for chosen in islice(columns, MAX_CHOICES):
        yield tuple(tuple(row[i] for i in chosen) for row in rows)
