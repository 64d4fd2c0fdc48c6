"""`rollout_func` for a GRPOTrainer of your own: your trainer learns, our rollout client plays.

    with RolloutFunction(dataset) as rollout:
        trainer = GRPOTrainer(
            "Qwen/Qwen3-0.6B",
            reward_funcs=list(REWARD_FUNCTIONS),
            train_dataset=rollout.rows(dataset.select(Split.TRAIN)),
            rollout_func=rollout,
        )
        trainer.train()

The invariants of the rollout client (`trainer.rollout.client`) hold for the rows. A run's folder, evaluations and
restarts are `sqlenv train`'s alone. Each rank plays its own prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from datasets import Dataset as HubDataset
from trl import GRPOTrainer

from env_server.dataset import Dataset, Question
from env_server.types import AnswerMode
from trainer.chat.format import ChatFormat, ChatSettings
from trainer.config import ConfigError, SQLEnvArguments, token_of
from trainer.engines import RolloutSetup, open_policy
from trainer.grpo import prompt_rows, stop_at_turns_ends, use_engine
from trainer.ranks import Ranks
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import RolloutClient, derive_seed, request_for
from trainer.rollout.environments import open_environments
from trainer.rollout.episodes import Episode
from trainer.rollout.players import Examples
from trainer.training.batches import trl_rows

_LOG = logging.getLogger(__name__)

OF_A_RUN = (
    *("staleness", "dynamic_sampling", "rollout_downsampling", "guided_starts", "advantages", "difficulty", "folds"),
    *("reward_functions", "reward_weighting", "dry_run"),
)
"""Flags about what `sqlenv train` has beside the rollout client: when batches are played, of which questions."""


class RolloutFunction:
    """A `rollout_func`. A context manager; `close` ends its sessions and its engine.

    `arguments` are the flags of `sqlenv train`: where episodes are played, how the policy writes, how many are in
    flight; those that only such a run honours are refused. With `use_vllm` the servers of the trainer's
    `vllm_server_base_url` generate, and get the weights after each update; the trainer's own `use_vllm` stays off, or
    it would start a client of its own. `on_batch` is told of every batch. Raises SQLEnvError.
    """

    def __init__(
        self,
        dataset: Dataset,
        arguments: SQLEnvArguments | None = None,
        *,
        use_vllm: bool = False,
        on_batch: Callable[[Sequence[Episode]], None] | None = None,
    ) -> None:
        self._dataset = dataset
        self._arguments = arguments = arguments or SQLEnvArguments()
        usual = SQLEnvArguments()
        if given := [f"--{name}" for name in OF_A_RUN if getattr(arguments, name) != getattr(usual, name)]:
            raise ConfigError(f"{', '.join(given)}: only `sqlenv train` honours it; leave it out of a RolloutFunction")
        self._use_vllm = use_vllm
        self._on_batch = on_batch
        mode = AnswerMode(arguments.answer_mode)
        self._settings = arguments.environment
        self._examples = Examples.play(dataset, arguments.few_shot, mode, arguments.step_budget)
        self._opened = ExitStack()
        self._environments = open_environments(
            arguments.env_server,
            token_of(arguments.env_token),
            dataset,
            self._settings,
            mode,
        )
        self._opened.callback(self._environments.close)
        self._loop = self._opened.enter_context(RolloutLoop())
        self._client: RolloutClient | None = None
        self._ranks = Ranks()
        self._batches = 0

    def rows(self, questions: Sequence[Question]) -> HubDataset:
        """Return questions as a `train_dataset`: the message carries the question's id."""
        self._environments.prepare(questions)
        return prompt_rows(self._examples.without(questions))

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: GRPOTrainer) -> dict[str, Any]:
        """Play one episode per prompt, and return one row for each, in order. Raises RolloutError."""
        client = self._client = self._client or self._join(trainer)
        place = (trainer.args.seed, trainer.state.global_step, self._ranks.index, self._batches)
        requests = [
            request_for(self._dataset.question(prompt[-1]["question_id"]), derive_seed(*place, index))
            for index, prompt in enumerate(prompts)
        ]
        episodes = self._loop.run(client.play(requests))
        self._batches += 1
        if self._on_batch is not None:
            self._on_batch(episodes)
        return trl_rows(episodes)

    def close(self) -> None:
        """Release everything; closing twice is allowed."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _join(self, trainer: GRPOTrainer) -> RolloutClient:
        """Put the client together once there is a trainer, and bring its engine to the weights."""
        arguments, grpo = self._arguments, trainer.args
        chat = ChatFormat(
            trainer.processing_class,
            ChatSettings.of(arguments, grpo.chat_template_kwargs),
            self._examples.conversations,
        )
        for line in chat.lines:
            _LOG.info(line)
        stop_at_turns_ends(trainer, chat)
        self._ranks = Ranks.of(grpo)
        setup = RolloutSetup(trainer, chat, arguments, self._ranks, self._loop, self._use_vllm)
        policy = open_policy(setup, _LOG.info)
        self._opened.callback(lambda: self._loop.run(policy.aclose()))
        use_engine(trainer, policy)
        # TRL syncs before a rollout, and before this one it knew of no engine.
        policy.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step
        return RolloutClient(policy.engine, self._environments, chat, setup.settings)
