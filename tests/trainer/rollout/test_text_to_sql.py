"""The text-to-SQL baseline: the prompt that is read, and the episode that a reply makes, in both answer modes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from env_server.dataset import Dataset, Question
from env_server.settings import EnvSettings, JudgingSettings
from env_server.types import AnswerMode
from inference.engine import Completion, ContextOverflowError, FinishReason, Sampling, Session
from inference.hf.engine import HFEngine
from policies.tiny.tokenizer import build_tokenizer
from tests.env_server.serving import running_server
from tests.trainer.chat.families import family_tokenizer
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.eval.failure_kinds import FailureKind, failure_kind
from trainer.rollout.client import RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import Environments, LocalEnvironments
from trainer.rollout.episodes import Episode, record
from trainer.rollout.remote_environments import RemoteEnvironments
from trainer.rollout.text_to_sql import SYSTEM_PROMPT, TextToSQL, query_in, schema_prompt
from trainer.rollout.transcript import TokenBudget

SETTINGS = EnvSettings(judging=JudgingSettings(variants=False))
BUDGET = TokenBudget(max_completion=2_000, max_context=4_096, max_turn=256)


class ReplyingEngine:
    """Gives each question its reply, and keeps the prompts. Its context is `allowed` tokens; it says `told`."""

    def __init__(self, chat: ChatFormat, replies: Mapping[str, str], allowed: int, told: int) -> None:
        self.chat = chat
        self.replies = replies
        self.allowed = allowed
        self.told = told
        self.prompts: list[str] = []

    def session(self, key: int) -> Session:
        return _Replying(self)

    async def aclose(self) -> None:
        pass


class _Replying:
    def __init__(self, engine: ReplyingEngine) -> None:
        self._engine = engine

    async def __aenter__(self) -> _Replying:
        return self

    async def __aexit__(self, *exc: object) -> None:
        pass

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        if len(prompt_ids) + sampling.max_new_tokens > self._engine.allowed:
            raise ContextOverflowError(len(prompt_ids), sampling.max_new_tokens, self._engine.told)
        prompt = self._engine.chat.renderer.decode_turn(prompt_ids)
        self._engine.prompts.append(prompt)
        asked = prompt.rpartition("provided above.")[2]
        (reply,) = (reply for question, reply in self._engine.replies.items() if question in asked)
        ids = self._engine.chat.renderer.turn_ids(reply)[: sampling.max_new_tokens]
        return Completion(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, policy_version=0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["How many cats dogs are there pets owners name species CREATE TABLE Using valid SQLite"])


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ChatFormat(tokenizer)


def play(
    pets: Dataset,
    chat: ChatFormat,
    replies: Mapping[str, str],
    mode: AnswerMode = AnswerMode.VALUE,
    *,
    environments: Environments | None = None,
    examples: list[Question] | None = None,
    budget: TokenBudget = BUDGET,
    allowed: int = 1 << 20,
    told: int | None = None,
) -> tuple[list[Episode], ReplyingEngine]:
    """Play the questions that have a reply."""
    engine = ReplyingEngine(
        chat, {pets.question(name).text: reply for name, reply in replies.items()}, allowed, told or allowed
    )
    requests = [request_for(pets.question(name), 1) for name in replies]
    with (
        closing(LocalEnvironments(pets, SETTINGS, mode)) as local,
        closing(TextToSQL(pets, SETTINGS, mode, examples or [])) as baseline,
    ):
        client = RolloutClient(engine, environments or local, chat, RolloutSettings(budget, 0.0), play_episode=baseline)
        return asyncio.run(client.play(requests)), engine


def test_the_gold_queries_are_right_in_both_modes(pets: Dataset, chat: ChatFormat) -> None:
    replies = {q.question_id: f"```sql\n{q.gold_sql};\n```" for q in pets.questions}
    for mode in AnswerMode:
        played, _ = play(pets, chat, replies, mode)
        assert [e.outcome.value for e in played] == ["correct"] * 4
        for question, episode in zip(pets.questions, played, strict=True):
            query, answer = episode.turns
            assert (query.action_type, query.argument, query.parseable) == ("QUERY", question.gold_sql, True)
            assert query.text == replies[question.question_id]
            assert answer.action_type == "ANSWER"
            assert (answer.argument == question.gold_sql) is (mode is AnswerMode.SQL)
    assert played[0].row.env_mask == [1] * len(played[0].row.completion_ids)


def test_the_prompt_is_the_whole_schema_and_counts_as_read(pets: Dataset, chat: ChatFormat) -> None:
    (episode,), engine = play(pets, chat, {"cats": "SELECT 2"})
    with closing(TextToSQL(pets, SETTINGS, AnswerMode.VALUE)) as baseline:
        opening = baseline.opening("pets", pets.question("cats").text)
    assert engine.prompts == [opening]
    assert opening.startswith(
        "CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT, city TEXT);\n\nCREATE TABLE"
    )
    kept = record(episode)
    assert (kept.prompt_tokens, kept.tokens) == (len(episode.row.prompt_ids), len(episode.row.completion_ids))


@pytest.mark.parametrize(
    ("reply", "mode", "kind", "answer"),
    [
        ("SELECT COUNT(*) FROM pets", AnswerMode.VALUE, FailureKind.WRONG_QUERY, "5"),
        ("SELECT name FROM pets WHERE age > 99", AnswerMode.VALUE, FailureKind.WRONG_QUERY, "[]"),
        ("SELECT COUNT(*) FROM pets", AnswerMode.SQL, FailureKind.WRONG_QUERY, "SELECT COUNT(*) FROM pets"),
        ("SELECT kind FROM pets", AnswerMode.VALUE, FailureKind.NO_SUCH_COLUMN, None),
        ("SELECT * FROM cats", AnswerMode.SQL, FailureKind.NO_SUCH_TABLE, None),
        ("SELECT FROM pets", AnswerMode.VALUE, FailureKind.SYNTAX_ERROR, None),
        ("There are 2 cats.", AnswerMode.VALUE, FailureKind.UNPARSEABLE, None),
        ("ANSWER 2", AnswerMode.VALUE, FailureKind.UNPARSEABLE, None),
    ],
)
def test_what_goes_wrong_is_told(
    pets: Dataset, chat: ChatFormat, reply: str, mode: AnswerMode, kind: FailureKind, answer: str | None
) -> None:
    (episode,), _ = play(pets, chat, {"cats": reply}, mode)
    assert episode.outcome.value == "wrong"
    assert failure_kind(record(episode)) is kind
    assert [turn.argument for turn in episode.turns[1:]] == ([] if answer is None else [answer])


def test_all_rows_count_and_in_full(pets: Dataset, chat: ChatFormat) -> None:
    """What a QUERY shows is cut; the answer is not."""
    long = "SELECT printf('%.100c', 'x')"
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n LIMIT 30"
    played, _ = play(pets, chat, {"cats": long, "oldest": many})
    assert played[0].turns[1].argument == "x" * 100
    assert len(played[1].turns[1].argument.split(", ")) == EnvSettings().display.max_rows + 1


def test_worked_examples_are_earlier_turns_of_the_conversation(pets: Dataset) -> None:
    chat = ChatFormat(family_tokenizer("qwen2_5"), ChatSettings(custom_system_prompt=SYSTEM_PROMPT))
    shown = [pets.question("cats"), pets.question("oldest")]
    (episode,), _ = play(pets, chat, {"oslo": "SELECT 1"}, examples=shown)
    with closing(TextToSQL(pets, SETTINGS, AnswerMode.VALUE)) as baseline:
        asked = [baseline.opening("pets", q.text) for q in (*shown, pets.question("oslo"))]
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": asked[0]},
        {"role": "assistant", "content": shown[0].gold_sql},
        {"role": "user", "content": asked[1]},
        {"role": "assistant", "content": shown[1].gold_sql},
        {"role": "user", "content": asked[2]},
    ]
    expected = chat.renderer._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.renderer._tokenizer.decode(episode.row.prompt_ids) == expected


def test_on_servers_it_is_the_same_play(pets: Dataset, chat: ChatFormat) -> None:
    replies = {"cats": "SELECT COUNT(*) FROM pets", "oldest": pets.question("oldest").gold_sql}
    played, _ = play(pets, chat, replies)
    with running_server(pets) as server, closing(RemoteEnvironments(server.url, pets)) as remote:
        assert play(pets, chat, replies, environments=remote)[0] == played


def test_a_schema_that_does_not_fit_is_a_failure_that_counts(pets: Dataset, chat: ChatFormat) -> None:
    for narrow in (
        play(pets, chat, {"cats": "SELECT 2"}, budget=TokenBudget(2_000, 100, 50))[0],
        play(pets, chat, {"cats": "SELECT 2"}, allowed=100)[0],
    ):
        (kept,) = map(record, narrow)
        assert (kept.outcome, kept.steps, kept.tokens) == ("out_of_tokens", 0, 0)
        assert failure_kind(kept) is FailureKind.OUT_OF_TOKENS


def test_a_server_of_a_shorter_context_has_the_reply_shortened(pets: Dataset, chat: ChatFormat) -> None:
    (known,), _ = play(pets, chat, {"cats": "SELECT 2"})
    (episode,), _ = play(pets, chat, {"cats": "SELECT 2"}, allowed=len(known.row.prompt_ids) + 40)
    assert episode == known


def test_an_engine_that_refuses_what_it_allows_fails_the_episode(pets: Dataset, chat: ChatFormat) -> None:
    (episode,), _ = play(pets, chat, {"cats": "SELECT 2"}, allowed=100, told=5_000)
    assert episode.outcome.value == "failed"
    assert "exceed the context" in episode.failure


def test_a_model_plays_the_same_each_time(
    pets: Dataset, chat: ChatFormat, tokenizer: PreTrainedTokenizerBase, random_policy: Callable[..., Qwen3ForCausalLM]
) -> None:
    model = random_policy(tokenizer, context=1_024, liked={"SELECT ": 4.0, " FROM ": 4.0, "pets": 4.0, "<end>": 4.0})

    async def once() -> list[Episode]:
        engine = HFEngine(model, stop_ids=chat.stop_ids, pad_id=0)
        with (
            closing(LocalEnvironments(pets, SETTINGS)) as local,
            closing(TextToSQL(pets, SETTINGS, AnswerMode.VALUE)) as baseline,
        ):
            settings = RolloutSettings(TokenBudget(64, 1_024, 32), 1.0)
            client = RolloutClient(engine, local, chat, settings, play_episode=baseline)
            episodes = await client.play([request_for(q, 7) for q in pets.questions])
        await engine.aclose()
        return episodes

    first, second = asyncio.run(once()), asyncio.run(once())
    assert first == second
    assert all(e.turns[0].action_type == "QUERY" for e in first)
    json.dumps([record(e).turns for e in first])


def test_the_prompt_is_the_schema_and_the_question_in_comments() -> None:
    statements = ["CREATE TABLE pets (name TEXT)", "CREATE VIEW cats AS SELECT * FROM pets;\n"]
    assert schema_prompt(statements, "How many?\nHint: count") == (
        "CREATE TABLE pets (name TEXT);\n\n"
        "CREATE VIEW cats AS SELECT * FROM pets;\n\n"
        "-- Using valid SQLite, answer the following question for the tables provided above.\n"
        "-- How many?\n"
        "-- Hint: count\n"
        "SELECT"
    )


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        ("  select name\nFROM pets;", "select name\nFROM pets"),
        ("SELECT ';' AS a; SELECT 2", "SELECT ';' AS a"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("Here you are:\n```sql\nSELECT 1\n\nFROM t\n```\nIt counts.\n```\nSELECT 2\n```", "SELECT 1\n\nFROM t"),
        ("```\nnothing\n```\n```SELECT 2```", "SELECT 2"),
        ("```sql\nSELECT 1", "SELECT 1"),
        ("```sql\n-- all of them\nSELECT 1 -- yes\n```", "SELECT 1 -- yes"),
        ("SELECT 1\n```\nand more", "SELECT 1"),
        ("SQL: SELECT 1", "SELECT 1"),
        ("The SQL query is: `SELECT 1`", "SELECT 1"),
        ("Use `SELECT a` or `SELECT b`.", "SELECT a"),
        ("To answer, use SELECT name FROM pets WHERE age > 3;", "SELECT name FROM pets WHERE age > 3"),
        ("To select the names, use\n\nSELECT name FROM pets\n\nThis gives them.", "SELECT name FROM pets"),
        ("WITH a AS (SELECT 1) SELECT * FROM a", "WITH a AS (SELECT 1) SELECT * FROM a"),
        ("WITH RECURSIVE n(i) AS (SELECT 1) SELECT i FROM n", "WITH RECURSIVE n(i) AS (SELECT 1) SELECT i FROM n"),
        ("With the tables above I would count.", None),
        ("I would select the pets.", None),
        ("The answer is 5.", None),
        ("", None),
        ("```", None),
        ("<think>SELECT 1 is wrong</think>SELECT 2", "SELECT 2"),
        ("<think>SELECT 1 is", None),
        ("SELECT 'a\n\nb' FROM t", "SELECT 'a\n\nb' FROM t"),
    ],
)
def test_the_query_is_found(text: str, query: str | None) -> None:
    assert query_in(text) == query


PIECES = st.sampled_from(
    ["```", "```sql\n", "SELECT ", "select", "WITH a AS (", ";", "\n\n", "'", '"', "`", "--", "SQL:"]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=20).map("".join))
def test_any_text_gives_one_statement_of_its_own_or_none(text: str) -> None:
    query = query_in(text)
    if query is not None:
        assert query in text
        assert query.upper().startswith(("SELECT", "WITH"))
        assert query == query.rstrip()
        assert query_in(query) is not None


@pytest.mark.parametrize("piece", ["SELECT ", "with a as ", "```", "a: ", "'", "\n\n", "WITH a (", "* ", "`"])
def test_long_replies_are_read(piece: str) -> None:
    """In linear time: this many of any of them would not end otherwise."""
    query = query_in(piece * 50_000)
    assert query is None or query in piece * 50_000
