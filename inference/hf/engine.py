"""`HFEngine`: the policy served by transformers, in the trainer's process.

Open sessions submit requests; requests that wait together are decoded together (`batching` decides which, `cached` does
it) in one worker thread, so the event loop stays free and environments step while others generate. The keys and values
of a session's ids are kept for its next turn, which begins with them; where a model does not let that be done, or it is
not wanted, each turn reads its whole prompt (`generate`).

Invariants:

1. One batch at a time, always in the same thread; the model is in eval mode during a batch and every module
   has its former mode afterwards.
2. When no session is open, nothing is running: the caller may train.
3. A request ends exactly once: with its completion, with an EngineError, or cancelled. A cancelled request
   does not disturb its batch, and a failed batch fails its own requests only.
4. Nothing is tied to one event loop between sessions: consecutive `asyncio.run` calls may use one engine. Using
   it from two loops at a time is an error.
5. A batch that memory does not suffice for is decoded in halves, and so are later ones; a row's tokens do not depend
   on the rows beside it. Before that, less is kept of other sessions. It is said in one line. One row that does not fit
   fails its request.
6. A completion carries the policy version that was set when its batch started: whoever changes the weights calls
   `set_policy_version`, and nothing that was kept before is used after it.
7. Nothing is kept when no session is open.
8. A row that has ended is handed over at once, so that its environment steps while others are still generated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from transformers import PreTrainedModel

from inference.engine import (
    Completion,
    EngineClosedError,
    EngineError,
    Sampling,
    Session,
    check_request,
    in_running_loop,
)
from inference.hf.batching import Batcher, Start
from inference.hf.cached import CachedDecoder
from inference.hf.decoding import Decoded, Row
from inference.hf.generate import decode
from inference.hf.packed import UnsupportedModelError, refusal
from inference.out_of_memory import is_out_of_memory, release

_LOG = logging.getLogger(__name__)
_OnEnd = Callable[[Row, Decoded], None]

KV_CACHE_BYTES = 4 * 2**30
"""What an engine keeps between turns, unless told otherwise: 93,000 tokens of SmolLM2-135M in float32."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A row and who waits for it."""

    key: int
    row: Row
    future: asyncio.Future[Completion]

    def fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        self.row.cancelled.set()
        if not self.future.done():
            error.__cause__ = cause
            self.future.set_exception(error)


class _LoopState:
    """What lives in one event loop while sessions are open."""

    def __init__(self, batcher: Batcher) -> None:
        self.loop = asyncio.get_running_loop()
        self.batcher = batcher
        self.waiting: dict[int, _Request] = {}
        self.running: list[_Request] = []
        self.batch: asyncio.Future[list[Decoded | None]] | None = None
        self.wakeup: asyncio.Handle | None = None


class HFEngine:
    """An `Engine` that decodes with a Hugging Face causal language model in this process.

    `stop_ids` end a turn; `pad_id` fills short rows and is never seen by the model. A batch holds at most
    `max_batch` requests and waits at most `linger_s` seconds for sessions that are busy elsewhere: as long as none
    is busy for longer, a batch's composition, and so every bit of a run, does not depend on timing. The default
    leaves room for an overloaded machine, and is shorter than the environment's deadline for a query.
    `max_context` is in tokens and defaults to the model's `max_position_embeddings`. `generation_context`
    is entered once per batch, in the worker thread, and yields the model to use (TRL's
    `unwrap_model_for_generation`). At most `kv_cache_bytes` of keys and values are kept between turns; with 0, each
    turn reads its whole prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Sequence[int],
        pad_id: int,
        max_batch: int = 64,
        max_context: int | None = None,
        linger_s: float = 2.0,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        generation_context: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self._vocab_size: int = config.vocab_size
        self._max_context: int = config.max_position_embeddings if max_context is None else max_context
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._max_batch = max_batch
        self._max_rows = max_batch
        self._linger_s = linger_s
        self._generation_context = generation_context or (lambda: nullcontext(model))
        self._version = 0
        self._weights = 0  # how often they have changed
        self._cached = CachedDecoder(kv_cache_bytes) if kv_cache_bytes else None
        if kv_cache_bytes and (reason := refusal(model)):
            self._read_whole_prompts(reason)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")
        self._closed = False
        self._state: _LoopState | None = None
        self._new_batcher()  # refuses bad values here rather than in the first session

    def session(self, key: int) -> Session:
        """Open a session on entering it; `key` orders sessions within a batch."""
        return _Session(self, key)

    def set_policy_version(self, version: int) -> None:
        """Stamp later completions with `version`, and forget what the weights before it have computed."""
        self._version = version
        self._weights += 1

    async def aclose(self) -> None:
        """Fail outstanding requests with EngineClosedError, wait for the worker, end its thread. Idempotent.

        Raises EngineError when another event loop has open sessions.
        """
        self._closed = True
        state = self._current()
        if state is not None:
            for request in [*state.waiting.values(), *state.running]:
                request.fail(EngineClosedError("the engine was closed while the request was outstanding"))
            if state.batch is not None:
                await asyncio.wait([state.batch])
        self._executor.shutdown()

    def _new_batcher(self) -> Batcher:
        return Batcher(self._max_batch, self._linger_s)

    def _current(self) -> _LoopState | None:
        """Return the running loop's state, dropping what a dead loop left behind; raises EngineError."""
        state = in_running_loop(self._state)
        if state is None and self._state is not None:
            for request in self._state.running:
                request.row.cancelled.set()
            self._state = None
        return state

    def _join(self, key: int) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        state = self._current()
        if state is None:
            state = self._state = _LoopState(self._new_batcher())
        try:
            state.batcher.join(key)
        except ValueError as error:
            raise EngineError(str(error)) from error

    async def _leave(self, key: int) -> None:
        state = self._current()
        if state is None:
            return
        state.batcher.leave(key)
        self._schedule(state)
        if not state.batcher.sessions and state.batch is not None:
            await asyncio.wait([state.batch])
        self._release(state)

    def _release(self, state: _LoopState) -> None:
        """Let go of the loop when nothing is open or running in it."""
        if self._state is state and not state.batcher.sessions and state.batch is None:
            if state.wakeup is not None:
                state.wakeup.cancel()
            self._state = None
            if self._cached is not None:
                self._cached.clear()

    async def _generate(self, key: int, row: Row) -> Completion:
        state = self._current()
        if self._closed or state is None:
            raise EngineClosedError("the engine is closed")
        sampling = Sampling(row.max_new_tokens, row.temperature)
        check_request(row.prompt_ids, sampling, vocab_size=self._vocab_size, max_context=self._max_context)
        if key in state.waiting or any(r.key == key and not r.future.done() for r in state.running):
            raise EngineError(f"session {key} has a request outstanding: one at a time")
        request = _Request(key, row, state.loop.create_future())
        state.waiting[key] = request
        state.batcher.submit(key, state.loop.time())
        self._schedule(state)
        try:
            return await request.future
        finally:
            row.cancelled.set()
            if state.waiting.get(key) is request:
                del state.waiting[key]
                state.batcher.withdraw(key)
                self._schedule(state)

    def _schedule(self, state: _LoopState) -> None:
        """Decide about the next batch once everything that is ready now has run."""
        if state.wakeup is not None:
            state.wakeup.cancel()
        state.wakeup = state.loop.call_soon(self._pump, state)

    def _pump(self, state: _LoopState) -> None:
        state.wakeup = None
        if self._closed:
            return
        decision = state.batcher.poll(state.loop.time())
        if isinstance(decision, Start):
            self._start(state, decision.keys)
        elif decision.deadline < math.inf:
            state.wakeup = state.loop.call_at(decision.deadline, self._pump, state)

    def _start(self, state: _LoopState, keys: Sequence[int]) -> None:
        state.running = [state.waiting.pop(key) for key in keys]
        rows = [request.row for request in state.running]
        requests = {id(request.row): request for request in state.running}
        version = self._version

        def on_end(row: Row, decoded: Decoded) -> None:
            """Hand a row over while others go on; in the worker thread."""
            with suppress(RuntimeError):  # nobody waits in a loop that is closed
                state.loop.call_soon_threadsafe(self._deliver, requests[id(row)], decoded, version)

        decoding = partial(self._decode, rows, self._weights, state.batcher.open_keys, on_end)
        state.batch = state.loop.run_in_executor(self._executor, decoding)
        state.batch.add_done_callback(partial(self._finish, state, version))

    def _decode(
        self, rows: Sequence[Row], weights: int, open_keys: Collection[int], on_end: _OnEnd
    ) -> list[Decoded | None]:
        """Run one batch; in the worker thread."""
        with self._generation_context() as model, evaluating(model), _on_device(model.device):
            decoded: list[Decoded | None] = []
            while len(decoded) < len(rows):
                part = rows[len(decoded) : len(decoded) + self._max_rows]
                others = self._cached.kept_besides([row.key for row in part]) if self._cached is not None else 0
                try:
                    decoded += self._decode_part(model, part, weights, open_keys, on_end)
                    continue
                except UnsupportedModelError as error:
                    self._read_whole_prompts(str(error))
                    continue
                except RuntimeError as error:
                    if not is_out_of_memory(error) or (len(part) == 1 and not others):
                        raise
                    words = release(error)
                self._use_less_memory(len(part), others, words)
            return decoded

    def _decode_part(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        weights: int,
        open_keys: Collection[int],
        on_end: _OnEnd,
    ) -> list[Decoded | None]:
        if self._cached is None:
            return decode(model, rows, stop_ids=self._stop_ids, pad_id=self._pad_id)
        return self._cached.decode(
            model, rows, stop_ids=self._stop_ids, weights=weights, open_keys=open_keys, on_end=on_end
        )

    def _use_less_memory(self, rows: int, others: int, words: str) -> None:
        """After `rows` did not fit beside `others` bytes that are kept of other sessions: keep less, or take fewer."""
        if self._cached is not None and others:
            self._cached.limit = others // 2
            _LOG.warning(
                "generation ran out of memory beside %.1f MiB of keys and values of other episodes; "
                "it goes on with at most %.1f MiB of them (%s)",
                *(others / 2**20, self._cached.limit / 2**20, words),
            )
            return
        self._max_rows = (rows + 1) // 2
        _LOG.warning(
            "generation ran out of memory with %d episodes at a time; it goes on with %d (%s)",
            *(rows, self._max_rows, words),
        )

    def _read_whole_prompts(self, reason: str) -> None:
        self._cached = None
        _LOG.warning("each turn reads its whole prompt, for this model's keys and values cannot be kept: %s", reason)

    def _finish(self, state: _LoopState, version: int, batch: asyncio.Future[list[Decoded | None]]) -> None:
        requests, state.running, state.batch = state.running, [], None
        state.batcher.finish(state.loop.time())
        error = batch.exception()
        if error is None:
            for request, decoded in zip(requests, batch.result(), strict=True):
                self._deliver(request, decoded, version)
        else:
            # The frames hold the batch's tensors, and the error may be recorded for long.
            traceback.clear_frames(error.__traceback__)
            for request in requests:
                request.fail(EngineError(f"generation failed: {type(error).__name__}: {error}"), cause=error)
        self._schedule(state)
        self._release(state)

    def _deliver(self, request: _Request, decoded: Decoded | None, version: int) -> None:
        if decoded is None or request.future.done():
            return
        request.future.set_result(Completion(decoded.token_ids, decoded.logprobs, decoded.finish_reason, version))


class _Session:
    """One episode's use of the engine."""

    def __init__(self, engine: HFEngine, key: int) -> None:
        self._engine = engine
        self._key = key
        self._open = False

    async def __aenter__(self) -> Self:
        self._engine._join(self._key)
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        await self._engine._leave(self._key)

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Completion:
        """Generate one turn; see `Session.generate`. Raises EngineError."""
        if not self._open:
            raise EngineError("the session is not open: use `async with engine.session(key)`")
        row = Row(tuple(prompt_ids), sampling.max_new_tokens, sampling.temperature, seed, self._key)
        return await self._engine._generate(self._key, row)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eval mode, and give every module back the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device current: that is a thread's own state, and the worker does not inherit it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
