"""Weight sync: every server gets the trainer's weights before it gets requests, and what it got is proved.

A push gathers the weights (every rank takes part). No rank starts another request, and those in flight end first.
Then the main rank goes to all servers at once: pause, send, forget the prefix cache, mark the version, resume, generate
a probe. The probe's logprobs are compared with the trainer's own.

Promises:
- Episodes may be in flight. A turn is stamped with the version that its request began under, which is that of all its
  tokens.
- A server that comes back is brought to the last weights when the trainer waits, and not while it changes them: then
  the next push does it.
- No server generates with earlier weights while another has the new ones: one that fails is left out until it has
  been brought up to date. When all fail, the push waits for one to come back, then gives up with one message.
- The first push proves the transport (`proof`): a server that takes only some of the tensors would pass a comparison of
  weights that it had anyway. What it measures of the noise between trainer and server bounds what later pushes may
  differ by.
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
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import httpx
import torch
from torch import nn

from inference.engine import EngineError, Sampling
from inference.vllm.api import ReplicaUnavailableError, VLLMServer
from inference.vllm.engine import VLLMEngine, keep_waiting
from inference.vllm.fleet import Replica, Wait
from inference.weights.device_facts import ask
from inference.weights.gather import is_shared_out
from inference.weights.perturb import Perturbation, PerturbError, perturbed
from inference.weights.probe import gap
from inference.weights.proof import HARMLESS, PROBE_TEMPERATURE, PROOF_TOKENS, Evidence, Logprobs, Prover, Sample
from inference.weights.ranks import Loop, OneRank, OwnLoop, Ranks
from inference.weights.transport import SERVER_S, Transport, WeightSyncError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_TOKENS = 32
"""That a server generates after each push."""
LOOK_S = 0.5
"""Between two looks for a server, when there is none."""
NOISE_MARGIN = 5.0
"""How many times the noise of the start later samples may show: they are shorter, and single tokens stand out."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the other ranks need to know of a push."""

    failure: str
    samples: tuple[Sample, ...]
    replicas: tuple[tuple[bool, str, int, str | None, str], ...]


class WeightPusher:
    """Pushes what `model` returns to the engine's servers by `transport`.

    `logprobs` are the model's own; they are compared on what the servers generate after `probe`, a prompt.
    `unrounded` are those without autocast, where there is any.
    `loop` is where the engine's sessions are.
    `has_weights`: this rank holds them before the model is sharded. `on_proof` is told, on the main rank, what the
    proof at the start found.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        engine: VLLMEngine,
        transport: Transport,
        logprobs: Logprobs,
        probe: Sequence[int],
        *,
        unrounded: Logprobs | None = None,
        ranks: Ranks | None = None,
        loop: Loop | None = None,
        timeout_s: float = SERVER_S,
        has_weights: bool = True,
        on_proof: Callable[[Sequence[Evidence]], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._transport = transport
        self._logprobs = logprobs
        self._probe = tuple(probe)
        self._unrounded = unrounded or logprobs
        self._ranks = ranks or OneRank()
        self._loop = loop or OwnLoop()
        self._timeout_s = timeout_s
        self._has_weights = has_weights
        self._on_proof = on_proof
        self._run = uuid.uuid4().hex[:12]
        self._stamp = ""
        self._version = 0
        self._samples: list[Sample] = []
        self._ours: dict[tuple[int, ...], list[float]] = {}
        """The model's logprobs of what was generated since the last push: servers that are alike generate the same."""
        self._model_name = ""
        self._dtype: torch.dtype | None = None
        """Of all the servers' parameters; None until they have told, and where they have several."""
        self._bound: float | None = None
        """For the root mean square of later differences; none before the proof."""
        self._probe_tokens = PROOF_TOKENS
        self.last_seconds = 0.0
        """Of the last push, the proof included."""

    def push(self, version: int) -> None:
        """Bring all servers to the model's weights of now; every rank calls it. Raises EngineError.

        `version` is stamped on every later completion.
        """
        began = time.perf_counter()
        if self._bound is None:
            self._prove(version)
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
                    f"it did not take the weights within {self._timeout_s:g} s (a faster --weight_sync_dir helps, or "
                    "--weight_sync nccl)"
                )
                raise ReplicaUnavailableError(server.url, text) from None
            if self._has_weights and not is_shared_out(self._model()):
                self._check(sample)
            self._samples.append(sample)

    def _prove(self, version: int) -> None:
        """Measure the noise, then push changed weights and compare; see `proof`. Raises EngineError."""
        adapter = self._transport.name == "lora"
        prover = Prover(self._model(), self._logprobs, self._unrounded, self._probe, trainable_only=adapter)
        samples = self._push(version, "start")
        noises = self._agreed(lambda: [self._blaming(sample, prover.distance) for sample in samples])
        noise = max(noises)
        try:
            scales = self._agreed(lambda: self._blaming(samples[0], lambda sample: prover.scales(sample, noise)))
            with perturbed(self._model(), scales, trainable_only=adapter) as changes:
                samples = self._push(version, "perturbed")
                found = self._agreed(
                    lambda: [
                        self._blaming(sample, lambda one: self._examine(prover, one, noise, changes))
                        for sample in samples
                    ]
                )
        except PerturbError as error:
            logger.warning("only the weights themselves are compared with the servers': %s", error)
        else:
            before = self._agreed(lambda: [self._blaming(sample, prover.distance) for sample in samples])
            found = [replace(one, without_changes=value) for one, value in zip(found, before, strict=True)]
            self._conclude(found)
            noise = max(noise, *(one.with_changes for one in found))
        self._probe_tokens = PROBE_TOKENS
        self._bound = max(HARMLESS, NOISE_MARGIN * noise)

    def _examine(self, prover: Prover, sample: Sample, noise: float, changes: Perturbation) -> Evidence:
        found = prover.examine(sample, noise, changes)
        if not found.lacking:
            return found
        again = self._loop.run(self._generate_again(sample))
        return replace(found, lacking=prover.confirmed(again, found.lacking, changes))

    async def _generate_again(self, sample: Sample) -> Sample:
        """Have the server of a sample generate as many tokens again, from another seed. Raises EngineError."""
        sampling = Sampling(len(sample.token_ids), PROBE_TEMPERATURE)
        async with self._engine.settings.client() as client:
            server = VLLMServer(sample.url, client)
            server.model = self._model_name
            done = await server.complete(self._probe, sampling, seed=self._version + 1, stop_ids=())
        return Sample(sample.url, done.token_ids, done.logprobs)

    def _conclude(self, found: Sequence[Evidence]) -> None:
        for evidence in found:
            if complaint := evidence.complaint():
                raise self._mismatch(evidence.url, complaint)
        if not self._ranks.is_main:
            return
        if unseen := found[0].unseen:
            logger.warning(
                "of %d tensors, such as %s, the weight push's proof shows nothing: what they do to the probe is lost "
                "in the noise of %.2g between trainer and server",
                len(unseen),
                unseen[0],
                found[0].noise,
            )
        self._on_proof(found)

    def _agreed(self, work: Callable[[], T]) -> T:
        """Do what needs the model's forward pass: on every rank if it is shared out, else on the main one for all.

        Raises WeightSyncError on every rank.
        """
        failure, value = "", None
        if self._ranks.is_main or is_shared_out(self._model()):
            try:
                value = work()
            except EngineError as error:
                failure = str(error)
        failure, value = self._ranks.broadcast((failure, value))
        if failure:
            raise WeightSyncError(failure)
        return cast(T, value)

    def _push(self, version: int, label: str) -> tuple[Sample, ...]:
        """Push to all servers; returns what each that took the weights generated. Raises WeightSyncError."""
        if self._ranks.is_main and self._dtype is None:
            self._dtype = self._loop.run(self._common_dtype())
        self._transport.prepare(version, self._dtype)
        self._loop.run(self._engine.hold())
        try:
            # Every rank has come to rest before any gets past this.
            self._stamp = self._ranks.broadcast(f"{self._run}/{label}")
            self._version = version
            self._samples.clear()
            self._ours.clear()
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
                self._check(sample)
        return outcome.samples

    async def _common_dtype(self) -> torch.dtype | None:
        """Ask the servers that are there which dtype all their parameters have; None where it is not one."""
        settings = self._engine.settings
        async with self._engine.settings.client() as client:
            asked = [
                asyncio.wait_for(ask(VLLMServer(replica.url, client)), settings.health_timeout_s)
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
        tokens = min(self._probe_tokens, replica.max_model_len - len(self._probe))
        sampling = Sampling(max(1, tokens), PROBE_TEMPERATURE)
        done = await server.complete(self._probe, sampling, seed=self._version, stop_ids=())
        replica.version, replica.fingerprint = self._version, done.fingerprint
        return Sample(server.url, done.token_ids, done.logprobs)

    async def _send(self, server: VLLMServer) -> None:
        async with self._paused(server):
            # Until they are there, the server has the weights of no version: nobody may take it for one that has.
            await server.set_weight_version(f"{self._stamp} unfinished")
            await self._transport.send(server)
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

    def _check(self, sample: Sample) -> None:
        """Compare with the trainer's model. Raises WeightSyncError."""
        if self._bound is None:
            return  # the proof is under way, and does it
        if sample.token_ids not in self._ours:
            with torch.no_grad():
                logprobs = self._logprobs(self._probe, sample.token_ids, PROBE_TEMPERATURE)
            self._ours[sample.token_ids] = logprobs.tolist()
        found = self._blaming(sample, lambda one: gap(self._ours[one.token_ids], one.logprobs))
        if found.rms > self._bound:
            raise self._mismatch(sample.url, f"{found}, where at most {self._bound:.3g} is noise")

    def _blaming(self, sample: Sample, work: Callable[[Sample], T]) -> T:
        """Do something with a sample, and let what goes wrong name its server. Raises WeightSyncError."""
        try:
            return work(sample)
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
