"""A chat format and a server, small enough for thousands of episodes."""

from __future__ import annotations

import pytest

from inference.simulated.profile import ServerProfile
from trainer.chat.format import ChatFormat
from trainer.rollout.transcript import TokenBudget
from trainer.tiny.tokenizer import build_tokenizer

BUDGET = TokenBudget(max_completion=16_384, max_context=32_768, max_turn=1_024)
SERVER = ServerProfile(
    max_sequences=16, step_s=0.01, step_s_per_sequence=0.001, prefill_tokens_per_s=5_000.0, network_s=0.003
)


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    return ChatFormat(build_tokenizer(["How many cats dogs are there and pets owners name species Max Rex Oslo"]))
