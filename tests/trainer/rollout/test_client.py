"""Each invariant that the rollout client states, with a real engine and real environments wherever they can run."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import pytest
import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from benchmarks.simulated import SimulatedEngine
from env_server.dataset import Dataset
from env_server.environment import SQLEnvironment
from env_server.errors import DataError
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from env_server.types import SQLAction, SQLObservation
from inference.engine import Completion, Engine, EngineError, FinishReason, Sampling, Session
from inference.hf.engine import HFEngine
from policies.tiny.tokenizer import build_tokenizer
from trainer.chat.format import ChatFormat
from trainer.chat.prompts import first_message, observation_message
from trainer.rollout.client import (
    GC_THRESHOLDS,
    EpisodeRequest,
    RolloutClient,
    RolloutSettings,
    derive_seed,
    rare_collections,
)
from trainer.rollout.environments import Environments, EnvironmentSession, LocalEnvironments
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.failures import Failures, RolloutError
from trainer.rollout.timing import Phase
from trainer.rollout.transcript import TokenBudget

BUDGET = TokenBudget(max_completion=4_000, max_context=4_096, max_turn=16)
NARROW = TokenBudget(max_completion=200, max_context=4_096, max_turn=16)
"""Too narrow for a long episode: its oldest turns are dropped."""
QUESTIONS = ("cats", "oldest", "oslo", "species")
FOREVER = 1e6
"""A linger that no test sits out: each batch holds every open session, whatever the timing."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["How many cats dogs are there pets owners name species Max Rex Oslo"])


@pytest.fixture(scope="module")
def chat(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    return ChatFormat(tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase, random_policy: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    """A random policy that likes actions, tables and the end of a turn, so that its episodes differ in kind."""
    liked = {"<end>": 5.0, "pets": 4.0, "owners": 4.0, "DESCRIBE ": 4.5, "SAMPLE ": 4.5, "QUERY ": 3.5, "ANSWER ": 2.5}
    return random_policy(tokenizer, seed=5, context=4_096, liked=liked)


@pytest.fixture
def environments(pets: Dataset) -> Iterator[LocalEnvironments]:
    local = LocalEnvironments(pets, threads=4)
    yield local
    local.close()


def engine_of(model: Qwen3ForCausalLM, chat: ChatFormat, linger_s: float = 0.0) -> HFEngine:
    return HFEngine(model, stop_ids=chat.stop_ids, pad_id=0, linger_s=linger_s)


def requests_for(count: int, seed: int = 0) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(QUESTIONS[i % len(QUESTIONS)], derive_seed(seed, i), "pets", "easy", "test")
        for i in range(count)
    ]


def settings_with(**overrides: object) -> RolloutSettings:
    return replace(RolloutSettings(BUDGET), **overrides)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Generated:
    """What the engine was shown and what it said."""

    view: tuple[int, ...]
    completion: Completion
    seed: int


class WatchedEngine:
    """Passes on to another engine, records it, and lets a test hold or fail a session before each turn."""

    def __init__(
        self,
        inner: Engine,
        before_turn: Callable[[int], Awaitable[None]] | None = None,
        before_opening: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.inner = inner
        self.before_turn = before_turn
        self.before_opening = before_opening
        self.generated: dict[int, list[Generated]] = {}
        self.opened = 0
        self.closed = 0

    def session(self, key: int) -> Session:
        return _WatchedSession(self, self.inner.session(key), key)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _WatchedSession:
    def __init__(self, engine: WatchedEngine, inner: Session, key: int) -> None:
        self._engine = engine
        self._inner = inner
        self._key = key

    async def __aenter__(self) -> _WatchedSession:
        if self._engine.before_opening is not None:
            await self._engine.before_opening()
        self._inner = await self._inner.__aenter__()
        self._engine.opened += 1
        self._engine.generated[self._key] = []
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(*exc)
        self._engine.closed += 1

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        if self._engine.before_turn is not None:
            await self._engine.before_turn(self._key)
        completion = await self._inner.generate(prompt_ids, sampling, seed)
        self._engine.generated[self._key].append(Generated(prompt_ids, completion, seed))
        return completion


def saying(chat: ChatFormat, *turns: str, finish: FinishReason = FinishReason.STOP) -> SimulatedEngine:
    """An engine that says the given texts, turn by turn, to every episode; LENGTH: each without its end."""
    said = [chat.renderer.turn_ids(text) for text in turns]
    cut = None if finish is FinishReason.STOP else -1
    engine = SimulatedEngine(lambda request: said[request.turn][:cut], stop_ids=chat.stop_ids)
    engine.policy_version = 3
    return engine


Hook = Callable[[str, str], Awaitable[None]]
"""Called before each call of an environment with its name ("open", "reset", "step") and the question's id, or ""."""


class WatchedEnvironments:
    """Passes on to other environments, counts sessions, and lets a test hold or fail a call."""

    def __init__(self, inner: Environments, before: Hook | None = None) -> None:
        self._inner = inner
        self.before = before
        self.opened = 0
        self.closed = 0
        self.most_open = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        if self.before is not None:
            await self.before("open", "")
        async with self._inner.session() as inner:
            self.opened += 1
            self.most_open = max(self.most_open, self.opened - self.closed)
            try:
                yield _WatchedEnvironment(self, inner)
            finally:
                self.closed += 1

    def close(self) -> None:
        self._inner.close()


class _WatchedEnvironment:
    def __init__(self, watch: WatchedEnvironments, inner: EnvironmentSession) -> None:
        self._watch = watch
        self._inner = inner
        self._question_id = ""

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        self._question_id = question_id
        if self._watch.before is not None:
            await self._watch.before("reset", question_id)
        return await self._inner.reset(question_id, episode_id)

    async def step(self, action: SQLAction) -> SQLObservation:
        if self._watch.before is not None:
            await self._watch.before("step", self._question_id)
        return await self._inner.step(action)


class InlineEnvironments:
    """Environments without threads: an answer never waits, so that a tiny deadline cannot hit it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._pool = DatabasePool(dataset.databases, EnvSettings().sandbox)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        yield _InlineEnvironment(SQLEnvironment(self._dataset, self._pool))

    def close(self) -> None:
        self._pool.close()


class _InlineEnvironment:
    def __init__(self, environment: SQLEnvironment) -> None:
        self._environment = environment

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        return self._environment.reset(question_id=question_id, episode_id=episode_id)

    async def step(self, action: SQLAction) -> SQLObservation:
        return self._environment.step(action)


@pytest.fixture
def inline(pets: Dataset) -> Iterator[InlineEnvironments]:
    environments = InlineEnvironments(pets)
    yield environments
    environments.close()


async def never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


# Exactly once


async def test_every_request_yields_its_episode_in_order_whoever_fails(
    model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    requests = requests_for(12)

    async def engine_fails(key: int) -> None:
        if key in (1, 6):
            raise EngineError("out of memory")

    async def environment_fails(call: str, question_id: str) -> None:
        if call == "step" and question_id == "oslo":
            raise ConnectionResetError("reset by peer")

    ended: list[Episode] = []
    engine = WatchedEngine(engine_of(model, chat), engine_fails)
    watched = WatchedEnvironments(environments, environment_fails)
    client = RolloutClient(engine, watched, chat, settings_with(max_failure_share=1.0, max_concurrency=5))
    episodes = await client.play(requests, ended.append)
    await engine.aclose()

    assert [e.episode_id for e in episodes] == [f"{r.question_id}#{r.seed}" for r in requests]
    assert [(e.question_id, e.db_id, e.hardness, e.family) for e in episodes] == [
        (r.question_id, r.db_id, r.hardness, r.family) for r in requests
    ]
    failures = {i: e.failure for i, e in enumerate(episodes) if e.outcome is Outcome.FAILED}
    reset, memory = "ConnectionResetError: reset by peer", "EngineError: out of memory"
    assert failures == {1: memory, 2: reset, 6: memory, 10: reset}
    assert sorted(e.episode_id for e in ended) == sorted(e.episode_id for e in episodes)
    assert (watched.opened, watched.closed) == (12, 12)
    assert (engine.opened, engine.closed) == (12, 12)


async def test_a_failed_episode_is_a_masked_row(chat: ChatFormat, inline: InlineEnvironments) -> None:
    async def fails(call: str, question_id: str) -> None:
        raise DataError("the database is gone")

    client = RolloutClient(saying(chat, "ANSWER 2"), WatchedEnvironments(inline, fails), chat, settings_with())
    (failed,) = await client.play(requests_for(1))
    assert failed.outcome is Outcome.FAILED
    assert failed.failure == "DataError: the database is gone"
    assert failed.turns == ()
    assert failed.row.prompt_ids
    assert (failed.row.env_mask, failed.row.logprobs, len(failed.row.completion_ids)) == ([0], [0.0], 1)


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("open", "the environment opened no session within 0.01 s"),
        ("reset", "the environment did not answer a reset within 0.01 s"),
        ("step", "the environment did not answer a step within 0.01 s"),
        ("engine", "the engine opened no session within 0.02 s"),
        ("turn", "the engine did not finish a turn within 0.02 s"),
    ],
)
async def test_every_wait_meets_its_deadline(
    where: str, complaint: str, chat: ChatFormat, inline: InlineEnvironments
) -> None:
    async def environment_hangs(call: str, question_id: str) -> None:
        if call == where:
            await never()

    async def engine_hangs(key: int) -> None:
        if where == "turn":
            await never()

    async def opening_hangs() -> None:
        if where == "engine":
            await never()

    engine = WatchedEngine(saying(chat, "ANSWER 2"), engine_hangs, opening_hangs)
    watched = WatchedEnvironments(inline, environment_hangs)
    settings = settings_with(max_failure_share=1.0, environment_timeout_s=0.01, engine_timeout_s=0.02)
    (episode,) = await RolloutClient(engine, watched, chat, settings).play(requests_for(1))
    assert episode.failure == f"TimeoutError: {complaint}"
    assert (watched.opened, engine.opened) == (watched.closed, engine.closed)


async def test_a_timeout_of_the_component_keeps_its_own_words(chat: ChatFormat, inline: InlineEnvironments) -> None:
    async def times_out(call: str, question_id: str) -> None:
        raise TimeoutError("no free slot")

    client = RolloutClient(
        saying(chat), WatchedEnvironments(inline, times_out), chat, settings_with(max_failure_share=1.0)
    )
    (episode,) = await client.play(requests_for(1))
    assert episode.failure == "TimeoutError: no free slot"


async def test_too_many_failures_stop_the_rollout_at_once_with_the_first_cause(
    chat: ChatFormat, inline: InlineEnvironments
) -> None:
    async def dies(key: int) -> None:
        if key >= 2:
            raise EngineError(f"engine {key} is dead")
        await never()

    engine = WatchedEngine(saying(chat), dies)
    watched = WatchedEnvironments(inline)
    client = RolloutClient(engine, watched, chat, settings_with(max_failure_share=0.4))
    with pytest.raises(
        RolloutError, match=r"^3 of 5 episodes failed, more than the 40% that a run may lose.* engine 2"
    ):
        await client.play(requests_for(5))
    assert (engine.opened, watched.opened) == (5, 5)
    assert (engine.closed, watched.closed) == (5, 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_rank_stops_when_it_alone_exceeds_the_share_of_the_batch_of_all(
    chat: ChatFormat, inline: InlineEnvironments
) -> None:
    async def dies(key: int) -> None:
        if key < 3:
            raise EngineError("dead")

    engine = WatchedEngine(saying(chat, "ANSWER 2"), dies)
    client = RolloutClient(engine, inline, chat, settings_with(max_failure_share=0.25))
    played = await client.play(requests_for(5), failures=Failures(12, 0.25))
    assert [e.outcome for e in played].count(Outcome.FAILED) == 3, "three of twelve"
    with pytest.raises(RolloutError, match=r"^3 of 11 episodes failed"):
        await client.play(requests_for(5), failures=Failures(11, 0.25))


@pytest.mark.parametrize("broken", ["engine", "environment", "progress"])
async def test_a_bug_is_not_taken_for_a_failed_episode(
    broken: str, chat: ChatFormat, inline: InlineEnvironments
) -> None:
    def bug(at: str) -> None:
        if at == broken:
            raise KeyError("a bug")

    async def in_engine(key: int) -> None:
        bug("engine")

    async def in_environment(call: str, question_id: str) -> None:
        bug("environment")

    engine = WatchedEngine(saying(chat, "ANSWER 2"), in_engine)
    client = RolloutClient(
        engine, WatchedEnvironments(inline, in_environment), chat, settings_with(max_failure_share=1.0)
    )
    with pytest.RaisesGroup(KeyError):
        await client.play(requests_for(1), lambda _: bug("progress"))


# Token-exact


@torch.no_grad()
def recomputed(model: Qwen3ForCausalLM, episode: Episode, temperature: float) -> torch.Tensor:
    """The logprob of every completion token of a row under the prefix that the row shows, by a plain forward."""
    prompt, completion = episode.row.prompt_ids, episode.row.completion_ids
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    logprobs: torch.Tensor = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize(
    ("budget", "temperature"), [(BUDGET, 1.0), (NARROW, 0.6), (NARROW, 0.0)], ids=["wide", "narrow", "greedy"]
)
async def test_each_trained_token_has_the_logprob_that_its_row_gives_it(
    budget: TokenBudget,
    temperature: float,
    model: Qwen3ForCausalLM,
    chat: ChatFormat,
    environments: LocalEnvironments,
) -> None:
    engine = WatchedEngine(engine_of(model, chat))
    client = RolloutClient(engine, environments, chat, RolloutSettings(budget, temperature))
    episodes = await client.play(requests_for(16))
    await engine.aclose()
    assert any(e.truncated_turns > 0 for e in episodes) == (budget is NARROW)
    for key, episode in enumerate(episodes):
        row = episode.row
        assert len(row.completion_ids) == len(row.logprobs) == len(row.env_mask) <= budget.max_completion
        mask = torch.tensor(row.env_mask, dtype=torch.bool)
        gap = (recomputed(model, episode, temperature) - torch.tensor(row.logprobs))[mask].abs().max()
        assert gap < 1e-4
        assert set(torch.tensor(row.logprobs)[~mask].tolist()) <= {0.0}
        check_against_what_was_generated(episode, engine.generated[key])


def check_against_what_was_generated(episode: Episode, generated: Sequence[Generated]) -> None:
    """The row is the last view and what was said to it, the model's ids as they came; the mask is 1 exactly on
    the turns from which the views have only grown since."""
    row = episode.row
    ids = (*row.prompt_ids, *row.completion_ids)
    whole = [(*turn.view, *turn.completion.token_ids) for turn in generated]
    assert ids == whole[-1]
    assert len(generated) == len(episode.turns)
    first_trained = max(
        (i for i in range(1, len(whole)) if generated[i].view[: len(whole[i - 1])] != whole[i - 1]), default=0
    )
    assert (first_trained > 0) == (episode.truncated_turns > 0)
    expected = [0] * len(ids)
    logprobs = [0.0] * len(ids)
    for turn in generated[first_trained:]:
        start, end = len(turn.view), len(turn.view) + len(turn.completion.token_ids)
        expected[start:end] = [1] * (end - start)
        logprobs[start:end] = turn.completion.logprobs
    assert row.env_mask == expected[len(row.prompt_ids) :]
    assert row.logprobs == logprobs[len(row.prompt_ids) :]
    position = len(row.prompt_ids)
    for turn in generated[episode.truncated_turns :]:
        position = find(ids, turn.completion.token_ids, position) + len(turn.completion.token_ids)
    assert position == len(ids), "the recent turns are there, in order, up to the last one"


def find(ids: Sequence[int], part: Sequence[int], start: int) -> int:
    return next(i for i in range(start, len(ids)) if tuple(ids[i : i + len(part)]) == tuple(part))


def test_a_shorter_context_of_the_engine_is_kept_to_as_if_it_had_been_the_budgets(
    chat: ChatFormat, model: Qwen3ForCausalLM, environments: LocalEnvironments
) -> None:
    context = 400

    def play(budget: TokenBudget) -> list[Episode]:
        engine = HFEngine(model, stop_ids=chat.stop_ids, pad_id=0, linger_s=FOREVER, max_context=context)
        client = RolloutClient(engine, environments, chat, settings_with(budget=budget))
        return asyncio.run(client.play(requests_for(8)))

    found = play(BUDGET)
    assert found == play(replace(BUDGET, max_context=context))
    assert not any(episode.outcome is Outcome.FAILED for episode in found)
    assert any(episode.truncated_turns for episode in found)


async def test_ids_are_kept_as_they_were_generated(
    tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, inline: InlineEnvironments
) -> None:
    """A spelling that the tokenizer itself would never choose survives."""
    end = chat.stop_ids[0]
    spelled = [tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "ANSWER"]
    (two,) = tokenizer("2", add_special_tokens=False)["input_ids"]
    (space,) = tokenizer(" ", add_special_tokens=False)["input_ids"]
    ids = [*spelled, space, two, end]
    assert ids != chat.renderer.turn_ids("ANSWER 2")
    engine = SimulatedEngine(lambda _: ids, stop_ids=chat.stop_ids)
    (episode,) = await RolloutClient(engine, inline, chat, settings_with()).play(requests_for(1))
    assert episode.correct
    assert episode.row.completion_ids == ids
    assert len(episode.row.logprobs) == len(ids)


# What an episode says and hears


async def test_an_episode_from_the_prompt_to_the_last_word(
    pets: Dataset, chat: ChatFormat, environments: LocalEnvironments, environment: SQLEnvironment
) -> None:
    words = ["DESCRIBE pets", "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'", "ANSWER 2"]
    client = RolloutClient(saying(chat, *words), environments, chat, settings_with())
    (episode,) = await client.play(requests_for(1))

    first = environment.reset(question_id="cats")
    prompt = chat.renderer.prompt_ids([{"role": "user", "content": first_message(first)}])
    completion: list[int] = []
    mask: list[int] = []
    lengths = []
    for text in words:
        kind, _, argument = text.partition(" ")
        observation = environment.step(SQLAction(action_type=kind, argument=argument))
        said = chat.renderer.turn_ids(text)
        heard = [] if observation.done else chat.renderer.observation_ids(observation_message(observation), closed=True)
        completion += said + heard
        mask += [1] * len(said) + [0] * len(heard)
        lengths.append(len(said))
    assert episode.outcome is Outcome.CORRECT
    assert [turn.tokens for turn in episode.turns] == lengths
    assert (episode.row.prompt_ids, episode.row.completion_ids, episode.row.env_mask) == (prompt, completion, mask)
    assert [turn.text for turn in episode.turns] == words
    assert all(turn.parseable for turn in episode.turns)
    assert episode.question == pets.question("cats").text
    assert episode.reward > 1.0
    assert episode.policy_versions == (3, 3)


async def test_given_steps_are_taken_and_seen_and_not_trained_on(chat: ChatFormat, inline: InlineEnvironments) -> None:
    words = ["DESCRIBE pets", "QUERY SELECT COUNT(*) FROM pets WHERE species = 'cat'", "ANSWER 2"]
    given = [SQLAction(action_type=kind, argument=argument) for kind, _, argument in (w.partition(" ") for w in words)]
    engine = WatchedEngine(saying(chat, *words[2:]))
    client = RolloutClient(engine, inline, chat, settings_with())
    (guided,) = await client.play([replace(requests_for(1)[0], given=tuple(given[:2]))])
    (alone,) = await RolloutClient(saying(chat, *words), inline, chat, settings_with()).play(requests_for(1))

    assert guided.outcome is Outcome.CORRECT
    assert guided.given_steps == 2
    assert [turn.reward for turn in guided.turns] == [turn.reward for turn in alone.turns], "they are really taken"
    assert guided.row.completion_ids == alone.row.completion_ids
    last = len(chat.renderer.turn_ids(words[2]))
    assert sum(guided.row.env_mask) == sum(guided.row.env_mask[-last:]) == last
    (turn,) = engine.generated[0]
    assert guided.row.logprobs == [0.0] * (len(guided.row.logprobs) - last) + list(turn.completion.logprobs)
    assert turn.view == (*guided.row.prompt_ids, *guided.row.completion_ids[:-last])
    assert [turn.tokens for turn in guided.turns] == [0, 0, last]
    assert guided.policy_versions == (3, 3), "of the policy's own turns"


async def test_the_policy_goes_on_where_a_given_step_has_no_room(chat: ChatFormat, inline: InlineEnvironments) -> None:
    long = SQLAction(action_type="QUERY", argument="SELECT COUNT(*) FROM pets WHERE " + " AND ".join(["1"] * 40))
    given = (SQLAction(action_type="DESCRIBE", argument="pets"), long)
    client = RolloutClient(saying(chat, "ANSWER 2"), inline, chat, settings_with())
    (episode,) = await client.play([replace(requests_for(1)[0], given=given)])
    assert episode.given_steps == 1
    assert [turn.text for turn in episode.turns] == ["DESCRIBE pets", "ANSWER 2"]


async def test_a_turn_that_the_limit_cut_is_closed_before_the_reply(
    chat: ChatFormat, environments: LocalEnvironments
) -> None:
    engine = WatchedEngine(saying(chat, "SAMPLE pets", "ANSWER 2", finish=FinishReason.LENGTH))
    (episode,) = await RolloutClient(engine, environments, chat, settings_with()).play(requests_for(1))
    first, second = engine.generated[0]
    said = first.completion.token_ids
    assert chat.stop_ids[0] not in said
    reply = second.view[len(first.view) + len(said) :]
    heard = chat.renderer.observation_ids(episode.turns[0].result, closed=False)
    assert reply == tuple(heard)
    assert reply[0] == chat.stop_ids[0]


async def test_a_row_that_is_full_ends_the_episode(chat: ChatFormat, inline: InlineEnvironments) -> None:
    settings = RolloutSettings(TokenBudget(max_completion=8, max_context=1_024, max_turn=16))
    engine = WatchedEngine(saying(chat, "DESCRIBE pets", "ANSWER 2"))
    (episode,) = await RolloutClient(engine, inline, chat, settings).play(requests_for(1))
    assert episode.outcome is Outcome.OUT_OF_TOKENS
    assert episode.row.completion_ids == chat.renderer.turn_ids("DESCRIBE pets"), "it ends on the model's words"
    assert not episode.correct


async def test_a_prompt_that_fills_the_context_is_a_failure_that_names_the_fix(
    chat: ChatFormat, inline: InlineEnvironments
) -> None:
    settings = RolloutSettings(TokenBudget(max_completion=100, max_context=10, max_turn=16), max_failure_share=1.0)
    (episode,) = await RolloutClient(saying(chat), inline, chat, settings).play(requests_for(1))
    assert episode.outcome is Outcome.FAILED
    assert "raise max_completion_length" in episode.failure


# Timings


async def test_every_wait_of_an_episode_has_its_span_in_order(chat: ChatFormat, inline: InlineEnvironments) -> None:
    engine = saying(chat, "SAMPLE pets", "ANSWER 2")
    episodes = await RolloutClient(engine, inline, chat, settings_with(max_concurrency=1)).play(requests_for(2))
    for episode in episodes:
        assert episode.timing is not None
        spans = episode.timing.spans
        assert [span.phase for span in spans] == [
            *(Phase.QUEUE, Phase.ENVIRONMENT, Phase.ENVIRONMENT),
            *(Phase.GENERATION, Phase.ENVIRONMENT, Phase.GENERATION, Phase.JUDGING),
        ]
        moments = [episode.timing.asked, *(t for span in spans for t in (span.start, span.end)), episode.timing.ended]
        assert moments == sorted(moments)
    first, second = (episode.timing for episode in episodes)
    assert first is not None
    assert second is not None
    assert first.ended <= second.started, "the second waited for the place of the first"


async def test_a_failed_episode_has_its_times_up_to_the_failure(chat: ChatFormat, inline: InlineEnvironments) -> None:
    async def breaks(call: str, question_id: str) -> None:
        if call == "step":
            raise DataError("the database is gone")

    watched = WatchedEnvironments(inline, breaks)
    (failed,) = await RolloutClient(saying(chat, "ANSWER 2"), watched, chat, settings_with()).play(requests_for(1))
    assert failed.outcome is Outcome.FAILED
    assert failed.timing is not None
    assert [span.phase for span in failed.timing.spans][-2:] == [Phase.GENERATION, Phase.JUDGING]


# No barrier


async def test_no_episode_waits_for_the_sql_of_another(
    model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    others_done = asyncio.Event()
    ended: list[Episode] = []

    async def hold(call: str, question_id: str) -> None:
        if call == "step" and question_id == "species":
            await others_done.wait()

    def note(episode: Episode) -> None:
        ended.append(episode)
        if len(ended) == 6:
            others_done.set()

    engine = engine_of(model, chat)
    client = RolloutClient(engine, WatchedEnvironments(environments, hold), chat, settings_with())
    episodes = await client.play(requests_for(8), note)
    await engine.aclose()
    assert [e.question_id for e in ended[6:]] == ["species", "species"]
    assert all(e.outcome is not Outcome.FAILED for e in episodes), "nobody met a deadline"


async def test_no_episode_waits_for_the_generation_of_another(
    model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    others_done = asyncio.Event()
    ended: list[Episode] = []

    async def hold(key: int) -> None:
        if key == 0:
            await others_done.wait()

    def note(episode: Episode) -> None:
        ended.append(episode)
        if len(ended) == 3:
            others_done.set()

    requests = requests_for(4)
    engine = WatchedEngine(engine_of(model, chat), hold)
    client = RolloutClient(engine, environments, chat, settings_with(temperature=0.7))
    await client.play(requests, note)
    await engine.aclose()
    assert ended[-1].episode_id == f"{requests[0].question_id}#{requests[0].seed}"


@pytest.mark.parametrize("concurrency", [3, 50])
async def test_the_number_in_flight_is_bounded_and_reached(
    concurrency: int, model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    engine = engine_of(model, chat)
    watched = WatchedEnvironments(environments)
    await RolloutClient(engine, watched, chat, settings_with(max_concurrency=concurrency)).play(requests_for(10))
    await engine.aclose()
    assert watched.most_open == min(concurrency, 10)
    assert watched.opened == watched.closed == 10


# Determinism


def shuffled(seed: int) -> Hook:
    """A hook that lets the calls of different episodes overtake each other."""
    rng = random.Random(seed)

    async def before(call: str, question_id: str) -> None:
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)

    return before


def test_the_same_requests_give_the_same_episodes_however_the_environments_are_timed(
    pets: Dataset, model: Qwen3ForCausalLM, chat: ChatFormat
) -> None:
    def play(threads: int, hook: Hook | None = None) -> list[Episode]:
        environments = LocalEnvironments(pets, threads=threads)

        async def run() -> list[Episode]:
            engine = engine_of(model, chat, linger_s=FOREVER)
            watched = WatchedEnvironments(environments, hook)
            client = RolloutClient(engine, watched, chat, RolloutSettings(NARROW))
            episodes = await client.play(requests_for(12))
            await engine.aclose()
            return episodes

        try:
            return asyncio.run(run())
        finally:
            environments.close()

    once = play(threads=1)
    assert play(threads=4) == once
    assert play(threads=2, hook=shuffled(1)) == once


async def test_the_seed_of_a_request_decides_its_sampling(
    model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    engine = engine_of(model, chat, linger_s=FOREVER)
    client = RolloutClient(engine, environments, chat, settings_with())
    requests = [EpisodeRequest("cats", seed) for seed in (1, 2, 3, 1)]
    first, *others, again = await client.play(requests)
    await engine.aclose()
    assert again.row.completion_ids == first.row.completion_ids
    assert len({tuple(e.row.completion_ids) for e in (first, *others)}) == 3


async def test_every_turn_has_a_seed_of_its_own(chat: ChatFormat, inline: InlineEnvironments) -> None:
    engine = WatchedEngine(saying(chat, "SAMPLE pets", "SAMPLE owners", "ANSWER 2"))
    await RolloutClient(engine, inline, chat, settings_with()).play(requests_for(5))
    seeds = [turn.seed for turns in engine.generated.values() for turn in turns]
    assert len(set(seeds)) == len(seeds) == 15


def test_seeds_are_the_same_everywhere() -> None:
    assert derive_seed(0) == 4_761_921_975_702_974_394
    assert derive_seed(1, 2, "cats") == 7_512_699_289_128_166_144


def test_seeds_fit_and_differ_by_every_part_and_its_place() -> None:
    seeds = {derive_seed(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1, 23) != derive_seed(12, 3)


# Cancellation


async def test_a_cancelled_rollout_leaves_nothing_behind(
    model: Qwen3ForCausalLM, chat: ChatFormat, environments: LocalEnvironments
) -> None:
    stuck = asyncio.Event()

    async def hold(call: str, question_id: str) -> None:
        if call == "step" and question_id == "species":
            stuck.set()
            await never()

    engine = WatchedEngine(engine_of(model, chat))
    watched = WatchedEnvironments(environments, hold)
    client = RolloutClient(engine, watched, chat, settings_with(max_concurrency=6))
    playing = asyncio.create_task(client.play(requests_for(16)))
    await stuck.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert watched.opened == watched.closed > 0
    assert engine.opened == engine.closed > 0

    watched.before = None
    assert len(await client.play(requests_for(4))) == 4, "the engine and the environments are as good as new"
    await engine.aclose()


# Garbage collection


def test_garbage_collection_is_as_before_afterwards_whatever_happens() -> None:
    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold() == GC_THRESHOLDS != before
            assert gc.get_freeze_count() > 0
            raise KeyError

    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_garbage_of_a_rollout_is_collected_afterwards() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    with rare_collections():
        Cycle()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Cycle]


def test_rollouts_that_overlap_leave_garbage_collection_as_it_was() -> None:
    before = gc.get_threshold()
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == GC_THRESHOLDS
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
