"""`VLLMEngine`: the policy served by vLLM, over HTTP, by one server or several.

Invariants:

1. An episode stays on one replica, where its prefix is cached. When that one dies, the same request, which carries the
   whole prefix, goes to another: no token is lost, and none is generated twice within an episode.
2. A request only goes to a replica that holds the current weights. One that was away gets them first (`restore_with`);
   a process that was restarted unnoticed is known by its fingerprint, and what it generated is thrown away.
3. Every wait has a deadline. A server that accepts and never answers is taken for dead: by its health check, or, where
   a request waits, because it computes no tokens. One that is only slow is not. With no replica for `server_timeout_s`,
   requests fail with EngineUnavailableError.
4. Retried are lost connections, 429 and 5xx, with growing pauses and jitter. Any other 4xx is a mistake and raises.
5. A cancelled episode cancels its request at the server.
6. Nothing is tied to one event loop between sessions. Using an engine from two loops at a time is an error.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, TypeVar

import aiohttp

from inference.engine import (
    Completion,
    EngineClosedError,
    EngineError,
    Sampling,
    Session,
    check_request,
    in_running_loop,
)
from inference.vllm.api import (
    ReplicaError,
    ReplicaRejectedError,
    ReplicaUnavailableError,
    ServerCompletion,
    VLLMServer,
)
from inference.vllm.fleet import FIRST_PAUSE_S, Fleet, Replica, Wait, pause_s
from inference.vllm.pressure import PressureGauge, computed_tokens

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ATTEMPTS = 8
"""Of a request that servers answer with an error, before it is taken for the cause."""
KEPT_S = 3.0
"""For an idle connection: shorter than vLLM's 5 s, which then never closes one under a request."""
LOOK_SHARE = 0.25
"""Of a request's deadline, between two looks at what its server has computed: with many ranks, they add up."""

Restore = Callable[[VLLMServer, Replica], Awaitable[None]]
"""Brings a server that was away to the current weights, and notes its version in the replica. Raises EngineError."""


class EngineUnavailableError(EngineError):
    """No server has been ready for too long."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """Deadlines in seconds, and who reports."""

    server_timeout_s: float = 240.0
    """How long requests wait for a server when none is ready: for its start, or its return."""
    request_timeout_s: float = 120.0
    """For a turn, since its server last computed a token of any turn; for any other call, from first byte to last."""
    connect_timeout_s: float = 5.0
    health_interval_s: float = 2.0
    """Between two looks at the servers that have requests in flight."""
    health_timeout_s: float = 10.0
    """For a server's word that it is well; a busy one answers, since that is another process than the model's."""
    log_waits: bool = True
    """Whether requests that wait for a server are reported; of many ranks, one is enough."""

    def client(self) -> aiohttp.ClientSession:
        """Return a client with these deadlines, for the running loop; the caller closes it."""
        deadlines = aiohttp.ClientTimeout(self.request_timeout_s, sock_connect=self.connect_timeout_s)
        # As many connections as requests in flight.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
        return aiohttp.ClientSession(connector=connector, timeout=deadlines)


def keep_waiting(wait: Wait, reasons: str, goal: str = "was ready") -> None:
    """Log every few seconds that no server has reached the goal. Raises EngineUnavailableError when time is up."""
    now = time.monotonic()
    if wait.left_s(now) < 0:
        raise EngineUnavailableError(
            f"no inference server {goal} within {wait.limit_s:g} s (--vllm_server_timeout); {reasons}"
        )
    if line := wait.report(now, reasons):
        logger.warning(line)


async def ask_all(urls: Sequence[str], settings: VLLMSettings, ask: Callable[[VLLMServer], Awaitable[T]]) -> list[T]:
    """Ask all servers something, until one answers; return the answers of those that do. Raises EngineError."""
    wait = Wait(time.monotonic(), settings.server_timeout_s)
    async with settings.client() as client:
        while True:
            answers = await asyncio.gather(*(ask(VLLMServer(url, client)) for url in urls), return_exceptions=True)
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            for failure in failures:
                if not isinstance(failure, ReplicaUnavailableError):
                    raise failure
            if found := [answer for answer in answers if not isinstance(answer, BaseException)]:
                return found
            keep_waiting(wait, "; ".join(map(str, failures)))
            await asyncio.sleep(FIRST_PAUSE_S)


class VLLMEngine:
    """An `Engine` on vLLM servers.

    `stop_ids` end a turn; ids of prompts are below `vocab_size`. `max_context` is in tokens, and defaults to what the
    servers allow. `pressure` is told how hard servers are pressed, where anybody wants to know: it costs them a little.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        stop_ids: Sequence[int],
        vocab_size: int,
        max_context: int | None = None,
        settings: VLLMSettings | None = None,
        pressure: PressureGauge | None = None,
    ) -> None:
        self.fleet = Fleet.of(urls)
        self.settings = settings or VLLMSettings()
        self.pressure = pressure
        self._stop_ids = tuple(stop_ids)
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._restore: Restore = _as_it_is
        self._closed = False
        self._state: _LoopState | None = None

    def restore_with(self, restore: Restore) -> None:
        """Have `restore` bring servers that were away to the current weights."""
        self._restore = restore

    def session(self, key: int) -> Session:
        """Open a session; it gets its replica with its first request."""
        return _Session(self, key)

    async def aclose(self) -> None:
        """Fail outstanding requests with EngineClosedError. Idempotent."""
        self._closed = True
        if self._state is not None:
            await self._state.close()

    async def hold(self) -> None:
        """Start no more requests, since the weights are about to change, and wait for those in flight to end."""
        self.fleet.held = True
        for replica in self.fleet.replicas:
            replica.is_ready, replica.reason = False, "it is getting new weights"
        if self._state is not None:
            await self._state.quiet()

    async def release(self) -> None:
        """Go on, with the servers that are ready."""
        self.fleet.held = False
        if self._state is not None:
            self._state.look()

    async def bring_up(self, server: VLLMServer, replica: Replica) -> None:
        """Ask a server that is not ready whether it is well, and have it brought to the current weights.

        Raises EngineError, upon which the replica is down.
        """
        try:
            await server.health(self.settings.health_timeout_s)
            served = await server.served_model()
            replica.max_model_len = served.max_model_len
            replica.model = server.model = served.name
            await self._restore(server, replica)
        except EngineError as error:
            self.lost(replica, str(error))
            raise
        if self._max_context is not None and replica.max_model_len < self._max_context and not replica.is_known_short:
            replica.is_known_short = True
            logger.warning(
                "inference server %s has a context of %d tokens, where episodes may have %d: longer ones lose their "
                "oldest turns earlier (sqlenv inference --max_model_len)",
                replica.url,
                replica.max_model_len,
                self._max_context,
            )
        if self.fleet.joined(replica, replica.version, replica.fingerprint):
            logger.warning("inference server %s is back, on version %d of the weights", replica.url, replica.version)

    def lost(self, replica: Replica, reason: str) -> None:
        """Send no more requests to a replica until it has been brought up again."""
        if self.fleet.lost(replica, reason, time.monotonic()):
            others = len(self.fleet.ready)
            logger.warning("inference server lost: %s; %d others are ready", reason, others)

    def _join(self) -> _LoopState:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._state = in_running_loop(self._state)
        if self._state is None:
            self._state = _LoopState(self)
        self._state.sessions += 1
        return self._state

    async def _leave(self, state: _LoopState) -> None:
        state.sessions -= 1
        if not state.sessions:
            if self._state is state:
                self._state = None
            await state.close()

    async def _generate(
        self, state: _LoopState, replica: Replica | None, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int
    ) -> tuple[Replica, Completion]:
        """Generate on `replica` if it is ready, else on another; returns which one it was."""
        check_request(prompt_ids, sampling, vocab_size=self._vocab_size)
        answered = 0
        while True:
            replica = await state.ready_replica(replica)
            allowed = min(replica.max_model_len, self._max_context or replica.max_model_len)
            check_request(prompt_ids, sampling, max_context=allowed)
            fingerprint, version = replica.fingerprint, replica.version
            try:
                done = await state.request(replica, prompt_ids, sampling, seed, self._stop_ids)
            except ReplicaUnavailableError as error:
                answered += error.answered
                if answered >= MAX_ATTEMPTS:
                    raise
                if error.busy:
                    await asyncio.sleep(pause_s(answered, self.fleet.chance.random()))
                else:
                    self.lost(replica, str(error))
                continue
            if fingerprint is not None and done.fingerprint != fingerprint:
                self.lost(replica, f"{replica.url}: it was restarted, and has lost the weights")
                continue
            return replica, Completion(done.token_ids, done.logprobs, done.finish_reason, version)


class _LoopState:
    """What lives in one event loop while sessions are open: connections, requests, and a watch on the servers."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.loop = asyncio.get_running_loop()
        self.sessions = 0
        self._engine = engine
        self._client = engine.settings.client()
        self._changed = asyncio.Event()
        self._requests: dict[Replica, set[asyncio.Task[ServerCompletion]]] = {r: set() for r in engine.fleet.replicas}
        self._look = asyncio.Event()
        self._bringing = 0
        self._watch = asyncio.create_task(self._watch_servers())
        self._watch.add_done_callback(lambda _: self._changed.set())
        self._closed = False

    async def close(self) -> None:
        """End everything; outstanding requests fail with EngineClosedError."""
        self._closed = True
        self._changed.set()
        tasks = [self._watch, *(task for tasks in self._requests.values() for task in tasks)]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks)
        finally:  # whoever leaves last may be cancelled, too
            await self._client.close()

    def look(self) -> None:
        """Have requests that wait for a server, and the watch, look at the fleet anew."""
        self._changed.set()
        self._look.set()

    async def quiet(self) -> None:
        """Return when no server is being brought up, and no request is in flight."""
        while self._bringing or any(self._requests.values()):
            self._changed.clear()
            await self._changed.wait()

    async def ready_replica(self, preferred: Replica | None) -> Replica:
        """Wait for a replica. Raises EngineUnavailableError, EngineClosedError."""
        fleet = self._engine.fleet
        limit = self._engine.settings.server_timeout_s
        try:
            async with asyncio.timeout(limit):
                while not self._closed:
                    replica = fleet.choose(preferred)
                    if replica is not None:
                        return replica
                    if self._watch.done():
                        await self._watch  # a bug: nobody would bring a server back
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineUnavailableError(
                f"no inference server was ready within {limit:g} s (--vllm_server_timeout); {fleet.reasons()}"
            ) from None
        raise EngineClosedError("the engine was closed while the request was outstanding")

    async def request(
        self, replica: Replica, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, stop_ids: tuple[int, ...]
    ) -> ServerCompletion:
        """Make one request. Raises ReplicaError, also when the watch finds the server dead, and EngineClosedError."""
        server = VLLMServer(replica.url, self._client, replica.model)
        task = asyncio.create_task(server.complete(prompt_ids, sampling, seed, stop_ids, is_bounded=False))
        tasks = self._requests[replica]
        tasks.add(task)
        replica.in_flight += 1
        limit, began = self._engine.settings.request_timeout_s, time.monotonic()
        try:
            while not task.done():
                left = max(began, replica.advanced_at) + limit - time.monotonic()
                if left <= 0:
                    complaint = f"it computed no token within {limit:g} s, and a turn waits for it"
                    raise ReplicaUnavailableError(replica.url, complaint)
                await asyncio.wait([task], timeout=left)
        finally:
            replica.in_flight -= 1
            tasks.discard(task)
            if not tasks:
                self._changed.set()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # retrieved, also where the caller was cancelled and nobody asks for the result
        if task.cancelled():
            if self._closed:
                raise EngineClosedError("the engine was closed while the request was outstanding")
            raise ReplicaUnavailableError(replica.url, replica.reason)
        return task.result()

    async def _watch_servers(self) -> None:
        """Look after the servers in use, and bring back those that were away."""
        engine, fleet = self._engine, self._engine.fleet
        look_at, wait = time.monotonic(), None
        while True:
            now = time.monotonic()
            work = [self._bring_up(replica) for replica in fleet.due(now)]
            if now >= look_at:
                work += [self._look_at(replica) for replica in fleet.ready if replica.in_flight]
                look_at = now + engine.settings.health_interval_s
            if work:
                await asyncio.gather(*work)
                self._changed.set()
            if fleet.ready or fleet.held or not engine.settings.log_waits:
                wait = None
            else:
                wait = wait or Wait(now, engine.settings.server_timeout_s)
                with suppress(EngineUnavailableError):  # each request has its own deadline
                    keep_waiting(wait, fleet.reasons())
            wake = min(look_at, fleet.next_due() or math.inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wake - time.monotonic())):
                    await self._look.wait()
            self._look.clear()

    async def _bring_up(self, replica: Replica) -> None:
        self._bringing += 1
        try:
            await self._engine.bring_up(VLLMServer(replica.url, self._client), replica)
        except ReplicaUnavailableError:
            return  # the fleet says when to try again
        except EngineError as error:
            logger.error("inference server %s cannot be used: %s", replica.url, error)
        finally:
            self._bringing -= 1
            self._changed.set()

    async def _look_at(self, replica: Replica) -> None:
        settings, pressure = self._engine.settings, self._engine.pressure
        server = VLLMServer(replica.url, self._client)
        try:
            await server.health(settings.health_timeout_s)
        except (ReplicaUnavailableError, ReplicaRejectedError) as error:
            self._engine.lost(replica, str(error))
            for task in self._requests[replica]:
                task.cancel()
            return
        if pressure is None and time.monotonic() < replica.counted_at + settings.request_timeout_s * LOOK_SHARE:
            return
        with suppress(ReplicaError):  # one that does not tell is as well as others
            metrics = await server.metrics(settings.health_timeout_s)
            replica.counted(computed_tokens(metrics), time.monotonic())
            if pressure is not None:
                pressure.add(replica.url, metrics)


class _Session:
    """One episode's use of the engine."""

    def __init__(self, engine: VLLMEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._state: _LoopState | None = None
        self._replica: Replica | None = None
        self._busy = False

    async def __aenter__(self) -> Self:
        self._state = self._engine._join()
        return self

    async def __aexit__(self, *exc: object) -> None:
        state, self._state = self._state, None
        if state is not None:
            await self._engine._leave(state)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Generate one turn; see `Session.generate`. Raises EngineError."""
        if self._state is None:
            raise EngineError("the session is not open: use `async with engine.session(key)`")
        if self._engine._closed:
            raise EngineClosedError("the engine is closed")
        if self._busy:
            raise EngineError(f"session {self._key} has a request outstanding: one at a time")
        self._busy = True
        try:
            self._replica, completion = await self._engine._generate(
                self._state, self._replica, tuple(prompt_ids), sampling, seed
            )
        finally:
            self._busy = False
        return completion


async def _as_it_is(server: VLLMServer, replica: Replica) -> None:
    """Take the weights that a server was started with."""
