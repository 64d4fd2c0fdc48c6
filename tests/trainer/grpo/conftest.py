"""A random policy to train on made-up episodes, in a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer

from policies.tiny.tokenizer import build_tokenizer
from tests.integration.training import surroundings_in
from tests.trainer.grpo.made_up import Rollouts, Train, train_on
from trainer.grpo import SQLEnvTrainer


@pytest.fixture(scope="module")
def train(random_policy: Callable[..., Qwen3ForCausalLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    """Train a random policy with one of the trainers and some flags of TRL, `train(kind, **flags)`."""
    policy = tmp_path_factory.mktemp("policy")
    tokenizer = build_tokenizer(["how many cats are there in the house"], max_words=60)
    random_policy(tokenizer).save_pretrained(policy)

    def run(kind: type[GRPOTrainer] = SQLEnvTrainer, **flags: Any) -> tuple[Any, Rollouts]:
        return train_on(policy, tokenizer, tmp_path_factory.mktemp("run"), kind, **flags)

    with surroundings_in(tmp_path_factory.mktemp("cache")):
        yield run
