"""The engine of a policy: Hugging Face `generate` in this process, or vLLM servers.

`open_policy` is what generates in a training run; either of its engines is TRL's `vllm_generation` as well (see
`grpo.use_engine`): `sync_weights` brings it to the trainer's weights before the rollouts of each new step.

`ServedPolicy` is a policy that vLLM servers hold, for evaluation: its tokenizer is loaded here, its weights are not. A
number is worth what the weights behind it are, so servers are asked before the first episode: one that serves another
model (told by its contents where its name is another one), or whose weights a training run has changed since, is
refused. A server whose development endpoints are closed cannot have been changed. An adapter is asked for by its name.
A server that holds its base and takes adapters while it runs is told to load it, under a name that is made of its
contents; another one must have been started with the adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from accelerate.utils import DistributedType
from peft import PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer
from trl.models import unwrap_model_for_generation

from env_server.errors import SQLEnvError
from inference.adapters import Adapter, NamedPolicy, unserved_settings
from inference.engine import Engine, EngineError
from inference.hf.engine import HFEngine
from inference.in_vllm.sqlenv_model import identity
from inference.launch.plan import WeightSyncMode
from inference.vllm.api import NEW_PROCESS, ReplicaError, ReplicaRejectedError, VLLMServer, WorkerFacts
from inference.vllm.engine import EngineUnavailableError, VLLMEngine, VLLMSettings, ask_all
from inference.vllm.fleet import Replica, every_server, split_urls
from inference.vllm.pressure import PressureGauge
from inference.weights.check import token_logprobs
from inference.weights.disk import DiskTransport
from inference.weights.gather import adapter_weights, full_weights
from inference.weights.lora import LoraTransport
from inference.weights.nccl import (
    NCCLTransport,
    facts_here,
    has_vllm,
    interfaces_towards,
    why_not_between,
    why_not_from,
)
from inference.weights.push import WeightPusher
from inference.weights.ranks import Ranks
from inference.weights.transport import SyncCheck, Transport
from trainer.chat.format import ChatFormat
from trainer.config import ConfigError, SQLEnvArguments
from trainer.models import load_policy, tokenizer_of
from trainer.policy import PlaySettings, resolve_policy
from trainer.ranks import require_whole_model
from trainer.rollout.background import RolloutLoop
from trainer.rollout.client import LONGEST_TURN_S, RolloutSettings
from trainer.rollout.transcript import TokenBudget

T = TypeVar("T")
PROBE = "Which tables are there, and what is in them?"


class InferenceError(SQLEnvError):
    """The servers cannot be brought to the trainer's weights, or there are none; the run cannot go on."""


def token_budget(chosen: PlaySettings, context: int, chat: ChatFormat) -> TokenBudget:
    """Return the bounds of an episode of a model that takes `context` tokens."""
    return TokenBudget(
        chosen.max_completion_length,
        chosen.max_context_length or context,
        chosen.max_turn_length,
        chat.reasoning_length,
    )


def in_process_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chat: ChatFormat,
    settings: RolloutSettings,
    generation_context: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
) -> HFEngine:
    """An engine on a model in this process, with room for every episode in flight; arguments as `HFEngine`'s."""
    return HFEngine(
        model,
        stop_ids=chat.stop_ids,
        pad_id=chat.stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        max_batch=settings.max_concurrency,
        max_context=settings.budget.max_context,
        generation_context=generation_context,
    )


class PolicyEngine(Protocol):
    """An engine, and the transport of the trainer's weights to it."""

    @property
    def engine(self) -> Engine:
        """What generates."""

    def sync_weights(self) -> None:
        """Bring the engine to the trainer's weights; every rank calls it. Raises InferenceError."""

    async def aclose(self) -> None:
        """Release everything."""


class HFPolicy:
    """The trainer's own model generates: there is nothing to bring over, only the version moves on."""

    def __init__(self, engine: HFEngine, trainer: GRPOTrainer) -> None:
        self.engine = engine
        self._trainer = trainer

    def sync_weights(self) -> None:
        """Stamp the number of updates that the weights have had."""
        self.engine.set_policy_version(self._trainer.state.global_step)

    async def aclose(self) -> None:
        """Release everything."""
        await self.engine.aclose()


class VLLMPolicy:
    """vLLM servers generate, and get the weights after every update."""

    def __init__(
        self, engine: VLLMEngine, pusher: WeightPusher, trainer: GRPOTrainer, say: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self._pusher = pusher
        self._trainer = trainer
        self._say: Callable[[str], None] | None = say
        """Until the first push is reported."""

    def sync_weights(self) -> None:
        """Push to all servers, and log how far their logprobs are from the trainer's. Raises InferenceError."""
        try:
            self._pusher.push(self._trainer.state.global_step)
        except EngineError as error:
            raise InferenceError(str(error)) from error
        if (gap := self._pusher.last_gap) is not None:
            if self._say is not None:
                self._say(f"weight sync: every tensor arrives; the servers' logprobs are within {gap:.2g} nats")
                self._say = None
            self._trainer._metrics["train"]["engine/weight_sync_gap"].append(gap)

    async def aclose(self) -> None:
        """Release everything."""
        await self.engine.aclose()
        self._pusher.close()


class LogPressure(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Adds what the servers said of themselves in each step to TRL's metrics, where anybody looked."""

    def __init__(self, gauge: PressureGauge, trainer: GRPOTrainer) -> None:
        self._gauge = gauge
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What was before is an evaluation's."""
        self._gauge.take()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log; TRL averages until its next log."""
        pressure = self._gauge.take()
        for name, value in ({} if pressure is None else asdict(pressure)).items():
            if value is not None:
                self._trainer._metrics["train"][f"engine/{name}"].append(value)


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """What the rollouts of a trainer are put together from; `arguments` are the flags of `sqlenv train`."""

    trainer: GRPOTrainer
    chat: ChatFormat
    arguments: SQLEnvArguments
    ranks: Ranks
    loop: RolloutLoop
    use_vllm: bool

    @property
    def settings(self) -> RolloutSettings:
        """How episodes are played."""
        grpo, arguments = self.trainer.args, self.arguments
        context = self.trainer.model.config.max_position_embeddings
        return RolloutSettings(
            TokenBudget(grpo.max_completion_length, context, arguments.max_turn_length, self.chat.reasoning_length),
            temperature=grpo.temperature,
            max_concurrency=arguments.max_concurrency,
            # A turn may have to wait for a server to come back, and then be generated.
            engine_timeout_s=LONGEST_TURN_S + (grpo.vllm_server_timeout if self.use_vllm else 0.0),
        )


def open_policy(setup: RolloutSetup, say: Callable[[str], None]) -> PolicyEngine:
    """What generates, for training and evaluation alike: the trainer's model, or servers. Raises ConfigError."""
    if setup.use_vllm:
        return vllm_policy(setup, say)
    trainer = setup.trainer
    require_whole_model(trainer.accelerator)
    engine = in_process_engine(
        trainer.model, trainer.processing_class, setup.chat, setup.settings, lambda: _generating(trainer)
    )
    return HFPolicy(engine, trainer)


@contextmanager
def _generating(trainer: GRPOTrainer) -> Iterator[PreTrainedModel]:
    """Make the trainer's model ready to generate.

    Autocast around all of a batch: the model casts its weights for as long as the outermost one lasts, and of itself
    enters one for each token.
    """
    unwrapped = unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        # It switches checkpointing off, and on again, with these or else with the defaults.
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    )
    with unwrapped as model, trainer.accelerator.autocast():
        yield model


def server_urls(grpo: GRPOConfig) -> tuple[str, ...]:
    """Return the servers that TRL's flags name. Raises ConfigError."""
    host = "127.0.0.1" if grpo.vllm_server_host == "0.0.0.0" else grpo.vllm_server_host
    try:
        return split_urls(grpo.vllm_server_base_url or f"http://{host}:{grpo.vllm_server_port}")
    except ValueError as error:
        raise ConfigError(f"--vllm_server_base_url: {error}") from None


def find_servers(urls: Sequence[str], timeout_s: float, start_command: str, ranks: Ranks, loop: RolloutLoop) -> None:
    """Wait until an inference server is ready. Collective: every rank calls it. Raises InferenceError."""
    settings = VLLMSettings(server_timeout_s=timeout_s)

    async def ready(server: VLLMServer) -> None:
        await server.health(settings.health_timeout_s)
        await server.served_model()

    def find() -> None:
        try:
            loop.run(ask_all(every_server(urls), settings, ready))
        except EngineUnavailableError as error:
            raise EngineUnavailableError(f"{error}; start one with `{start_command}`") from error

    _on_main(ranks, find)


def server_command(model: str, weight_sync: str, rank: int) -> str:
    """Return the command that starts an inference server for a run; `rank` is a new adapter's, 0 where none is made."""
    sync = "lora" if weight_sync == "auto" and rank else weight_sync
    flags = "" if sync == "auto" else f" --weight_sync {sync}"
    return f"sqlenv inference --model {model}{flags}" + (f" --max_lora_rank {rank}" if sync == "lora" and rank else "")


def vllm_policy(setup: RolloutSetup, say: Callable[[str], None]) -> VLLMPolicy:
    """Put the servers' engine and its weight sync together. Collective: every rank calls it.

    Speaks to the servers only where they decide how weights get to them, and waits for them then. `say` is told what
    the first push found. Raises InferenceError.
    """
    trainer, chat, ranks = setup.trainer, setup.chat, setup.ranks
    grpo = trainer.args
    urls = every_server(server_urls(grpo))
    # The main rank's metrics are those that are logged. Many ranks that asked would keep a server's front end busy.
    gauge = PressureGauge() if ranks.is_main else None
    engine = VLLMEngine(
        urls,
        stop_ids=chat.stop_ids,
        vocab_size=trainer.model.config.get_text_config(decoder=True).vocab_size,
        max_context=setup.settings.budget.max_context,
        settings=VLLMSettings(server_timeout_s=grpo.vllm_server_timeout, log_waits=ranks.is_main),
        pressure=gauge,
    )
    accelerator = trainer.accelerator

    def logprobs(prompt_ids: tuple[int, ...], token_ids: tuple[int, ...], temperature: float) -> torch.Tensor:
        with accelerator.autocast():
            return token_logprobs(trainer.model_wrapped, prompt_ids, token_ids, temperature)

    pusher = WeightPusher(
        lambda: trainer.model_wrapped,
        engine,
        _transport(setup, engine),
        logprobs,
        chat.renderer.prompt_ids([{"role": "user", "content": PROBE}]),
        ranks=ranks,
        loop=setup.loop,
        check=SyncCheck(setup.arguments.weight_sync_check),
        # Until FSDP has shared the model out, the main rank's may be the only one that holds the weights.
        has_weights=ranks.is_main or accelerator.distributed_type is not DistributedType.FSDP,
    )
    engine.restore_with(pusher.restore)
    if gauge is not None:
        trainer.add_callback(LogPressure(gauge, trainer))
    return VLLMPolicy(engine, pusher, trainer, say)


def _transport(setup: RolloutSetup, engine: VLLMEngine) -> Transport:
    trainer, arguments = setup.trainer, setup.arguments
    accelerator = trainer.accelerator

    def model() -> nn.Module:
        wrapped: nn.Module = trainer.model_wrapped
        return wrapped

    adapter = isinstance(accelerator.unwrap_model(trainer.model), PeftModel)
    folder = Path(arguments.weight_sync_dir or Path(trainer.args.output_dir) / "weights")
    facts = WorkerFacts()
    servers: Sequence[Sequence[WorkerFacts]] = ()
    has_cuda = accelerator.device.type == "cuda"
    if arguments.weight_sync == "auto" and not adapter and not why_not_from(has_cuda, has_vllm()):
        facts, servers = facts_here(accelerator.device), _facts_of_servers(engine, setup)
    match choose_weight_sync(arguments.weight_sync, adapter, facts, servers):
        case WeightSyncMode.LORA:
            return LoraTransport(lambda: adapter_weights(model(), accelerator), folder)
        case WeightSyncMode.NCCL:
            if accelerator.num_processes == 1 and (
                interfaces := interfaces_towards([replica.url for replica in engine.fleet.replicas])
            ):
                # Before NCCL first looks. Several ranks have NCCL at work already, perhaps between other hosts.
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interfaces)
            return NCCLTransport(lambda: full_weights(model(), accelerator), accelerator.device)
        case _:
            return DiskTransport(
                lambda: full_weights(model(), accelerator), folder, is_main=accelerator.is_main_process
            )


def _facts_of_servers(engine: VLLMEngine, setup: RolloutSetup) -> Sequence[Sequence[WorkerFacts]]:
    """Return what the servers' workers say of themselves, on every rank. Raises InferenceError."""
    urls = [replica.url for replica in engine.fleet.replicas]
    return _on_main(setup.ranks, lambda: setup.loop.run(ask_all(urls, engine.settings, VLLMServer.facts)))


def _on_main(ranks: Ranks, ask: Callable[[], T]) -> T:
    """Ask servers on the main rank; return the answer, or raise InferenceError, on every rank. Collective."""
    failure, answer = "", None
    if ranks.is_main:
        try:
            answer = ask()
        except EngineError as error:
            failure = str(error)
    failure, answer = ranks.broadcast((failure, answer))
    if failure:
        raise InferenceError(failure)
    return cast("T", answer)


def choose_weight_sync(
    asked: str, adapter: bool, here: WorkerFacts, servers: Sequence[Sequence[WorkerFacts]]
) -> WeightSyncMode:
    """Return the transport of the weights from `here` to servers whose workers say this of themselves.

    `auto`: adapters alone where there are any; over NCCL where all servers were prepared for it and are on other GPUs;
    else by disk, which always works.
    """
    if asked != "auto":
        return WeightSyncMode(asked)
    if adapter:
        return WeightSyncMode.LORA
    can = here.gpu and servers and not any(why_not_between(here, each) for each in servers)
    return WeightSyncMode.NCCL if can else WeightSyncMode.DISK


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
            workers = await server.facts()
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
        name, location = self.adapter_name, adapter.ref.location
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


def open_to_play(
    name: str,
    vllm_urls: str | None,
    chat_of: Callable[[PreTrainedTokenizerBase], ChatFormat],
    settings_of: Callable[[int, ChatFormat], RolloutSettings],
    say: Callable[[str], object],
    *,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[HFEngine | VLLMEngine, ChatFormat, RolloutSettings, str | None]:
    """An engine for a policy that is played and not trained: here, or on the servers of `vllm_urls`, asked now.

    Beside it how the policy is spoken to, how its episodes are played in a context of so many tokens, and its dtype,
    None where servers hold it. Raises SQLEnvError.
    """
    if vllm_urls is None:
        of_weights = None if dtype is None else getattr(torch, dtype)
        model, tokenizer = load_policy(name, dtype=of_weights, trust_remote_code=trust_remote_code, say=say)
        chat = chat_of(tokenizer)
        settings = settings_of(model.config.max_position_embeddings, chat)
        engine = in_process_engine(model, tokenizer, chat, settings)
        return engine, chat, settings, str(model.dtype).removeprefix("torch.")
    served = ServedPolicy.load(name, trust_remote_code=trust_remote_code)
    chat = chat_of(served.tokenizer)
    return served.engine(vllm_urls, chat), chat, settings_of(served.context, chat), None


def _name_by_contents(adapter: Adapter | None) -> str:
    if adapter is None:
        return ""
    location = adapter.ref.location
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
    return bool(workers) and all(ours.has_same_model(worker) for worker in workers)


def same_model(one: str, other: str) -> bool:
    """Whether two names stand for one model."""
    return one == other or (Path(one).is_dir() and Path(one).resolve() == Path(other).resolve())
