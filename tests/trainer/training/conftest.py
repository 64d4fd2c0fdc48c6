"""A random policy that plays in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from inference.hf.engine import HFEngine
from policies.tiny.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["How many cats are there pets owners"])


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerBase, random_policy: Callable[..., Qwen3ForCausalLM]) -> Iterator[HFEngine]:
    engine = HFEngine(random_policy(tokenizer), stop_ids=[3], pad_id=0, linger_s=1e6)
    yield engine
    asyncio.run(engine.aclose())
