"""The text-to-SQL baseline: the policy is shown the whole schema, writes one query, and does not explore.

An episode of it is a record like any other, judged by the same environment: a QUERY, which is what the policy said,
and an ANSWER, which is not its own: in `value` mode the rows that its query returns, in `sql` mode the query.

Guarantees:

1. Whatever the policy says is its one query: a reply without one is a QUERY of the whole text, not parseable.
2. A query that fails has nothing to answer with: the episode is wrong, and has no ANSWER.
3. A schema that does not fit into the context is a failure of the method and not of the infrastructure: the episode is
   out of tokens, and counts.
4. Servers never tell a schema. It is read from the data set's own files, and so are the rows of an answer, since a
   QUERY shows them cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from env_server.dataset import Dataset, Question
from env_server.episode import question_text
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import read_statements
from env_server.types import ActionType, AnswerMode, SQLAction
from trainer.chat.actions import format_action
from trainer.chat.format import ChatFormat
from trainer.chat.text_to_sql import query_in, schema_prompt
from trainer.rollout.client import EpisodeContext
from trainer.rollout.episodes import Episode, Outcome, outcome_of, turn_of
from trainer.rollout.transcript import masked_row

TEXT_TO_SQL_STEPS = 2
"""What an episode takes of its step budget: the query, and the answer."""

ANSWER_CHARS = 30_000
"""Characters of an answer: more than any usable question's gold takes, and no more than a server is to be sent."""


class TextToSQL:
    """Plays episodes of the baseline for a `RolloutClient`; `examples` are shown, with their golds, before a question.

    A context manager, which closes the databases.
    """

    def __init__(
        self, dataset: Dataset, settings: EnvSettings, answer_mode: AnswerMode, examples: Sequence[Question] = ()
    ) -> None:
        self._answer_mode = answer_mode
        self._max_rows = settings.display.max_rows + 1
        """One more than any usable question's gold has."""
        self._databases = DatabasePool(dataset.databases, settings.sandbox)
        self._statements: dict[str, tuple[str, ...]] = {}
        self._examples = [(self.opening(q.db_id, question_text(q)), q.gold_sql) for q in examples]

    def close(self) -> None:
        """Close the databases."""
        self._databases.close()

    def opening(self, db_id: str, question: str) -> str:
        """Return the user's message for a question. Raises DataError."""
        if db_id not in self._statements:
            schema = self._databases.schema(db_id)
            with self._databases.lease(db_id) as sandbox:
                self._statements[db_id] = read_statements(sandbox, schema)
        return schema_prompt(self._statements[db_id], question)

    async def __call__(self, context: EpisodeContext) -> Episode:
        """Play an episode. Raises what its environment and its engine raise."""
        request, chat = context.request, context.chat
        observation = await context.reset()
        question = observation.question
        transcript = await context.transcript(lambda: self._prompt_ids(chat, self.opening(request.db_id, question)))
        prompt = transcript.view
        turn = await context.generate(transcript, 0)
        if turn is None:
            row = masked_row(list(prompt), chat.stop_ids[0])
            return request.episode(Outcome.OUT_OF_TOKENS, row, question=question, prompt_tokens=0)
        text = chat.text_of(turn.token_ids)
        sql = query_in(text)
        query = SQLAction(action_type=ActionType.QUERY, argument=sql or text)
        observation = await context.step(query)
        turns = [turn_of(text, query, observation, sql is not None, turn.policy_version, turn.tokens)]
        outcome = Outcome.WRONG
        if not observation.error:
            argument = await asyncio.to_thread(self._answer, request.db_id, query.argument)
            answer = SQLAction(action_type=ActionType.ANSWER, argument=argument)
            observation = await context.step(answer)
            written = format_action(answer.action_type, argument)
            turns.append(turn_of(written, answer, observation, policy_version=turn.policy_version, tokens=0))
            outcome = outcome_of(observation)
        played = {"question": question, "turns": tuple(turns), "prompt_tokens": context.prompt_tokens}
        return request.episode(outcome, transcript.row(), **played)

    def _answer(self, db_id: str, sql: str) -> str:
        if self._answer_mode is AnswerMode.SQL:
            return sql
        return format_answer(self._databases.query(db_id, sql, self._max_rows).rows)[:ANSWER_CHARS]

    def _prompt_ids(self, chat: ChatFormat, opening: str) -> list[int]:
        """Return the ids of the prompt: worked examples, if there are any, as earlier turns of the conversation."""
        if not self._examples:
            return chat.prompt_ids(opening)
        (first, _), *_ = self._examples
        ids = chat.prompt_ids(first)
        following = [*(shown for shown, _ in self._examples[1:]), opening]
        for (_, sql), message in zip(self._examples, following, strict=True):
            ids += [*chat.renderer.turn_ids(sql), *chat.renderer.user_ids(message, closed=True)]
        return ids
