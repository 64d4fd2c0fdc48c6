"""A policy that plays for a person: loaded once, it plays one question after another, and each turn is shown.

Promises: the play is that of training and evaluation, by the same rollout client, chat format and engine; what was
saved with the policy decides its actions, its prompt, what it answers with, and its limits. It plays greedily, or draws
several samples; either way, the same question is played the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from env_server.data.loading import load_dataset
from env_server.dataset import Question
from env_server.errors import DataError
from env_server.settings import EnvSettings
from inference.engine import Engine
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError
from trainer.evaluation.evaluate import in_process_engine, token_budget
from trainer.policy.loading import load_policy, resolve_policy
from trainer.policy.play_settings import PlaySettings, saved_play, settle
from trainer.policy.served import ServedPolicy
from trainer.rollout.client import RolloutClient, RolloutSettings, derive_seed, explore, request_for
from trainer.rollout.environments import Environments
from trainer.rollout.episodes import Episode, Turn
from trainer.rollout.examples import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CONCURRENCY = 8
"""Episodes in flight, of all who ask."""
SAMPLING_TEMPERATURE = 1.0
"""Of several samples: what the policy was trained to sample from."""


@dataclass(frozen=True, slots=True)
class PolicyPlayer:
    """A policy, ready to play. It is used from one event loop at a time; `aclose` ends it."""

    name: str
    play_settings: PlaySettings
    engine: Engine
    chat: ChatFormat
    settings: RolloutSettings
    samples: int = 1

    @property
    def env_settings(self) -> EnvSettings:
        """What its environments must have been made with."""
        return self.play_settings.environment

    async def play(
        self, question: Question, environments: Environments, on_turn: Callable[[Turn], None], key: int = 0
    ) -> list[Episode]:
        """Play a question as often as it has samples; `on_turn` is called after each turn of any.

        What the infrastructure fails at is a failed episode. `key` tells the plays apart that are under way at once.
        """
        playing = partial(explore, on_turn=on_turn)
        client = RolloutClient(self.engine, environments, self.chat, self.settings, play_episode=playing)
        seeds = (derive_seed(self.play_settings.seed, sample) for sample in range(self.samples))
        return await client.play([request_for(question, seed) for seed in seeds], first=key * self.samples)

    async def aclose(self) -> None:
        """Release what the engine holds."""
        await self.engine.aclose()


def load_player(
    name: str,
    *,
    say: Callable[[str], object],
    few_shot: int | None = None,
    samples: int = 1,
    vllm_urls: str | None = None,
    trust_remote_code: bool = False,
) -> PolicyPlayer:
    """Load the policy, here or, of `vllm_urls`, on the servers that hold it. Raises SQLEnvError.

    `few_shot` is the number of worked episodes in its prompt, as saved with it where None. One of `samples` is played
    greedily. `say` gets a line about what was taken over from what was saved with it.
    """
    given = {} if few_shot is None else {"few_shot": few_shot}
    settled = settle(name, saved_play(resolve_policy(name).place), given)
    chosen = settled.settings
    for line in settled.lines:
        say(line)
    examples = _examples(name, chosen)
    if vllm_urls is None:
        model, tokenizer = load_policy(name, trust_remote_code=trust_remote_code, say=say)
        chat, chosen = _chat(tokenizer, chosen, examples, say)
        settings = _settings(chosen, model.config.max_position_embeddings, chat, samples)
        return PolicyPlayer(name, chosen, in_process_engine(model, tokenizer, chat, settings), chat, settings, samples)
    served = ServedPolicy.load(name, trust_remote_code=trust_remote_code)
    chat, chosen = _chat(served.tokenizer, chosen, examples, say)
    settings = _settings(chosen, served.context, chat, samples)
    return PolicyPlayer(name, chosen, served.engine(vllm_urls, chat), chat, settings, samples)


def _chat(
    tokenizer: PreTrainedTokenizerBase, chosen: PlaySettings, examples: Examples, say: Callable[[str], object]
) -> tuple[ChatFormat, PlaySettings]:
    """Return how the policy is spoken to, and the settings with the template's variables in force."""
    chat = ChatFormat(tokenizer, chosen.chat, examples.conversations)
    for line in chat.lines:
        say(line)
    return chat, replace(chosen, chat_template_kwargs=chat.settings.chat_template_kwargs)


def _settings(chosen: PlaySettings, context: int, chat: ChatFormat, samples: int) -> RolloutSettings:
    temperature = 0.0 if samples == 1 else SAMPLING_TEMPERATURE
    budget = token_budget(chosen, context, chat)
    return RolloutSettings(budget, temperature, MAX_CONCURRENCY, max_failure_share=1.0)


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
