"""The rollout client: plays many episodes at once against environments and an engine.

Invariants:
1. Exactly once. Every request yields exactly one episode, in order. A failed one is an episode too: masked,
   with a typed reason, counted. Nothing is dropped silently.
2. Token-exact. len(completion_ids) == len(logprobs) == len(env_mask); each trained token's logprob was computed
   by the policy under exactly the prefix that the row shows. Ids are only appended (`transcript.py`).
3. Budget. A row never exceeds its token budgets, nor the context of the server that generates; when it is full the
   oldest turns go, the recent ones stay.
4. No barrier. One asyncio task per episode; none waits for another one's SQL, generation or reset. The number
   in flight is bounded by `max_concurrency`.
5. Survival. Every wait for an answer has a deadline. As soon as more than `max_failure_share` of a batch's episodes
   have failed here, the rollout raises RolloutError with the causes instead of handing noise to the trainer.
   The share is one of the batch of all ranks, and ranks do not wait for each other in a rollout: whoever gathers the
   batch judges all of it (`failures.py`). One failed episode alone never ends a run.
6. Determinism. An episode's sampling seeds depend on the run's seed, the round and the episode's place in it
   alone, never on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from env_server.dataset import Question
from env_server.errors import SQLEnvError
from env_server.open_files import SPARE_FILES, allow_open_files
from env_server.types import ActionType, SQLAction, SQLObservation
from inference.engine import Completion, ContextOverflowError, Engine, EngineError, Sampling, Session
from trainer.chat.actions import ParsedAction
from trainer.chat.format import ChatFormat
from trainer.chat.prompts import first_message
from trainer.rollout.collector import rare_collections
from trainer.rollout.environments import Environments, EnvironmentSession
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn, outcome_of, turn_of
from trainer.rollout.failures import Failures, rollout_error_alone
from trainer.rollout.timings import Stopwatch, Wait
from trainer.rollout.transcript import TokenBudget, Transcript, masked_row
from trainer.rollout.turns import generate_turn

logger = logging.getLogger(__name__)

SOCKETS = 2
"""Of an episode in flight: a session, and a request to an inference server."""
LONGEST_TURN_S = 3_600.0
"""Hundreds of long turns at once, of a policy that is too large for its machine."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How episodes are played."""

    budget: TokenBudget
    temperature: float = 1.0
    """0 plays greedily."""
    max_concurrency: int = 64
    """Episodes in flight, of all batches together."""
    max_failure_share: float = 0.1
    """Share of failed episodes in a batch of all ranks above which a rollout raises."""
    engine_timeout_s: float = LONGEST_TURN_S
    """Deadline of one generated turn, for an engine that has none of its own: only the engine knows slow from dead."""
    environment_timeout_s: float = 60.0
    """Deadline of opening a session, of a reset and of a step; far above the environment's own for a query."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to play. `seed` decides all of its sampling. The rest is copied to the episode.

    `given`: actions that are taken first, in the policy's place; it goes on from there.
    """

    question_id: str
    seed: int
    db_id: str = ""
    hardness: str = ""
    family: str = ""
    given: tuple[SQLAction, ...] = ()
    gold_sql: str = ""


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from its parts, the same on every machine and in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def request_for(question: Question, seed: int) -> EpisodeRequest:
    """The request to play a question."""
    return EpisodeRequest(
        question_id=question.question_id,
        seed=seed,
        db_id=question.db_id,
        hardness=question.hardness.value,
        family=question.family,
        gold_sql=question.gold_sql,
    )


@dataclass(frozen=True, slots=True)
class Flight:
    """What an episode is played with. `begin` is shared by the episodes of a batch: prompts are made one by one."""

    request: EpisodeRequest
    environment: EnvironmentSession
    engine: Session
    chat: ChatFormat
    settings: RolloutSettings
    watch: Stopwatch
    begin: asyncio.Lock

    @property
    def episode_id(self) -> str:
        """The episode's name."""
        return f"{self.request.question_id}#{self.request.seed}"

    async def reset(self) -> SQLObservation:
        """Start the episode."""
        with self.watch.waiting(Wait.RESET):
            async with deadline(self.settings.environment_timeout_s, "the environment did not answer a reset"):
                return await self.environment.reset(self.request.question_id, self.episode_id)

    async def generate(self, prompt: tuple[int, ...], tokens: int, seed: int) -> Completion:
        """Generate at most so many tokens."""
        sampling = Sampling(max_new_tokens=tokens, temperature=self.settings.temperature)
        async with deadline(self.settings.engine_timeout_s, "the engine did not finish a turn"):
            return await self.engine.generate(prompt, sampling, seed)

    async def step(self, action: SQLAction, number: int) -> SQLObservation:
        """Take the action of turn `number`."""
        is_answer = action.action_type == ActionType.ANSWER
        with self.watch.waiting(Wait.ANSWER if is_answer else Wait.STEP, number):
            async with deadline(self.settings.environment_timeout_s, "the environment did not answer a step"):
                return await self.environment.step(action)

    def episode(
        self,
        question: str,
        outcome: Outcome,
        turns: Sequence[Turn],
        row: TokenRow,
        prompt_tokens: int,
        truncated_turns: int = 0,
        given_steps: int = 0,
    ) -> Episode:
        """Return the episode as it ended."""
        return Episode(
            episode_id=self.episode_id,
            question_id=self.request.question_id,
            db_id=self.request.db_id,
            question=question,
            hardness=self.request.hardness,
            family=self.request.family,
            outcome=outcome,
            turns=tuple(turns),
            row=row,
            truncated_turns=truncated_turns,
            given_steps=given_steps,
            prompt_tokens=prompt_tokens,
            gold_sql=self.request.gold_sql,
        )


PlayEpisode = Callable[[Flight], Awaitable[Episode]]
"""Plays one episode, from reset to its row."""


class RolloutClient:
    """Plays batches of episodes, several at once where the trainer asks ahead; keeps no state between them.

    `play_episode` is the protocol of an episode: to explore, by default.
    """

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        chat: ChatFormat,
        settings: RolloutSettings,
        play_episode: PlayEpisode | None = None,
    ) -> None:
        self._play_episode = play_episode or explore
        self._engine = engine
        self._environments = environments
        self._chat = chat
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free = asyncio.Semaphore(settings.max_concurrency)
        needed = SOCKETS * settings.max_concurrency + SPARE_FILES
        if (allowed := allow_open_files(needed)) < needed:
            logger.warning(
                "--max_concurrency %d may need %d open files, and this process may have %d: raise its limit (ulimit "
                "-Hn), or lower --max_concurrency",
                settings.max_concurrency,
                needed,
                allowed,
            )

    @property
    def max_failure_share(self) -> float:
        """The share of failed episodes that a batch of all ranks may have."""
        return self._settings.max_failure_share

    async def play(
        self,
        requests: Sequence[EpisodeRequest],
        on_episode: Callable[[Episode], None] | None = None,
        *,
        failures: Failures | None = None,
        first: int = 0,
    ) -> list[Episode]:
        """Play every request and return the episodes in the same order.

        `on_episode` is called as each one ends (progress). A batch that other ranks, or further calls, play a part of
        has `failures` of its own, and `first` numbers the requests of this call on. Raises RolloutError; anything that
        is not a failure of the infrastructure is a bug and comes out in an ExceptionGroup.
        """
        failures = failures or Failures(len(requests), self.max_failure_share)
        slots = self._slots()
        begin = asyncio.Lock()

        async def play_one(index: int, request: EpisodeRequest) -> Episode:
            watch = Stopwatch(asyncio.get_running_loop().time)
            async with slots:
                episode = await self._play_or_fail(index, request, watch, begin)
            if episode.outcome is Outcome.FAILED:
                failures.add(episode.failure)
            if on_episode is not None:
                on_episode(episode)
            return episode

        with rare_collections(), rollout_error_alone():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(play_one(first + i, request)) for i, request in enumerate(requests)]
        return [task.result() for task in tasks]

    def _slots(self) -> asyncio.Semaphore:
        """What bounds the episodes in flight, of all batches that are played at once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._free = loop, asyncio.Semaphore(self._settings.max_concurrency)
        return self._free

    async def _play_or_fail(
        self, index: int, request: EpisodeRequest, watch: Stopwatch, begin: asyncio.Lock
    ) -> Episode:
        """Turn the failures that a machine can have into a masked episode; anything else is a bug and raises."""
        watch.started()
        try:
            episode = await self._play(index, request, watch, begin)
        except (EngineError, SQLEnvError, TimeoutError, OSError) as error:
            episode = _failed_episode(request, self._chat, f"{type(error).__name__}: {error}")
        return replace(episode, timing=watch.timing())

    async def _play(self, index: int, request: EpisodeRequest, watch: Stopwatch, begin: asyncio.Lock) -> Episode:
        async with AsyncExitStack() as stack:
            with watch.waiting(Wait.SESSION):
                async with deadline(self._settings.environment_timeout_s, "the environment opened no session"):
                    environment = await stack.enter_async_context(self._environments.session())
                async with deadline(self._settings.engine_timeout_s, "the engine opened no session"):
                    engine = await stack.enter_async_context(self._engine.session(index))
            flight = Flight(request, environment, engine, self._chat, self._settings, watch, begin)
            return await self._play_episode(flight)


async def explore(flight: Flight, on_turn: Callable[[Turn], None] = lambda _: None) -> Episode:
    """Play an episode of the four actions, from reset to its row; `on_turn` is called after each turn."""
    return await _Explorer(flight, on_turn).play()


class _Explorer:
    """One episode that explores."""

    def __init__(self, flight: Flight, on_turn: Callable[[Turn], None]) -> None:
        self._flight = flight
        self._on_turn = on_turn
        self._turns: list[Turn] = []
        self._given = 0
        self._prompt_tokens = 0

    async def play(self) -> Episode:
        """Play to the end."""
        flight = self._flight
        budget = flight.settings.budget
        observation = await flight.reset()
        async with flight.begin:
            # Thousands of resets may come back together. One prompt a round of the event loop: nobody else is held up.
            await asyncio.sleep(0)
            transcript = Transcript(flight.chat.prompt_ids(first_message(observation)), budget)
        for action in flight.request.given:
            ids = tuple(flight.chat.turn_ids(action))
            # Where one finds no room, the policy goes on from the one before, in every episode of the question alike.
            if observation.done or len(ids) > transcript.room():
                break
            transcript.add_turn(ids, (None,) * len(ids))
            observation = await self._act(transcript, ids, ParsedAction(action, parseable=True), closed=True)
            self._given += 1
        limit = budget.max_context
        while not observation.done and (room := transcript.room()):
            try:
                observation = await self._take_turn(transcript, room)
            except ContextOverflowError as error:
                if error.allowed >= limit:
                    raise
                # A server may have been started with less than the model can do.
                limit = error.allowed
                transcript.limit_context(limit)
        if not self._turns:
            raise SQLEnvError(
                "the prompt leaves no room for a turn; raise max_completion_length or the model's context, or lower "
                "few_shot"
            )
        return flight.episode(
            observation.question,
            outcome_of(observation),
            self._turns,
            transcript.row(),
            self._prompt_tokens,
            transcript.dropped_turns,
            self._given,
        )

    async def _take_turn(self, transcript: Transcript, room: int) -> SQLObservation:
        """Generate, act, and append the reply unless the episode is over (a row ends on the model's words)."""
        flight, chat, number = self._flight, self._flight.chat, len(self._turns)
        view = transcript.view

        async def generate(said: tuple[int, ...], tokens: int, part: int) -> Completion:
            seed = derive_seed(flight.request.seed, number, *([part] if part else []))
            prompt = (*view, *said) if said else view
            completion = await flight.generate(prompt, tokens, seed)
            self._prompt_tokens += len(prompt)
            return completion

        with flight.watch.waiting(Wait.GENERATION, number):
            turn = await generate_turn(generate, chat, flight.settings.budget.max_turn, room)
        transcript.add_turn(turn.token_ids, turn.logprobs)
        parsed = chat.parse(chat.text_of(turn.token_ids))
        return await self._act(
            transcript, turn.token_ids, parsed, closed=turn.closed, version=turn.policy_version, tokens=turn.tokens
        )

    async def _act(
        self,
        transcript: Transcript,
        token_ids: Sequence[int],
        parsed: ParsedAction,
        *,
        closed: bool,
        version: int = 0,
        tokens: int = 0,
    ) -> SQLObservation:
        """Take the action of the turn that was appended last, and append the reply."""
        chat = self._flight.chat
        observation = await self._flight.step(parsed.action, len(self._turns))
        text = chat.text_of(token_ids)
        played = turn_of(text, parsed.action, observation, parsed.parseable, version, tokens)
        self._turns.append(played)
        self._on_turn(played)
        if not observation.done:
            transcript.add_reply(chat.reply_ids(observation, closed=closed))
        return observation


@asynccontextmanager
async def deadline(seconds: float, complaint: str) -> AsyncIterator[None]:
    """Bound a wait; the TimeoutError says what did not happen, and in how long."""
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TimeoutError(f"{complaint} within {seconds:g} s") from error


def _failed_episode(request: EpisodeRequest, chat: ChatFormat, failure: str) -> Episode:
    prompt_ids = chat.prompt_ids(request.question_id)
    return Episode(
        episode_id=f"{request.question_id}#{request.seed}",
        question_id=request.question_id,
        db_id=request.db_id,
        question="",
        hardness=request.hardness,
        family=request.family,
        outcome=Outcome.FAILED,
        turns=(),
        row=masked_row(prompt_ids, chat.stop_ids[0]),
        failure=failure,
    )
