"""A policy that vLLM servers hold, for evaluation: its tokenizer is loaded here, its weights are not.

A number is worth what the weights behind it are, so servers are asked before the first episode: one that serves another
model, or whose weights a training run has changed since, is refused. A server whose development endpoints are closed
cannot have been changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from env_server.errors import SQLEnvError
from inference.addresses import every_server
from inference.fleet import split_urls
from inference.vllm import VLLMEngine, VLLMSettings
from inference.vllm_api import NEW_PROCESS, ReplicaError, ReplicaRejectedError, VLLMServer
from trainer.prompts import ChatRenderer


class ServedPolicyError(SQLEnvError):
    """The servers cannot play as this policy; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What is needed of a policy to play it on servers. `context` and `vocab_size` are in tokens."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    context: int
    vocab_size: int

    @classmethod
    def load(cls, name: str, *, trust_remote_code: bool = False) -> ServedPolicy:
        """Load from a folder or the Hub. Raises ServedPolicyError."""
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            text = config.get_text_config(decoder=True)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            return cls(name, tokenizer, text.max_position_embeddings, text.vocab_size)
        except (OSError, ValueError) as error:
            raise ServedPolicyError(f"the policy {name!r} cannot be loaded: {' '.join(str(error).split())}") from error

    def engine(self, urls: str, renderer: ChatRenderer) -> VLLMEngine:
        """Return an engine on the servers of a flag, when all serve this policy. Raises ServedPolicyError."""
        try:
            servers = every_server(split_urls(urls))
        except ValueError as error:
            raise ServedPolicyError(f"--vllm_server_base_url: {error}") from None
        engine = VLLMEngine(servers, stop_ids=renderer.stop_ids, vocab_size=self.vocab_size, max_context=self.context)
        asyncio.run(self._check(engine, servers))
        return engine

    async def _check(self, engine: VLLMEngine, urls: Sequence[str]) -> None:
        async with engine.client() as client:
            await asyncio.gather(*(self._check_server(VLLMServer(url, client)) for url in urls))

    async def _check_server(self, server: VLLMServer) -> None:
        remedy = f"start one with `sqlenv inference --model {self.name}`"
        try:
            await server.health(VLLMSettings().health_timeout_s)
            served = (await server.served_model()).name
            version = await _weight_version(server)
        except ReplicaError as error:
            raise ServedPolicyError(f"{error}; {remedy}") from error
        if not _same(served, self.name):
            raise ServedPolicyError(f"{server.url} serves {served}, and the policy is {self.name}; {remedy}")
        if version != NEW_PROCESS:
            raise ServedPolicyError(
                f"{server.url} has served a training run, and has its weights (version {version}); {remedy}"
            )


async def _weight_version(server: VLLMServer) -> str:
    try:
        return await server.weight_version()
    except ReplicaRejectedError:
        return NEW_PROCESS


def _same(one: str, other: str) -> bool:
    return one == other or (Path(one).is_dir() and Path(one).resolve() == Path(other).resolve())
