"""Weight sync: every server gets the trainer's weights before it gets requests, and what it got is proved.

A push gathers the weights (every rank takes part), then, on the main rank, goes to all servers at once: pause, send,
forget the prefix cache, mark the version, resume, generate a probe. The probe's logprobs are compared with the
trainer's own.

Promises:
- No server generates with earlier weights while another has the new ones: one that fails is left out until it has
  been brought up to date. When all fail, the push waits for one to come back, then gives up with one message.
- The first push sends changed weights first (`perturb`), and compares: a server that takes only some of the tensors
  would pass a comparison of weights that it had anyway. Then it sends the real ones.
- A mismatch raises WeightSyncError, which says what differs. There is no training on it.
- Every push has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import httpx
from torch import nn

from inference.engine import EngineError, Sampling
from inference.fleet import Replica
from inference.vllm import EngineUnavailableError, VLLMEngine
from inference.vllm_api import ReplicaUnavailableError, VLLMServer
from inference.weights.perturb import PerturbError, perturbed
from inference.weights.probe import Tolerance, compare
from inference.weights.transport import Pause, Transport, WeightSyncError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_TOKENS = 24
LOOK_S = 0.5
"""Between two looks for a server, when there is none."""
PERTURBED = "perturbed"

Logprobs = Callable[[tuple[int, ...], tuple[int, ...]], Sequence[float]]
"""The trainer's own logprobs of tokens after a prompt, as it computes them for the loss."""


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one that speaks to servers."""

    def broadcast(self, value: T) -> T:
        """Return the main process's value, on every rank."""


class OneRank:
    """A single process."""

    is_main = True

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value


@dataclass(frozen=True, slots=True)
class PushSettings:
    """How to push."""

    timeout_s: float = 120.0
    """For one server to take the weights and generate the probe."""
    pause: Pause = Pause.WAIT


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server generated after the probe's prompt."""

    url: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the other ranks need to know of a push."""

    failure: str
    samples: tuple[Sample, ...]
    replicas: tuple[tuple[bool, str, int, str | None, str], ...]


class WeightPusher:
    """Pushes what `model` returns to the engine's servers by `transport`.

    `logprobs` are the model's own; they are compared on what the servers generate after `probe`, a prompt.
    `forward_is_local`: a rank can compute them by itself (not so when the model is sharded).
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        engine: VLLMEngine,
        transport: Transport,
        logprobs: Logprobs,
        probe: Sequence[int],
        tolerance: Tolerance,
        *,
        ranks: Ranks | None = None,
        settings: PushSettings | None = None,
        forward_is_local: bool = True,
    ) -> None:
        self._model = model
        self._engine = engine
        self._transport = transport
        self._logprobs = logprobs
        self._probe = tuple(probe)
        self._tolerance = tolerance
        self._ranks = ranks or OneRank()
        self._settings = settings or PushSettings()
        self._forward_is_local = forward_is_local
        self._run = uuid.uuid4().hex[:12]
        self._stamp = ""
        self._version = 0
        self._samples: list[Sample] = []
        self._model_name = ""
        self._proved = False
        self.last_seconds = 0.0
        """Of the last push, the proof included."""

    def push(self, version: int) -> None:
        """Bring all servers to the model's weights of now; every rank calls it. Raises EngineError.

        `version` is stamped on every later completion.
        """
        began = time.perf_counter()
        if not self._proved:
            self._prove(version)
            self._proved = True
        self._push(version, str(version))
        self.last_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Remove what was left for the servers."""
        self._transport.close()

    async def restore(self, server: VLLMServer, replica: Replica) -> None:
        """Bring a server that was away to the weights that were pushed last. The engine's `Restore`."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                sample = await self._bring(server, replica)
        except TimeoutError:
            limit = self._settings.timeout_s
            text = f"it did not take the weights within {limit:g} s (--weight_sync_timeout)"
            raise ReplicaUnavailableError(server.url, text) from None
        if self._forward_is_local:
            self._check(sample)
        self._samples.append(sample)

    def _prove(self, version: int) -> None:
        try:
            with perturbed(self._model(), trainable_only=self._transport.name == "lora"):
                self._push(version, PERTURBED)
        except PerturbError as error:
            logger.warning("only the weights themselves are compared with the servers': %s", error)

    def _push(self, version: int, label: str) -> None:
        self._transport.prepare(version)
        self._stamp = self._ranks.broadcast(f"{self._run}/{label}")
        self._version = version
        self._samples.clear()
        failure = ""
        if self._ranks.is_main:
            try:
                asyncio.run(self._send_to_all())
            except EngineError as error:
                failure = str(error)
        outcome = self._ranks.broadcast(self._outcome(failure))
        if outcome.failure:
            raise WeightSyncError(outcome.failure)
        self._adopt(outcome)
        if not self._forward_is_local:
            for sample in outcome.samples:
                self._check(sample)

    async def _send_to_all(self) -> None:
        """Send to every server; wait for one when there is none. Raises EngineError."""
        fleet, limit = self._engine.fleet, self._engine.settings.server_timeout_s
        for replica in fleet.replicas:
            replica.is_ready = False
        deadline = time.monotonic() + limit
        async with self._engine.client() as client:
            while True:
                tries = [self._try(client, replica) for replica in fleet.replicas if not replica.is_ready]
                await asyncio.gather(*tries)
                if fleet.ready:
                    return
                if time.monotonic() > deadline:
                    raise EngineUnavailableError(
                        f"no inference server took the weights within {limit:g} s (--vllm_server_timeout); "
                        f"{fleet.reasons()}"
                    )
                await asyncio.sleep(LOOK_S)

    async def _try(self, client: httpx.AsyncClient, replica: Replica) -> None:
        try:
            await self._engine.bring_up(VLLMServer(replica.url, client), replica)
        except ReplicaUnavailableError:
            return  # the fleet knows the reason, and it may pass

    async def _bring(self, server: VLLMServer, replica: Replica) -> Sample:
        if not self._stamp:
            raise WeightSyncError("no weights have been pushed yet: push them before the first request")
        if await server.weight_version() != self._stamp:
            await self._send(server)
            self._model_name = server.model
        else:
            # Another rank has brought it up to date.
            server.model = self._model_name or server.model
        replica.model = server.model
        sampling = Sampling(PROBE_TOKENS)
        done = await server.complete(self._probe, sampling, seed=self._version, stop_ids=())
        replica.version, replica.fingerprint = self._version, done.fingerprint
        return Sample(server.url, done.token_ids, done.logprobs)

    async def _send(self, server: VLLMServer) -> None:
        async with self._paused(server):
            await self._transport.send(server)
            await server.reset_prefix_cache()
            await server.set_weight_version(self._stamp)

    @asynccontextmanager
    async def _paused(self, server: VLLMServer) -> AsyncIterator[None]:
        """Stop a server's requests as the settings say. After a failure, too, it goes on: others may use it."""
        pause = self._settings.pause
        if pause is Pause.NONE:
            yield
            return
        try:
            await server.pause(freeze=pause is Pause.KEEP)
            yield
        except BaseException:
            with suppress(EngineError):  # it may be gone; what went wrong first is what counts
                await server.resume(self._engine.settings.health_timeout_s)
            raise
        await server.resume()

    def _check(self, sample: Sample) -> None:
        """Compare with the trainer's model. Raises WeightSyncError."""
        ours = self._logprobs(self._probe, sample.token_ids)
        if difference := compare(ours, sample.logprobs, self._tolerance):
            raise WeightSyncError(
                f"{sample.url} does not generate with the trainer's weights after a push by {self._transport.name}: "
                f"{difference}. Was the server started with the same model and dtype, and by `sqlenv inference` "
                "(processed logprobs)? Training on such samples would be wrong, so it stops here"
            )

    def _outcome(self, failure: str) -> _Outcome:
        replicas = self._engine.fleet.replicas
        states = tuple((r.is_ready, r.model, r.max_model_len, r.fingerprint, r.reason) for r in replicas)
        return _Outcome(failure, tuple(self._samples), states)

    def _adopt(self, outcome: _Outcome) -> None:
        """Know of the servers what the main rank knows."""
        if self._ranks.is_main:
            return
        fleet = self._engine.fleet
        for replica, (is_ready, model, context, fingerprint, reason) in zip(
            fleet.replicas, outcome.replicas, strict=True
        ):
            replica.model, replica.max_model_len = model, context
            self._model_name = model or self._model_name
            if is_ready:
                fleet.joined(replica, self._version, fingerprint)
            else:
                fleet.lost(replica, reason, time.monotonic())
