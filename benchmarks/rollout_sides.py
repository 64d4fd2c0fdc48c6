"""The two sides of `rollout.py`: our rollout client and TRL's own loop, on the same episodes.

Both play `SQLText` actions on environments that answer late. An episode has as many turns as its number says, whatever
the policy writes: an ANSWER before that shows the next table, and the last turn is an ANSWER. TRL's loop is TRL's code
as it is installed, from the resets on; it generates over `vllm_generation`, TRL's seam for that, here TRL's own client
of a vLLM server, or one of a simulated server that also asks for all of a turn at once and waits.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import requests
from datasets import Dataset as HubDataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

from env_server.dataset import Dataset, Question
from env_server.environment import EnvironmentFactory
from env_server.settings import EnvSettings
from env_server.types import ActionType, SQLAction, SQLObservation, SQLState
from inference.engine import Completion, Engine, Sampling, Session
from trainer.chat.format import ChatFormat
from trainer.chat.prompts import SYSTEM_PROMPT
from trainer.chat.tools import text_as_calls
from trainer.rollout.client import EpisodeRequest, RolloutClient, RolloutSettings, request_for
from trainer.rollout.environments import EnvironmentSession, LocalEnvironments
from trainer.rollout.players import PlayedEnvironment
from trainer.rollout.transcript import TokenBudget
from trainer.rollout.trl_environments import TRL_REWARDS, SQLText

GROUP = 8
TURN_TOKENS = 64
ROUND = 1_000_000
"""Seeds of a round: the rest of a seed is the episode's number."""
SPREAD = 0.5
"""Of the logarithm of a delay."""


class Played(NamedTuple):
    """What a side made of a batch."""

    seconds: float
    turns: int
    tokens: int


@dataclass(slots=True)
class Pace:
    """How late environments answer, on the average, and how many turns episodes have."""

    mean_s: float = 0.0
    shortest: int = 3
    longest: int = 7

    def delay_s(self, number: int, call: int) -> float:
        """Return the delay of an episode's call; 0 is the reset. The same on both sides."""
        if not self.mean_s:
            return 0.0
        drawn = random.Random(f"{number}/{call}").lognormvariate(-(SPREAD**2) / 2, SPREAD)
        return self.mean_s * drawn

    def turns(self, number: int) -> int:
        """Return how many turns an episode has."""
        return random.Random(f"turns of {number}").randint(self.shortest, self.longest)


class Steering:
    """Gives an episode its length."""

    def __init__(self, pace: Pace, number: int) -> None:
        self.number = number
        self._pace = pace
        self._length = pace.turns(number)
        self._tables: Iterator[str] = iter(())
        self.calls = 0

    def begin(self, observation: SQLObservation) -> SQLObservation:
        """An episode begins."""
        self._tables = cycle(observation.schema_info.splitlines()[0].removeprefix("Tables: ").split(", "))
        self.calls = 0
        return observation

    def steer(self, action: SQLAction) -> SQLAction:
        """Return the action to take instead."""
        self.calls += 1
        answers = action.action_type == ActionType.ANSWER
        if self.calls == self._length:
            return action if answers and action.argument else SQLAction(action_type=ActionType.ANSWER, argument="0")
        return SQLAction(action_type=ActionType.SAMPLE, argument=next(self._tables)) if answers else action

    @property
    def delay_s(self) -> float:
        """Of the call that is made."""
        return self._pace.delay_s(self.number, self.calls)


class LateEnvironments:
    """Environments of this process that answer late; the episode's number is in its seed."""

    def __init__(self, inner: LocalEnvironments, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a session."""
        async with self._inner.session() as session:
            yield _LateSession(session, self._pace)

    def close(self) -> None:
        """Release everything."""
        self._inner.close()


class _LateSession:
    def __init__(self, inner: EnvironmentSession, pace: Pace) -> None:
        self._inner = inner
        self._pace = pace
        self._steering = Steering(pace, 0)

    async def reset(self, question_id: str, episode_id: str) -> SQLObservation:
        self._steering = Steering(self._pace, int(episode_id.rpartition("#")[2]) % ROUND)
        await _sleep(self._steering.delay_s)
        return self._steering.begin(await self._inner.reset(question_id, episode_id))

    async def step(self, action: SQLAction) -> SQLObservation:
        steered = self._steering.steer(action)
        await _sleep(self._steering.delay_s)
        return await self._inner.step(steered)


async def _sleep(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


class LateEnvironment:
    """The same for TRL's loop, which calls from its own thread and waits."""

    def __init__(self, inner: PlayedEnvironment, pace: Pace, number: int) -> None:
        self._inner = inner
        self._steering = Steering(pace, number)

    def reset(self, *, question_id: str) -> SQLObservation:
        """Start an episode."""
        self._steering.calls = 0
        time.sleep(self._steering.delay_s)
        return self._steering.begin(self._inner.reset(question_id=question_id))

    def step(self, action: SQLAction) -> SQLObservation:
        """Take one action."""
        steered = self._steering.steer(action)
        time.sleep(self._steering.delay_s)
        return self._inner.step(steered)

    @property
    def state(self) -> SQLState:
        """The episode's id and step count."""
        return self._inner.state


@dataclass(frozen=True, slots=True)
class Game:
    """What both sides play."""

    dataset: Dataset
    questions: Sequence[Question]
    chat: ChatFormat
    context: int
    pace: Pace
    temperature: float

    @property
    def completion(self) -> int:
        """The most tokens of a row's completion."""
        return self.context * 3 // 4

    def question(self, number: int) -> Question:
        """The question of an episode: groups ask the same one."""
        return self.questions[number // GROUP % len(self.questions)]

    def requests(self, episodes: int, turn: int) -> list[EpisodeRequest]:
        """What our client is asked to play in a round."""
        return [request_for(self.question(number), turn * ROUND + number) for number in range(episodes)]


class OurSide:
    """`RolloutClient`, with an engine that `make_engine` makes anew for each batch."""

    def __init__(self, game: Game, make_engine: Callable[[], Engine]) -> None:
        self._game = game
        self._make_engine = make_engine
        self._environments = LateEnvironments(LocalEnvironments(game.dataset, threads=2), game.pace)

    def play(self, episodes: int, turn: int) -> Played:
        """Play a batch."""
        game, engine = self._game, self._make_engine()
        settings = RolloutSettings(
            TokenBudget(game.completion, game.context, TURN_TOKENS), game.temperature, max_concurrency=episodes
        )
        client = RolloutClient(engine, self._environments, game.chat, settings)
        began = time.perf_counter()
        played = asyncio.run(client.play(game.requests(episodes, turn)))
        seconds = time.perf_counter() - began
        asyncio.run(engine.aclose())
        tokens = sum(sum(each.row.env_mask) for each in played)
        return Played(seconds, sum(len(each.turns) for each in played), tokens)

    def close(self) -> None:
        """Release everything."""
        self._environments.close()


class ServerGeneration(VLLMClient):  # type: ignore[misc]  # TRL carries no types
    """TRL's client of a vLLM server, as `VLLMGeneration` calls it; its `generate` alone is used."""

    def __init__(self, url: str, temperature: float) -> None:
        # Not TRL's own: that asks for vLLM in this process, which it needs for weights.
        self.session = requests.Session()
        self.base_url = url
        self.model = self._get(f"{url}/v1/models")["data"][0]["id"]
        self._temperature = temperature

    def sync_weights(self) -> None:
        """The server has the weights that it was started with."""

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        """Generate once for each prompt; a group of the same ones is asked for once, as TRL does."""
        output = super().generate(
            prompts[::num_generations],
            n=num_generations,
            temperature=self._temperature,
            top_k=-1,
            max_tokens=TURN_TOKENS,
        )
        return None, output["completion_ids"], output["logprobs"], None


class SimulatedGeneration:
    """The same for an engine of this process: all of a turn at once, and the slowest is waited for."""

    def __init__(self, make_engine: Callable[[], Engine], temperature: float) -> None:
        self._make_engine = make_engine
        self._sampling = Sampling(TURN_TOKENS, temperature)
        self._runner = asyncio.Runner()
        self._engine: Engine | None = None
        self._sessions: list[tuple[Session, list[int]]] = []
        """In the order of their rows, each with the ids that its server has in its cache."""

    def begin(self) -> None:
        """A batch begins, with nothing cached."""
        self._runner.run(self._leave())
        self._engine, self._sessions = self._make_engine(), []

    def sync_weights(self) -> None:
        """There are no weights."""

    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        """Generate once for each prompt."""
        done = self._runner.run(self._all(prompts))
        return None, [list(each.token_ids) for each in done], [[[p] for p in each.logprobs] for each in done], None

    def close(self) -> None:
        """Release everything."""
        self._runner.run(self._leave())
        self._runner.close()

    async def _all(self, prompts: list[list[int]]) -> list[Completion]:
        assert self._engine is not None, "begun"
        going_on: list[tuple[Session, list[int]]] = []
        earlier = iter(self._sessions)
        for key, prompt in enumerate(prompts):
            if not self._sessions:
                going_on.append((await self._engine.session(key).__aenter__(), prompt))
                continue
            for session, known in earlier:  # rows keep their order, and some have left
                if prompt[: len(known)] == known:
                    going_on.append((session, prompt))
                    break
                await session.__aexit__(None, None, None)
        requests = (session.generate(tuple(prompt), self._sampling, 0) for session, prompt in going_on)
        done = await asyncio.gather(*requests)
        self._sessions = [
            (session, [*prompt, *each.token_ids]) for (session, prompt), each in zip(going_on, done, strict=True)
        ]
        return list(done)

    async def _leave(self) -> None:
        for session, _ in self._sessions:
            await session.__aexit__(None, None, None)


class _Over(Exception):  # noqa: N818 - nothing went wrong
    """The loop has ended; what TRL does next belongs to training."""


class _Loop(GRPOTrainer):  # type: ignore[misc]  # TRL carries no types
    """TRL's trainer, which stops where its loop has ended."""

    def _generate(self, prompts: list[Any]) -> Any:
        self.played = super()._generate(prompts)
        raise _Over


class TRLSide:
    """TRL's `GRPOTrainer` with an `environment_factory`."""

    def __init__(
        self,
        game: Game,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        generation: ServerGeneration | SimulatedGeneration,
        scratch: Path,
    ) -> None:
        self._game = game
        self._generation = generation
        self._factory = EnvironmentFactory(game.dataset)
        self._made = 0
        config = GRPOConfig(
            output_dir=str(scratch),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            max_completion_length=game.completion,
            report_to=[],
            vllm_mode="server",
        )
        self._trainer = _Loop(
            model,
            reward_funcs=list(TRL_REWARDS),
            args=config,
            train_dataset=HubDataset.from_list([self._row(0)]),
            processing_class=text_as_calls(tokenizer),
            environment_factory=self._environment,
        )
        self._trainer.model.train()
        self._trainer.use_vllm = True
        self._trainer.vllm_generation = generation

    def play(self, episodes: int) -> Played:
        """Play a batch."""
        trainer = self._trainer
        if isinstance(self._generation, SimulatedGeneration):
            self._generation.begin()
        inputs = [self._row(number) for number in range(episodes)]
        trainer._last_loaded_step = -1
        began = time.perf_counter()
        try:
            trainer._generate_and_score_completions(inputs)
        except _Over:
            seconds = time.perf_counter() - began
        masks = trainer.played[2]
        return Played(seconds, sum(len(each.episode.turns) for each in trainer.environments), sum(map(sum, masks)))

    def close(self) -> None:
        """Release everything."""
        self._factory.close()
        if isinstance(self._generation, SimulatedGeneration):
            self._generation.close()

    def _environment(self) -> SQLText:
        late = LateEnvironment(self._factory.make(), self._game.pace, self._made)
        self._made += 1
        last_result = "over " * (self._game.completion + 1)
        return SQLText(late, self._game.dataset, EnvSettings().reward, last_result)

    def _row(self, number: int) -> dict[str, Any]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": ""}]
        return {"prompt": messages, "question_id": self._game.question(number).question_id}
