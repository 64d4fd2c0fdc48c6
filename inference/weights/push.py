"""Weight sync: every server gets the trainer's weights before it gets requests, and what it got is checked.

A push gathers the weights (every rank takes part). No rank starts another request, and those in flight end first.
Then the main rank goes to all servers at once: pause, send, forget the prefix cache, mark the version, resume, generate
a probe. The probe's logprobs are compared with the trainer's own.

Guarantees:
- Episodes may be in flight. A turn is stamped with the version that its request began under, which is that of all its
  tokens.
- A server that comes back is brought to the last weights when the trainer waits, and not while it changes them: then
  the next push does it.
- No server generates with earlier weights while another has the new ones: one that fails is left out until it has
  been brought up to date. When all fail, the push waits for one to come back, then gives up with one message.
- The first push is preceded by one of a constant, which shows that the transport brings every tensor: see `check`.
- After each push, the server's logprobs are compared with the trainer's. There is no training on weights that a server
  does not have: WeightSyncError says what differs.
- Every push has a deadline.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
import torch
from torch import nn

from inference.engine import EngineError, Sampling
from inference.vllm.api import ReplicaUnavailableError, VLLMServer
from inference.vllm.engine import VLLMEngine, keep_waiting
from inference.vllm.fleet import Replica, Wait
from inference.weights.check import (
    PROBE_TEMPERATURE,
    PROBE_TOKENS,
    GapMonitor,
    Logprobs,
    Sample,
    expect_constant,
    gap,
    left_behind,
)
from inference.weights.gather import is_shared_out
from inference.weights.ranks import Loop, OneRank, OwnLoop, Ranks
from inference.weights.transport import SERVER_S, SyncCheck, Transport, WeightSyncError, give_up_update

LOOK_S = 0.5
"""Between two looks for a server, when there is none."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the other ranks need to know of a push."""

    failure: str
    samples: tuple[Sample, ...]
    replicas: tuple[tuple[bool, str, int, str | None, str], ...]


class WeightPusher:
    """Pushes what `model` returns to the engine's servers by `transport`.

    `logprobs` are the model's own; they are compared on what the servers generate after `probe`, a prompt.
    `loop` is where the engine's sessions are.
    `has_weights`: this rank holds them before the model is sharded.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        engine: VLLMEngine,
        transport: Transport,
        logprobs: Logprobs,
        probe: Sequence[int],
        *,
        ranks: Ranks | None = None,
        loop: Loop | None = None,
        timeout_s: float = SERVER_S,
        has_weights: bool = True,
        check: SyncCheck = SyncCheck.WARN,
    ) -> None:
        self._model = model
        self._engine = engine
        self._transport = transport
        self._logprobs = logprobs
        self._probe = tuple(probe)
        self._ranks = ranks or OneRank()
        self._loop = loop or OwnLoop()
        self._timeout_s = timeout_s
        self._has_weights = has_weights
        self._check = check
        self._monitor = GapMonitor(strict=check is SyncCheck.STRICT)
        self._run = uuid.uuid4().hex[:12]
        self._stamp = ""
        self._version = 0
        self._samples: list[Sample] = []
        self._ours: dict[tuple[int, ...], list[float]] = {}
        """The model's logprobs of what was generated since the last push: servers that are alike generate the same."""
        self._model_name = ""
        self._dtype: torch.dtype | None = None
        """Of all the servers' parameters; None until they have told, and where they have several."""
        self._must_send_constant = check is not SyncCheck.OFF and transport.sends_all_weights
        self._constant = False
        """This push is of the constant."""
        self.last_seconds = 0.0
        """Of the last push."""
        self.last_gap: float | None = None
        """Of the last push, the largest of all servers, in nats; None where nothing was compared, and off the main
        rank."""

    def push(self, version: int) -> None:
        """Bring all servers to the model's weights of now; every rank calls it. Raises EngineError.

        `version` is stamped on every later completion.
        """
        began = time.perf_counter()
        if self._must_send_constant:
            self._push(version, "constant", constant=True)
            self._must_send_constant = False
        self._push(version, str(version))
        self.last_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Remove what was left for the servers."""
        self._transport.close()

    async def restore(self, server: VLLMServer, replica: Replica) -> None:
        """Bring a server that was away to the weights that were pushed last. The engine's `Restore`."""
        with self._loop.caller_waits() as at_rest:
            if not at_rest:
                raise ReplicaUnavailableError(server.url, "it gets the weights with the next push")
            try:
                async with asyncio.timeout(self._timeout_s):
                    sample = await self._bring(server, replica)
            except TimeoutError:
                text = (
                    f"it did not take the weights within {self._timeout_s:g} s (a faster --weight_sync_dir helps, such "
                    "as one in /dev/shm, or --weight_sync nccl)"
                )
                raise ReplicaUnavailableError(server.url, text) from None
            if sample is not None:
                if self._has_weights and not is_shared_out(self._model()):
                    self._compare(sample)
                self._samples.append(sample)

    def _push(self, version: int, label: str, *, constant: bool = False) -> None:
        """Push to all servers. Raises WeightSyncError."""
        if self._ranks.is_main and self._dtype is None:
            self._dtype = self._loop.run(self._common_dtype())
        self._constant = constant
        self._transport.prepare(version, self._dtype, constant=constant)
        self._loop.run(self._engine.hold())
        try:
            # Every rank has come to rest before any gets past this.
            self._stamp = self._ranks.broadcast(f"{self._run}/{label}")
            self._version = version
            self._samples.clear()
            self._ours.clear()
            self.last_gap = None
            failure = ""
            if self._ranks.is_main:
                try:
                    self._loop.run(self._send_to_all())
                except EngineError as error:
                    failure = str(error)
            outcome = self._ranks.broadcast(self._outcome(failure))
            if outcome.failure:
                raise WeightSyncError(outcome.failure)
            self._adopt(outcome)
        finally:
            self._loop.run(self._engine.release())
        if is_shared_out(self._model()):
            for sample in outcome.samples:
                self._compare(sample)

    async def _common_dtype(self) -> torch.dtype | None:
        """Ask the servers that are there which dtype all their parameters have; None where it is not one."""
        settings = self._engine.settings
        async with self._engine.settings.client() as client:
            asked = [
                asyncio.wait_for(VLLMServer(replica.url, client).facts(), settings.health_timeout_s)
                for replica in self._engine.fleet.replicas
            ]
            found = await asyncio.gather(*asked, return_exceptions=True)
        workers = [one.dtype for answer in found if not isinstance(answer, BaseException) for one in answer]
        (dtype,) = set(workers) if len(set(workers)) == 1 else ("",)
        return getattr(torch, dtype) if dtype else None

    async def _send_to_all(self) -> None:
        """Send to every server; wait for one when there is none. Raises EngineError."""
        fleet = self._engine.fleet
        wait = Wait(time.monotonic(), self._engine.settings.server_timeout_s)
        async with self._engine.settings.client() as client:
            while True:
                tries = [self._try(client, replica) for replica in fleet.replicas if not replica.is_ready]
                await asyncio.gather(*tries)
                if fleet.ready:
                    return
                keep_waiting(wait, fleet.reasons(), "took the weights")
                await asyncio.sleep(LOOK_S)

    async def _try(self, client: aiohttp.ClientSession, replica: Replica) -> None:
        try:
            await self._engine.bring_up(VLLMServer(replica.url, client), replica)
        except ReplicaUnavailableError:
            return  # the fleet knows the reason, and it may pass

    async def _bring(self, server: VLLMServer, replica: Replica) -> Sample | None:
        """Send the weights, unless the server has them; return what it generates with them, if that is compared."""
        if not self._stamp:
            raise WeightSyncError("no weights have been pushed yet: push them before the first request")
        if await server.weight_version() != self._stamp:
            await self._send(server)
            self._model_name = server.model
        else:
            # Another rank has brought it up to date.
            server.model = self._model_name or server.model
        replica.model, replica.version = server.model, self._version
        if self._constant:
            return None
        tokens = min(PROBE_TOKENS, replica.max_model_len - len(self._probe))
        sampling = Sampling(max(1, tokens), PROBE_TEMPERATURE)
        done = await server.complete(self._probe, sampling, seed=self._version, stop_ids=())
        replica.fingerprint = done.fingerprint
        return Sample(server.url, done.token_ids, done.logprobs)

    async def _send(self, server: VLLMServer) -> None:
        async with self._paused(server):
            # Until they are there, the server has the weights of no version: nobody may take it for one that has.
            await server.set_weight_version(f"{self._stamp} unfinished")
            if self._constant:
                await expect_constant(server, 3 * self._timeout_s)
            await self._transport.send(server)
            if self._constant and (left := await left_behind(server)):
                await give_up_update(server)
                raise self._mismatch(server.url, f"it does not take {', '.join(left)}")
            await server.reset_prefix_cache()
            await server.set_weight_version(self._stamp)

    @asynccontextmanager
    async def _paused(self, server: VLLMServer) -> AsyncIterator[None]:
        """Have a server's requests end first. After a failure, too, it goes on: others may use it.

        What a transport left half done ends the server before (`give_up_update`).
        """
        try:
            await server.pause()
            yield
        except BaseException:
            with suppress(EngineError):  # it may be gone; what went wrong first is what counts
                await server.resume(self._engine.settings.health_timeout_s)
            raise
        await server.resume()

    def _compare(self, sample: Sample) -> None:
        """Compare with the trainer's model. Raises WeightSyncError."""
        if self._check is SyncCheck.OFF:
            return
        if sample.token_ids not in self._ours:
            logprobs = self._logprobs(self._probe, sample.token_ids, PROBE_TEMPERATURE)
            self._ours[sample.token_ids] = logprobs.tolist()
        try:
            found = gap(self._ours[sample.token_ids], sample.logprobs)
            self.last_gap = max(found, self.last_gap or 0.0)
            self._monitor.judge(found)
        except WeightSyncError as error:
            raise self._mismatch(sample.url, str(error)) from None

    def _mismatch(self, url: str, text: str) -> WeightSyncError:
        return WeightSyncError(
            f"{url} does not generate with the trainer's weights after a push by {self._transport.name}: {text}. "
            "Was the server started with the same model, and by `sqlenv inference` (processed logprobs)? Training on "
            "such samples would be wrong, so it stops here"
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
