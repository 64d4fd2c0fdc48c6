"""`SimulatedEngine`: an `Engine` without a model, for rehearsals and tests of whoever uses engines.

How long a request takes follows from a model of batched servers (`profile`, `replica`); what is said follows from a
policy that is a function. Everything waits by the event loop's clock, and nothing runs in threads.

Invariants:

1. The same requests at the same times, on the loop's clock, end at the same times with the same tokens.
2. A session stays on one replica, where its prefix is cached, and moves when that one dies: what it asked for is then
   generated from its whole prefix on another, and no request fails as long as one is back within `server_timeout_s`.
3. A request ends exactly once: with its completion, with an EngineError, or cancelled, which frees its place.
4. Nothing is tied to one event loop between sessions. Using an engine from two loops at a time is an error.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from inference.engine import (
    Completion,
    EngineClosedError,
    EngineError,
    FinishReason,
    Sampling,
    Session,
    check_request,
    in_running_loop,
)
from inference.simulated.profile import Faults, ServerProfile
from inference.simulated.replica import Job, Replica, Usage


class SimulatedOutageError(EngineError):
    """No replica has been up for too long."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a policy is asked: the words of turn number `turn`, from 0, of the session `key`."""

    key: int
    turn: int
    prompt_ids: tuple[int, ...]
    seed: int


Policy = Callable[[Asked], Sequence[int]]
"""Says a turn's ids, its end included where it is to have one; the same question has the same answer."""


class SimulatedEngine:
    """An `Engine` of `replicas` simulated servers.

    A turn ends with one of `stop_ids`, or where its tokens are used up.
    """

    def __init__(
        self,
        policy: Policy,
        profile: ServerProfile,
        *,
        stop_ids: Sequence[int],
        replicas: int = 1,
        max_context: int | None = None,
        faults: Faults | None = None,
        server_timeout_s: float = 240.0,
    ) -> None:
        if replicas < 1:
            raise ValueError(f"there must be at least one replica, not {replicas}")
        self.profile = profile
        self._policy = policy
        self._stop_ids = frozenset(stop_ids)
        self._max_context = max_context
        self._faults = faults or Faults()
        self._server_timeout_s = server_timeout_s
        self._replicas = [_Server(index, Replica(profile), self._faults) for index in range(replicas)]
        self._version = 0
        # Scripts say the same again and again; the engine's work is not to be in the way of the client's.
        self._logprobs = lru_cache(maxsize=8_192)(_logprobs)
        self._closed = False
        self._state: _LoopState | None = None

    def session(self, key: int) -> Session:
        """Open a session on entering it; it gets its replica with its first request."""
        return _Session(self, key)

    async def aclose(self) -> None:
        """Fail outstanding requests with EngineClosedError. Idempotent."""
        self._closed = True
        if self._state is not None:
            self._state.close()

    def set_policy_version(self, version: int) -> None:
        """Stamp later completions with `version`."""
        self._version = version

    @property
    def usage(self) -> list[Usage]:
        """What each replica has done so far."""
        if self._state is not None:
            self._state.wake()
        return [server.replica.usage for server in self._replicas]

    def kill(self, index: int) -> None:
        """Have a replica die with all that it holds, until `revive`."""
        if self._state is None:
            raise EngineError("a replica can only die while sessions are open")
        self._state.kill(self._replicas[index])

    def revive(self, index: int) -> None:
        """Have a replica come back, empty."""
        if self._state is None:
            raise EngineError("a replica can only come back while sessions are open")
        self._state.revive(self._replicas[index])

    def _join(self) -> _LoopState:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        self._state = in_running_loop(self._state)
        if self._state is None:
            self._state = _LoopState(self._replicas, self._server_timeout_s, self._faults.restart_s)
        self._state.sessions += 1
        return self._state

    def _leave(self, state: _LoopState) -> None:
        state.sessions -= 1
        if not state.sessions:
            if self._state is state:
                self._state = None
            state.close()

    def _completion(self, asked: Asked, sampling: Sampling) -> Completion:
        """What the policy says, cut to what may be said."""
        said = tuple(self._policy(asked))[: sampling.max_new_tokens]
        if not said:
            raise EngineError(f"the policy says nothing in turn {asked.turn} of session {asked.key}")
        reason = FinishReason.STOP if said[-1] in self._stop_ids else FinishReason.LENGTH
        return Completion(said, self._logprobs(said), reason, self._version)


class _Server:
    """A replica, who waits for it, and when it will fail."""

    def __init__(self, index: int, replica: Replica, faults: Faults) -> None:
        self.replica = replica
        self.waiting: dict[Job, asyncio.Future[bool]] = {}
        self.chance = random.Random(f"{faults.seed}/{index}")
        self.mean_uptime_s = faults.mean_uptime_s
        self.dies_at = math.inf
        self.returns_at = math.inf
        self.last_opening: tuple[int, ...] = ()
        """The latest first prompt of an episode: the next one shares what stands before its question."""
        self.openings: set[int] = set()
        """Hashes of first prompts that it has read: a group's episodes begin with the same one."""

    def begin(self, now: float) -> None:
        """Begin on a loop's clock: idle, with nothing cached."""
        self.replica.begin(now)
        self._forget()
        self.returns_at = math.inf
        self.dies_at = self._next_death(now)

    def stop(self, now: float) -> None:
        """Die; whoever waits is told so."""
        self._forget()
        self.dies_at = math.inf
        for job in self.replica.stop(now):
            self._tell(job, done=False)

    def start(self, now: float) -> None:
        self.replica.start(now)
        self.returns_at = math.inf
        self.dies_at = self._next_death(now)

    def advance(self, now: float) -> None:
        """Go on to a time, and tell those whose requests have ended."""
        for job in self.replica.advance(now):
            self._tell(job, done=True)

    def uncached(self, prompt_ids: tuple[int, ...], known: tuple[int, ...]) -> int:
        """How many tokens of a prompt must be read; `known` is what its session has here already."""
        if known and prompt_ids[: len(known)] == known:
            return len(prompt_ids) - len(known)
        opening = hash(prompt_ids)
        if opening in self.openings:
            return 1
        self.openings.add(opening)
        cached = shared(prompt_ids, self.last_opening)
        self.last_opening = prompt_ids
        return max(1, len(prompt_ids) - cached)

    def _tell(self, job: Job, *, done: bool) -> None:
        future = self.waiting.pop(job, None)
        if future is not None and not future.done():
            future.set_result(done)

    def _forget(self) -> None:
        self.last_opening = ()
        self.openings.clear()

    def _next_death(self, now: float) -> float:
        return now + (self.chance.expovariate(1.0 / self.mean_uptime_s) if self.mean_uptime_s < math.inf else math.inf)


class _LoopState:
    """What lives in one event loop while sessions are open: one timer, and who waits for a server's return."""

    def __init__(self, servers: Sequence[_Server], server_timeout_s: float, restart_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.sessions = 0
        self._servers = servers
        self._server_timeout_s = server_timeout_s
        self._restart_s = restart_s
        self._returned = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._closed = False
        for server in servers:
            server.begin(self.loop.time())

    def close(self) -> None:
        """End everything; outstanding requests fail with EngineClosedError."""
        self._closed = True
        self._returned.set()
        if self._timer is not None:
            self._timer.cancel()
        for server in self._servers:
            for future in server.waiting.values():
                if not future.done():
                    future.set_exception(EngineClosedError("the engine was closed while the request was outstanding"))
            server.waiting.clear()

    async def server(self, preferred: _Server | None) -> _Server:
        """Wait for a server that is up. Raises SimulatedOutageError, EngineClosedError."""
        try:
            async with asyncio.timeout(self._server_timeout_s):
                while not self._closed:
                    if preferred is not None and preferred.replica.is_up:
                        return preferred
                    up = [server for server in self._servers if server.replica.is_up]
                    if up:
                        return min(up, key=lambda server: server.replica.in_flight)
                    self._returned.clear()
                    await self._returned.wait()
        except TimeoutError:
            raise SimulatedOutageError(f"no replica was up within {self._server_timeout_s:g} s") from None
        raise EngineClosedError("the engine was closed while the request was outstanding")

    async def run(self, server: _Server, job: Job) -> bool:
        """Have a job done; False when the server died. Raises EngineClosedError."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        future: asyncio.Future[bool] = self.loop.create_future()
        now = self.loop.time()
        if now >= self._timer_at:
            self._settle(now)  # something is due, and its timer has not fired yet
        server.advance(now)
        server.waiting[job] = future
        server.replica.submit(now, job)
        self._set_timer()
        try:
            return await future
        finally:
            if server.waiting.pop(job, None) is not None:
                self._settle(self.loop.time())
                server.replica.withdraw(job)
                self._set_timer()  # the others are faster now

    def wake(self) -> None:
        """Do what is due, and set the timer for what comes next."""
        self._settle(self.loop.time())
        self._set_timer()

    def kill(self, server: _Server) -> None:
        server.stop(self._settle(self.loop.time()))
        self._set_timer()

    def revive(self, server: _Server) -> None:
        server.start(self._settle(self.loop.time()))
        self._returned.set()

    def _on_timer(self) -> None:
        # A timer may fire a hair early; the time that it was set for has come all the same.
        self._timer = None
        self._settle(max(self.loop.time(), self._timer_at))
        self._set_timer()

    def _settle(self, now: float) -> float:
        """Bring every server to a time, through the failures that are due by then."""
        while True:
            due = min(min(server.dies_at, server.returns_at) for server in self._servers)
            until = min(now, due)
            for server in self._servers:
                server.advance(until)
            if due > now:
                return now
            for server in self._servers:
                if server.dies_at <= due:
                    server.stop(due)
                    server.returns_at = due + self._restart_s
                elif server.returns_at <= due:
                    server.start(due)
                    self._returned.set()

    def _set_timer(self) -> None:
        """Wake at the next event. A timer that fires too early only looks again, so a later event moves none."""
        at = min(min(s.replica.next_event(), s.dies_at, s.returns_at) for s in self._servers)
        if self._closed or at == math.inf or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_at(at, self._on_timer)


class _Session:
    """One episode's use of the engine."""

    def __init__(self, engine: SimulatedEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._state: _LoopState | None = None
        self._server: _Server | None = None
        self._known: tuple[int, ...] = ()
        """What the server has in its cache of this session."""
        self._turns = 0
        self._busy = False

    async def __aenter__(self) -> Self:
        self._state = self._engine._join()
        return self

    async def __aexit__(self, *exc: object) -> None:
        state, self._state = self._state, None
        if state is not None:
            self._engine._leave(state)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Generate one turn; see `Session.generate`. Raises EngineError."""
        if self._state is None:
            raise EngineError("the session is not open: use `async with engine.session(key)`")
        if self._engine._closed:
            raise EngineClosedError("the engine is closed")
        if self._busy:
            raise EngineError(f"session {self._key} has a request outstanding: one at a time")
        check_request(prompt_ids, sampling, max_context=self._engine._max_context)
        completion = self._engine._completion(Asked(self._key, self._turns, prompt_ids, seed), sampling)
        self._busy = True
        try:
            await self._run(self._state, prompt_ids, len(completion.token_ids), seed)
        finally:
            self._busy = False
        self._known = (*prompt_ids, *completion.token_ids[:-1])
        self._turns += 1
        return completion

    async def _run(self, state: _LoopState, prompt_ids: tuple[int, ...], tokens: int, seed: int) -> None:
        """Sit out what a turn takes, on another server where the first one fails."""
        faults = self._engine._faults
        chance = random.Random(f"{faults.seed}/{self._key}/{seed}") if faults.request_share else None
        while True:
            server = await state.server(self._server)
            if server is not self._server:
                self._server, self._known = server, ()
            lost = chance is not None and chance.random() < faults.request_share
            share = chance.random() if lost and chance is not None else 1.0
            job = Job(server.uncached(prompt_ids, self._known), max(1, round(tokens * share)))
            if await state.run(server, job) and not lost:
                return
            self._known = ()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two prompts begin with together."""
    for number, (mine, yours) in enumerate(zip(one, other, strict=False)):
        if mine != yours:
            return number
    return min(len(one), len(other))


def _logprobs(said: tuple[int, ...]) -> tuple[float, ...]:
    """Logprobs that look like some, each its token's own: -0.02 to -1.27."""
    return tuple(-0.02 - (token * 2_654_435_761 % 1_000) / 800 for token in said)
