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

The prompt is the zero-shot one of Rajkumar, Li and Bahdanau (Evaluating the Text-to-SQL Capabilities of Large Language
Models, 2022), "Create Table", which BIRD's baseline has taken over: the database's own CREATE statements, the question
in comments, and SELECT. A chat model gets it as a user's message, under a system message that asks for one query.

`query_in` reads any text, in time linear in its length. What it returns is one statement, as it was written, that
begins with SELECT or WITH: reasoning blocks aside, the first of

1. a statement in a code fence; one that is not closed runs to the end;
2. a line that begins with one, perhaps after a label ("SQL:");
3. SELECT in capitals, anywhere.

It ends with its semicolon, the fence or backtick around it, or, outside of fences, a blank line.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from env_server.dataset import Dataset, Question
from env_server.episode import question_text
from env_server.judging.answers import format_answer
from env_server.settings import EnvSettings
from env_server.sql.lexer import tokens
from env_server.sql.pool import DatabasePool
from env_server.sql.schema import read_statements
from env_server.types import ActionType, AnswerMode, SQLAction
from trainer.chat.actions import format_action
from trainer.chat.format import ChatFormat
from trainer.chat.reasoning import strip_reasoning
from trainer.rollout.client import EpisodeContext
from trainer.rollout.episodes import Episode, Outcome, outcome_of, turn_of
from trainer.rollout.transcript import masked_row

SYSTEM_PROMPT = (
    "You write SQL for a SQLite database. You are shown its schema and a question. Reply with one SELECT statement "
    "that answers the question, and nothing else."
)

_FENCE = "```"
_START = r"(?:SELECT\b|WITH\s+(?:RECURSIVE\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?AS\b)"
_ANY_START = re.compile(rf"\b{_START}", re.IGNORECASE)
_LINE_START = re.compile(
    rf"^[ \t>*_#`-]*+(?:[A-Za-z ]{{1,30}}:)?[ \t*`]*+(?P<query>{_START})", re.IGNORECASE | re.MULTILINE
)
_SHOUTED = re.compile(r"\b(?P<query>SELECT)\b")
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")

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


def schema_prompt(statements: Sequence[str], question: str) -> str:
    """Return the user's message; `question` as the environment words it, with its hint if it has one."""
    schema = "\n\n".join(f"{statement.strip().rstrip(';')};" for statement in statements)
    asked = "\n".join(f"-- {line}" for line in question.splitlines())
    task = "-- Using valid SQLite, answer the following question for the tables provided above."
    return f"{schema}\n\n{task}\n{asked}\nSELECT"


def query_in(text: str) -> str | None:
    """Return the query in a reply; None when there is none."""
    said = strip_reasoning(text)
    for fenced in said.split(_FENCE)[1::2]:
        if found := _ANY_START.search(fenced):
            return _statement(fenced[found.start() :], fenced=True)
    found = _LINE_START.search(said) or _SHOUTED.search(said)
    if found is None:
        return None
    start = found.start("query")
    closing = "`" if said[:start].endswith("`") else _FENCE
    return _statement(said[start:].partition(closing)[0], fenced=False)


def _statement(text: str, *, fenced: bool) -> str:
    """Return the statement that a text begins with, without its semicolon."""
    for token in tokens(text):
        if token[0] == ";" or (not fenced and token.lastgroup == "blank" and _BLANK_LINE.search(token[0])):
            return text[: token.start()].rstrip()
    return text.rstrip()
