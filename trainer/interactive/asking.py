"""A policy is asked: a question of a person's own, or one of the data set; its turns, then its answer and the basis.

Whoever shows it, a terminal or a page, asks here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from env_server.data.own_questions import typed_question
from env_server.dataset import Dataset, Question
from env_server.errors import SQLError
from env_server.jobs import QueryJob
from env_server.judging.submissions import submitted_query
from env_server.outcomes import query_outcome
from env_server.sql.pool import DatabasePool, run_query
from env_server.types import ActionType, AnswerMode
from trainer.interactive.basis import Basis, Ran, Support, basis_of, successful_queries
from trainer.interactive.policy_player import PolicyPlayer
from trainer.results.samples import agreeing, rows_key, typed_key
from trainer.rollout.environments import Environments, LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome, Turn, record

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
