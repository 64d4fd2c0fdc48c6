"""SQLEnv's side of TRL's GRPOTrainer: the rollout function, and the seam for an engine of our own.

GRPOTrainer does the learning. It hands `SQLEnvRollout` the prompts of its batch, each question already repeated
`num_generations` times, and gets back exactly one row per prompt, in order. On several ranks, each one plays its own
prompts; what is told about a batch is about the episodes of all ranks.

The seam: TRL applies importance-sampling correction, and reports how far the sampled logprobs are from its own,
only when it believes that vLLM generates. So the trainer is built without vLLM, then told that our engine is the
generator (`use_engine`): it calls `sync_weights()` once before the rollout of each new global step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any

from datasets import Dataset as HubDataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config, get_quantization_config

from env_server.dataset import Dataset, Question
from env_server.settings import RewardSettings
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError
from trainer.flags.combinations import check_optimizer
from trainer.policy.loading import PolicyError, init_kwargs, load_to_continue, resolve_policy
from trainer.policy.quantisation import keep_gradients
from trainer.ranks import Ranks
from trainer.rollout.client import RolloutClient, derive_seed, request_for
from trainer.rollout.episodes import Episode, Outcome
from trainer.rollout.failures import FailureWindow
from trainer.rollout.rewards import REWARD_FUNCTIONS, reward_fields
from trainer.rollout.timings import split
from trainer.training.evaluating import SQLEnvTrainer
from trainer.training.step_times import Wait, WeightSync

OnBatch = Callable[[int, Sequence[Episode]], None]
"""Called with the training step and the episodes of all ranks."""


def prompt_rows(questions: Sequence[Question]) -> HubDataset:
    """TRL's prompt format: the question as a user message that also carries its id."""
    return HubDataset.from_list(
        [{"prompt": [{"role": "user", "content": q.text, "question_id": q.question_id}]} for q in questions]
    )


class SQLEnvRollout:
    """The `rollout_func` of a run. Plays on `runner`'s event loop, so that connections outlive a batch.

    TRL wants its rollout function before it makes the model that an engine generates with, so the client comes
    later, by `play_with`.
    """

    def __init__(
        self, dataset: Dataset, seed: int, rewards: RewardSettings, ranks: Ranks, runner: asyncio.Runner
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._rewards = rewards
        self._ranks = ranks
        self._runner = runner
        self._client: RolloutClient | None = None
        self._failures: FailureWindow
        self._on_batch: OnBatch | None = None
        self._step = -1
        self._played = 0

    def play_with(self, client: RolloutClient, on_batch: OnBatch | None) -> None:
        """Play with `client`, and tell `on_batch` of each batch; None on ranks that keep no log."""
        self._client, self._on_batch = client, on_batch
        self._failures = FailureWindow(client.max_failure_share)

    def __call__(self, prompts: list[list[dict[str, Any]]], trainer: SQLEnvTrainer) -> dict[str, Any]:
        """Play one episode per prompt, then gather those of all ranks. Raises RolloutError."""
        if self._client is None:
            raise RuntimeError("SQLEnvRollout was called before play_with")
        step, rank = trainer.state.global_step, self._ranks.index
        first = self._first_index(step, len(prompts))
        requests = [
            request_for(self._dataset.question(prompt[-1]["question_id"]), derive_seed(self._seed, step, rank, index))
            for index, prompt in enumerate(prompts, start=first)
        ]
        with trainer.times.waiting(Wait.ROLLOUT):
            started = time.perf_counter()
            episodes = self._runner.run(self._client.play(requests, batch=len(requests) * self._ranks.count))
            seconds = time.perf_counter() - started
            everyones = self._ranks.gather(episodes)
            parts = split(episode.timing for episode in episodes if episode.timing is not None)
            slowest, parts = max(self._ranks.gather([(seconds, parts)]), key=itemgetter(0))
        trainer.times.played(parts)
        causes = [episode.failure for episode in everyones if episode.outcome is Outcome.FAILED]
        self._failures.add(causes, len(everyones))
        # TRL averages them until its next log, with its own: the run's log and every tracker get both.
        for name, value in rollout_metrics(everyones, slowest).items():
            trainer._metrics["train"][name].append(value)
        if self._on_batch is not None:
            # The trainer logs a step under the number it has after its update.
            self._on_batch(step + 1, everyones)
        rows = [episode.row for episode in episodes]
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.env_mask for row in rows],
            **reward_fields(episodes, self._rewards),
        }

    def _first_index(self, step: int, count: int) -> int:
        """Number the episodes of a step through, however many batches TRL generates in it: no seed comes twice."""
        if step != self._step:
            self._step, self._played = step, 0
        first = self._played
        self._played += count
        return first


def rollout_metrics(episodes: Sequence[Episode], seconds: float) -> dict[str, float]:
    """What a batch of episodes was like; shares are of all episodes, means of those that did not fail."""
    count = len(episodes)
    played = [e for e in episodes if e.outcome is not Outcome.FAILED]
    outcomes = Counter(e.outcome for e in episodes)
    tokens = sum(sum(e.row.env_mask) for e in episodes)
    return {
        "rollout/success_rate": fmean(e.correct for e in played) if played else 0.0,
        "rollout/reward": fmean(e.reward for e in played) if played else 0.0,
        "rollout/steps": fmean(len(e.turns) for e in played) if played else 0.0,
        "rollout/out_of_budget": outcomes[Outcome.OUT_OF_BUDGET] / count,
        "rollout/out_of_tokens": outcomes[Outcome.OUT_OF_TOKENS] / count,
        "rollout/failed": outcomes[Outcome.FAILED],
        "rollout/truncated": sum(e.truncated_turns > 0 for e in episodes),
        "rollout/trained_tokens": tokens,
        "rollout/seconds": seconds,
        "rollout/episodes_per_second": count / seconds,
    }


def use_engine(trainer: GRPOTrainer, weights: WeightSync) -> None:
    """Tell the trainer that an engine of ours generates and `weights` syncs it; see the module's docstring."""
    trainer.use_vllm = True
    trainer.vllm_generation = weights
    trainer._last_loaded_step = -1


def stop_at_turns_ends(trainer: GRPOTrainer, chat: ChatFormat) -> None:
    """Have TRL know every token that a turn may end with: a row that ends with one is not truncated."""
    trainer.eos_token_ids = list(dict.fromkeys((*trainer.eos_token_ids, *chat.stop_ids)))


def sync_weights(trainer: GRPOTrainer) -> None:
    """Bring the engine to the weights between two steps; TRL then need not do so before the next rollout."""
    trainer.vllm_generation.sync_weights()
    trainer._last_loaded_step = trainer.state.global_step


def build_trainer(
    grpo: GRPOConfig,
    model_config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    eval_questions: Sequence[Question],
    rollout: SQLEnvRollout,
) -> SQLEnvTrainer:
    """TRL's trainer, with our rewards, rollout and evaluation, on a checkpoint or an adapter.

    Raises PolicyError, ConfigError.
    """
    policy = resolve_policy(str(model_config.model_name_or_path), model_config.model_revision)
    grpo.model_init_kwargs = init_kwargs(model_config, grpo)
    quantization = get_quantization_config(model_config)
    continued = None
    if policy.adapter is not None:
        continued = load_to_continue(policy, grpo, quantization, lora_dropout=model_config.lora_dropout)
    try:
        trainer = SQLEnvTrainer(
            model=policy.base.location if continued is None else continued,
            reward_funcs=list(REWARD_FUNCTIONS),
            args=grpo,
            train_dataset=prompt_rows(questions),
            # Only so that transformers lets evaluation happen; see `trainer.training.evaluating`.
            eval_dataset=prompt_rows(eval_questions) if eval_questions else None,
            processing_class=tokenizer,
            quantization_config=quantization if continued is None else None,
            peft_config=get_peft_config(model_config) if continued is None else None,
            rollout_func=rollout,
        )
        check_optimizer(grpo, trainer.model)
    except OSError as error:
        if error.filename is not None and str(error.filename).startswith(grpo.output_dir):
            raise ConfigError(
                f"--output_dir {grpo.output_dir}: {error.strerror}; it has to belong to the user who runs this, "
                f"number {os.getuid()}"
            ) from error
        raise PolicyError(f"{model_config.model_name_or_path}: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        # What TRL, PEFT and transformers say of arguments that do not fit the model or each other.
        raise ConfigError(" ".join(str(error).split())) from error
    keep_gradients(trainer.model, model_config)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer
