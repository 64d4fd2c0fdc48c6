"""A policy that says given words: the real client, formats and environments, and an engine without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from transformers import PreTrainedTokenizerBase

from benchmarks.simulated import SimulatedEngine, TurnRequest
from env_server.dataset import Dataset
from policies.tiny.tokenizer import build_tokenizer
from trainer.chat.format import ChatFormat
from trainer.cli.session import PolicySession
from trainer.engines import token_budget
from trainer.policy import PlaySettings
from trainer.rollout.client import RolloutSettings

Reciting = Callable[..., PolicySession]


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerBase:
    return build_tokenizer(["How many cats dogs are there pets owners name species Max Rex Oslo"])


@pytest.fixture
def reciting(words: PreTrainedTokenizerBase, pets: Dataset) -> Reciting:
    """Make a policy of a name that says these turns in every episode, under play settings; `before` each turn.

    Of a turn that is an iterator, each of `samples` says the next.
    """

    def make(
        *turns: str | Iterator[str],
        name: str = "parrot",
        play: PlaySettings | None = None,
        before: Callable[[int], None] = lambda _: None,
        samples: int = 1,
        dataset: Dataset = pets,
    ) -> PolicySession:
        play = play or PlaySettings()
        chat = ChatFormat(words, play.chat)

        def say(request: TurnRequest) -> Sequence[int]:
            before(request.turn)
            said = turns[request.turn]
            return chat.renderer.turn_ids(said if isinstance(said, str) else next(said))

        engine = SimulatedEngine(say, stop_ids=chat.stop_ids)
        settings = RolloutSettings(token_budget(play, 8_192, chat), temperature=0.0)
        return PolicySession(name, dataset, play, engine, chat, settings, samples)

    return make
