"""A policy that vLLM servers hold, for evaluation: its tokenizer is loaded here, its weights are not.

A number is worth what the weights behind it are, so servers are asked before the first episode: one that serves another
model (told by its contents where its name is another one), or whose weights a training run has changed since, is
refused. A server whose development endpoints are closed cannot have been changed.

An adapter is asked for by its name. A server that holds its base and takes adapters while it runs, as every server for
`lora` does, is told to load it, under a name that is made of its contents: an adapter that was trained further since is
another one. A server that does not must have been started with the adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

from env_server.errors import SQLEnvError
from inference.adapters import Adapter, NamedPolicy, unserved_settings
from inference.in_vllm.sqlenv_model import identity
from inference.vllm.addresses import every_server
from inference.vllm.api import NEW_PROCESS, ReplicaError, ReplicaRejectedError, VLLMServer
from inference.vllm.engine import VLLMEngine, VLLMSettings
from inference.vllm.fleet import Replica, split_urls
from inference.weights.device_facts import WorkerFacts, ask, same_contents
from trainer.chat.format import ChatFormat
from trainer.policy.loading import resolve_policy, tokenizer_of

ADAPTER_FILE = "adapter_model.safetensors"


class ServedPolicyError(SQLEnvError):
    """The servers cannot play as this policy; the text says what to do."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What is needed of a policy to play it on servers. `context` and `vocab_size` are in tokens."""

    policy: NamedPolicy
    tokenizer: PreTrainedTokenizerBase
    context: int
    vocab_size: int
    adapter_name: str = ""
    """What requests ask for, of servers that load the adapter while they run."""

    @classmethod
    def load(cls, name: str, *, trust_remote_code: bool = False) -> ServedPolicy:
        """Load from a folder or the Hub. Raises ServedPolicyError, PolicyError."""
        policy = resolve_policy(name)
        if policy.adapter is not None and (found := unserved_settings(policy.adapter.config)):
            raise ServedPolicyError(
                f"vLLM cannot serve {name}, an adapter with {', '.join(found)}. Leave --use_vllm out, or merge it into "
                f"its base first: sqlenv export {name} --out FOLDER"
            )
        try:
            config = AutoConfig.from_pretrained(
                policy.base.location, revision=policy.base.revision, trust_remote_code=trust_remote_code
            )
            text = config.get_text_config(decoder=True)
            tokenizer = tokenizer_of(policy, trust_remote_code=trust_remote_code)
            adapter_name = _name_by_contents(policy.adapter)
            return cls(policy, tokenizer, text.max_position_embeddings, text.vocab_size, adapter_name)
        except (OSError, ValueError) as error:
            raise ServedPolicyError(f"the policy {name!r} cannot be loaded: {' '.join(str(error).split())}") from error

    def engine(self, urls: str, chat: ChatFormat) -> VLLMEngine:
        """Return an engine on the servers of a flag, when all serve this policy. Raises ServedPolicyError."""
        try:
            servers = every_server(split_urls(urls))
        except ValueError as error:
            raise ServedPolicyError(f"--vllm_server_base_url: {error}") from None
        engine = VLLMEngine(servers, stop_ids=chat.stop_ids, vocab_size=self.vocab_size, max_context=self.context)
        engine.restore_with(self._ask_for_it)
        asyncio.run(self._check(engine, servers))
        return engine

    async def _check(self, engine: VLLMEngine, urls: Sequence[str]) -> None:
        async with engine.settings.client() as client:
            await asyncio.gather(*(self._check_server(VLLMServer(url, client)) for url in urls))

    async def _check_server(self, server: VLLMServer) -> None:
        remedy = f"start one with `sqlenv inference --model {self.policy.name}`"
        try:
            await server.health(VLLMSettings().health_timeout_s)
            served = (await server.served_model()).name
            version = await _weight_version(server)
            workers = await ask(server)
        except ReplicaError as error:
            raise ServedPolicyError(f"{error}; {remedy}") from error
        if not is_served(self.policy.base.location, served, workers, self.policy.base.revision):
            wanted = self.policy.name
            if self.policy.adapter is not None:
                wanted += f", an adapter on {self.policy.base.location}"
            raise ServedPolicyError(f"{server.url} serves {served}, and the policy is {wanted}; {remedy}")
        if version != NEW_PROCESS:
            raise ServedPolicyError(
                f"{server.url} has served a training run, and has its weights (version {version}); {remedy}"
            )
        if self.policy.adapter is not None:
            try:
                await self._load(server, self.policy.adapter)
            except ReplicaError as error:
                raise ServedPolicyError(f"{server.url} does not serve the adapter: {error}; {remedy}") from error

    async def _ask_for_it(self, server: VLLMServer, replica: Replica) -> None:
        """Have requests ask for the adapter, if it is one. The engine's `Restore`."""
        if self.policy.adapter is not None:
            replica.model = server.model = await self._load(server, self.policy.adapter)

    async def _load(self, server: VLLMServer, adapter: Adapter) -> str:
        """Return the name under which the server serves the adapter, loaded if need be. Raises ReplicaError."""
        name, location = self.adapter_name, adapter.place.location
        if name in await server.served_adapters():
            return name
        path = str(Path(location).resolve()) if Path(location).is_dir() else location
        try:
            await server.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        except ReplicaError:
            # Somebody else was faster; or it takes none while it runs, and may have been started with this one.
            served = await server.served_adapters()
            for known in (name, *(known for known, root in served.items() if same_model(root, location))):
                if known in served:
                    return known
            raise
        return name


def _name_by_contents(adapter: Adapter | None) -> str:
    if adapter is None:
        return ""
    location = adapter.place.location
    file = Path(location) / ADAPTER_FILE
    return f"{location}@{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file.is_file() else location


async def _weight_version(server: VLLMServer) -> str:
    try:
        return await server.weight_version()
    except ReplicaRejectedError:
        return NEW_PROCESS


def is_served(location: str, served: str, workers: Sequence[WorkerFacts], revision: str | None = None) -> bool:
    """Whether a server with a model of this name, of which its workers say this, serves the one at `location`.

    A copy of a folder, and the Hub's cached snapshot of a name, are told by their contents: offline, vLLM knows a model
    by the path of its snapshot.
    """
    if same_model(served, location):
        return True
    ours = WorkerFacts(**identity(location, revision))
    return bool(workers) and all(same_contents(ours, worker) for worker in workers)


def same_model(one: str, other: str) -> bool:
    """Whether two names stand for one model."""
    return one == other or (Path(one).is_dir() and Path(one).resolve() == Path(other).resolve())
