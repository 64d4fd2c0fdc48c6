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
   The share is one of the batch of all ranks, and ranks do not wait for each other in a rollout: the caller that
   gathers the batch judges all of it (`failures.py`). One failed episode alone never ends a run.
6. Determinism. An episode's sampling seeds depend on the run's seed, the round and the episode's place in it
   alone, never on timing.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from env_server.client.connection import SPARE_FILES, allow_open_files
from env_server.dataset import Question
from env_server.errors import SQLEnvError
from env_server.types import ActionType, SQLAction, SQLObservation
from inference.engine import Completion, ContextOverflowError, Engine, EngineError, Sampling, Session
from trainer.chat.actions import ParsedAction
from trainer.chat.format import ChatFormat
from trainer.chat.prompts import first_message
from trainer.rollout.environments import Environments, EnvironmentSession
from trainer.rollout.episodes import Episode, Outcome, TokenRow, Turn, outcome_of, turn_of
from trainer.rollout.failures import Failures, rollout_error_alone
from trainer.rollout.timing import EpisodeTimer, Phase
from trainer.rollout.transcript import TokenBudget, Transcript, masked_row
from trainer.rollout.turns import GeneratedTurn, generate_turn

logger = logging.getLogger(__name__)

SOCKETS = 2
"""Of an episode in flight: a session, and a request to an inference server."""
GC_THRESHOLDS = (500, 5, 800)
"""New objects before the youngest generation is looked at, and how many such looks before the older ones are.

Small looks, often, since each sees every id of the prompts that were made meanwhile. Measured with 2,000 episodes in
flight: at 500 objects the event loop is 16 to 20 ms late at the 99th percentile, at 2,000 it is 47 to 49 ms, with as
much processor time; the full looks that come by Python's own numbers took 500 ms each.
"""
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

    @property
    def episode_id(self) -> str:
        """The episode's name."""
        return f"{self.question_id}#{self.seed}"

    def episode(self, outcome: Outcome, row: TokenRow, **fields: Any) -> Episode:
        """Return the episode as it ended; `fields` are further ones of `Episode`."""
        usual = {"question": "", "turns": (), "gold_sql": self.gold_sql}
        return Episode(
            episode_id=self.episode_id,
            question_id=self.question_id,
            db_id=self.db_id,
            hardness=self.hardness,
            family=self.family,
            outcome=outcome,
            row=row,
            **usual | fields,
        )


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


@dataclass(slots=True)
class EpisodeContext:
    """What an episode is played with. `prompting` is shared by the episodes of a batch: prompts are made one by one."""

    request: EpisodeRequest
    environment: EnvironmentSession
    engine: Session
    chat: ChatFormat
    settings: RolloutSettings
    timer: EpisodeTimer
    prompting: asyncio.Lock
    prompt_tokens: int = 0
    """Tokens that the engine was given so far, each prompt counted."""

    async def reset(self) -> SQLObservation:
        """Start the episode."""
        with self.timer.waiting(Phase.ENVIRONMENT):
            async with deadline(self.settings.environment_timeout_s, "the environment did not answer a reset"):
                return await self.environment.reset(self.request.question_id, self.request.episode_id)

    async def transcript(self, prompt_ids: Callable[[], list[int]]) -> Transcript:
        """Begin the transcript."""
        async with self.prompting:
            # Thousands of resets may come back together. One prompt a round of the event loop: no other episode waits.
            await asyncio.sleep(0)
            return Transcript(prompt_ids(), self.settings.budget)

    async def generate(self, transcript: Transcript, number: int) -> GeneratedTurn | None:
        """Generate turn `number` and append it to the transcript; None when there is no room for one."""
        limit = self.settings.budget.max_context

        async def generate(said: tuple[int, ...], tokens: int, part: int) -> Completion:
            prompt = (*transcript.view, *said)
            sampling = Sampling(max_new_tokens=tokens, temperature=self.settings.temperature)
            seed = derive_seed(self.request.seed, number, *([part] if part else []))
            async with deadline(self.settings.engine_timeout_s, "the engine did not finish a turn"):
                completion = await self.engine.generate(prompt, sampling, seed)
            self.prompt_tokens += len(prompt)
            return completion

        while room := transcript.room():
            try:
                with self.timer.waiting(Phase.GENERATION):
                    turn = await generate_turn(generate, self.chat, self.settings.budget.max_turn, room)
            except ContextOverflowError as error:
                if error.allowed >= limit:
                    raise
                # A server may have been started with less than the model can do.
                limit = error.allowed
                transcript.limit_context(limit)
            else:
                transcript.add_turn(turn.token_ids, turn.logprobs)
                return turn
        return None

    async def step(self, action: SQLAction) -> SQLObservation:
        """Take an action."""
        with self.timer.waiting(Phase.JUDGING if action.action_type == ActionType.ANSWER else Phase.ENVIRONMENT):
            async with deadline(self.settings.environment_timeout_s, "the environment did not answer a step"):
                return await self.environment.step(action)


PlayEpisode = Callable[[EpisodeContext], Awaitable[Episode]]
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
        prompting = asyncio.Lock()

        async def play_one(index: int, request: EpisodeRequest) -> Episode:
            timer = EpisodeTimer(asyncio.get_running_loop().time)
            async with slots:
                timer.started()
                episode = await self._play_or_fail(index, request, timer, prompting)
            if episode.failed:
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
        self, index: int, request: EpisodeRequest, timer: EpisodeTimer, prompting: asyncio.Lock
    ) -> Episode:
        """Turn the failures that a machine can have into a masked episode; anything else is a bug and raises."""
        try:
            async with AsyncExitStack() as stack:
                with timer.waiting(Phase.ENVIRONMENT):
                    async with deadline(self._settings.environment_timeout_s, "the environment opened no session"):
                        environment = await stack.enter_async_context(self._environments.session())
                    async with deadline(self._settings.engine_timeout_s, "the engine opened no session"):
                        engine = await stack.enter_async_context(self._engine.session(index))
                context = EpisodeContext(request, environment, engine, self._chat, self._settings, timer, prompting)
                episode = await self._play_episode(context)
        except (EngineError, SQLEnvError, TimeoutError, OSError) as error:
            row = masked_row(self._chat.prompt_ids(request.question_id), self._chat.stop_ids[0])
            episode = request.episode(Outcome.FAILED, row, failure=f"{type(error).__name__}: {error}", gold_sql="")
        return replace(episode, timing=timer.timing())


async def explore(context: EpisodeContext, on_turn: Callable[[Turn], None] = lambda _: None) -> Episode:
    """Play an episode of the four actions, from reset to its row; `on_turn` is called after each turn."""
    chat = context.chat
    turns: list[Turn] = []
    observation = await context.reset()
    opening = first_message(observation)
    transcript = await context.transcript(lambda: chat.prompt_ids(opening))

    async def act(token_ids: Sequence[int], parsed: ParsedAction, *, closed: bool, **played: int) -> SQLObservation:
        """Take the action of the turn that was appended last, and append the reply unless the episode is over."""
        observation = await context.step(parsed.action)
        turns.append(turn_of(chat.text_of(token_ids), parsed.action, observation, parsed.parseable, **played))
        on_turn(turns[-1])
        if not observation.done:
            transcript.add_reply(chat.reply_ids(observation, closed=closed))
        return observation

    for action in context.request.given:
        ids = tuple(chat.turn_ids(action))
        # Where one finds no room, the policy goes on from the one before, in every episode of the question alike.
        if observation.done or len(ids) > transcript.room():
            break
        transcript.add_turn(ids, (None,) * len(ids))
        observation = await act(ids, ParsedAction(action, parseable=True), closed=True, tokens=0)
    given = len(turns)
    while not observation.done and (turn := await context.generate(transcript, len(turns))):
        parsed = chat.parse(chat.text_of(turn.token_ids))
        observation = await act(
            turn.token_ids, parsed, closed=turn.closed, policy_version=turn.policy_version, tokens=turn.tokens
        )
    if not turns:
        raise SQLEnvError(
            "the prompt leaves no room for a turn; raise max_completion_length or the model's context, or lower "
            "few_shot"
        )
    return context.request.episode(
        outcome_of(observation),
        transcript.row(),
        question=observation.question,
        turns=tuple(turns),
        prompt_tokens=context.prompt_tokens,
        truncated_turns=transcript.dropped_turns,
        given_steps=given,
    )


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


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely while the block lasts, then as before; of blocks that overlap, while the first one lasts.

    A full collection looks at every object of the process, torch's and transformers' among them, and at each number of
    each list of token ids: half a second and more, in which no episode goes on. So what was there before is left out,
    and collections come when there is much to find.
    """
    before = gc.get_threshold()
    if before == GC_THRESHOLDS:
        yield
        return
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
