"""What tests of training share: where a run in this process finds its things, a policy that plays, a stock config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM
from trl import GRPOConfig

from env_server.cache import CACHE_VARIABLE
from policies.tiny.tokenizer import build_tokenizer

LIKED = {"<end>": 6.0, "ANSWER ": 4.5, "DESCRIBE ": 4.5, "SAMPLE ": 4.5, "QUERY ": 3.0, "1": 3.0, "2": 3.0}
"""The words of actions, so that rewards within a group differ."""


@contextmanager
def surroundings_in(cache: Path) -> Iterator[None]:
    """Keep what a run in this process changes, or leaves in the user's cache, to the `with` block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield


def save_policy(random_policy: Callable[..., Qwen3ForCausalLM], texts: Sequence[str], folder: Path) -> Path:
    """Save a random policy that likes the words of actions, with a tokenizer for the texts."""
    tokenizer = build_tokenizer(texts, max_words=60)
    random_policy(tokenizer, liked=LIKED).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def three_steps(folder: Path, **fields: Any) -> GRPOConfig:
    """Return the config of a GRPOTrainer that somebody else builds: three steps of two groups of four episodes."""
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return GRPOConfig(**usual | fields)
