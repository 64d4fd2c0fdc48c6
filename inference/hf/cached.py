"""Decoding that reads no token twice: keys and values stay between the turns of a session, and are shared among rows.

`CachedDecoder` is used by one thread at a time. A row begins with what its session kept, with what another session kept
of the same beginning, or with what another row of its batch reads first; the rest of its prompt goes through the
model once, and then one token at a time, together with all other rows (`packed`). A row that has ended costs nothing
more.

Invariants, beyond those of `decoding`:

1. Keys and values are used for exactly the ids, and the weights, that they were computed for: `weights` names these,
   and whatever was kept under another name is forgotten.
2. Between batches at most `limit` bytes are kept, and nothing of sessions that have ended. `prefixes` says what goes
   first.
3. After an error nothing is kept: rows may have been in the middle of a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.hf.decoding import Decoded, Row, decoded, draw, uniforms
from inference.hf.packed import KeysValues, forward, packed_attention
from inference.hf.prefixes import PrefixStore, Shared, share

_PASS_TOKENS = 2_048
"""Tokens of one pass at most, which bounds the memory of activations: long prompts take several."""


class CachedDecoder:
    """Decodes batches of rows, and keeps at most `limit` bytes of keys and values between them."""

    def __init__(self, limit: int) -> None:
        self._store: PrefixStore[KeysValues] = PrefixStore(limit)
        self._weights: int | None = None

    @property
    def limit(self) -> int:
        """Bytes that are kept at most; who lowers it decodes a batch, or clears, before less is kept."""
        return self._store.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._store.limit = limit

    def kept_besides(self, keys: Collection[int]) -> int:
        """Bytes that are kept of other sessions than these."""
        return self._store.size_besides(keys)

    def clear(self) -> None:
        """Forget everything."""
        self._store.clear()

    @torch.no_grad()
    def decode(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        *,
        stop_ids: Collection[int],
        weights: int = 0,
        open_keys: Collection[int] = (),
    ) -> list[Decoded | None]:
        """Generate for every row until a stop token or the row's limit; None for a row that was cancelled.

        `open_keys` are the sessions that may come again. The model must be in eval mode. Raises EngineError when its
        logits are not numbers, and UnsupportedModelError.
        """
        if weights != self._weights:
            self.clear()
            self._weights = weights
        self._store.begin(open_keys)
        try:
            with packed_attention(model) as layers:
                live = self._begin(rows, layers)
                while running := [each for each in live if not each.ended]:
                    _advance(model, layers, running, stop_ids)
        except BaseException:
            self.clear()
            raise
        for each in live:
            if each.row.key in open_keys and not each.row.cancelled.is_set():
                content = each.content
                self._store.put(each.row.key, tuple(each.ids[: content.length]), content, content.size)
        self._store.trim()
        return [each.result(stop_ids) for each in live]

    def _begin(self, rows: Sequence[Row], layers: int) -> list[_LiveRow]:
        live = [_LiveRow(row, self._known(row) or KeysValues(layers)) for row in rows]
        shared = share([row.prompt_ids for row in rows], [each.content.length for each in live])
        for each, source in zip(live, shared, strict=True):
            if source is not None:
                each.wait_for(live[source.index], source)
        return live

    def _known(self, row: Row) -> KeysValues | None:
        """What is known of a row's beginning."""
        found = self._store.find(row.key, row.prompt_ids)
        if found is None:
            return None
        if not found.own:
            return found.content.copy(found.tokens)
        found.content.length = found.tokens
        return found.content


class _LiveRow:
    """A row that is being decoded: the ids so far, and the keys and values of those that were read."""

    def __init__(self, row: Row, content: KeysValues) -> None:
        self.row = row
        self.content = content
        self.ids = list(row.prompt_ids)
        self.logprobs: list[float] = []
        self._uniforms = uniforms(row)
        self._source: tuple[_LiveRow, int] | None = None
        self._stopped = False

    @property
    def ended(self) -> bool:
        return self._stopped or self.row.cancelled.is_set()

    @property
    def uniform(self) -> float:
        """The random number of the next token."""
        return float(self._uniforms[len(self.logprobs)])

    def wait_for(self, source: _LiveRow, shared: Shared) -> None:
        """Begin with what another row reads, once it has."""
        self._source = (source, shared.tokens)

    def waits(self) -> bool:
        """Whether the row still waits for another; takes from it what it has read."""
        if self._source is not None:
            source, tokens = self._source
            if source.content.length < tokens and not source.ended:
                return True
            if source.content.length >= tokens:
                self.content = source.content.copy(tokens)
            self._source = None
        return False

    def add(self, token: int, logprob: float, stop_ids: Collection[int]) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self._stopped = token in stop_ids or len(self.logprobs) == self.row.max_new_tokens

    def result(self, stop_ids: Collection[int]) -> Decoded | None:
        if self.row.cancelled.is_set():
            return None
        return decoded(self.ids[len(self.row.prompt_ids) :], self.logprobs, stop_ids)


def _advance(model: PreTrainedModel, layers: int, running: Sequence[_LiveRow], stop_ids: Collection[int]) -> None:
    """One pass: each row that waits for none reads what it has not read, and gets a token when that was all."""
    room = _PASS_TOKENS
    reading: list[_LiveRow] = []
    new: list[list[int]] = []
    for each in running:
        if room and not each.waits():
            reading.append(each)
            new.append(each.ids[each.content.length : each.content.length + room])
            room -= len(new[-1])
    logits = forward(model, layers, new, [each.content for each in reading])
    ready = [index for index, each in enumerate(reading) if each.content.length == len(each.ids)]
    if not ready:
        return
    chosen = [reading[index] for index in ready]
    tokens, logprobs = draw(logits[ready], *_choices(chosen, logits.device))
    for each, token, logprob in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True):
        each.add(token, logprob, stop_ids)


def _choices(rows: Sequence[_LiveRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows' temperatures and next random numbers."""
    return (
        torch.tensor([each.row.temperature for each in rows], dtype=torch.float32, device=device),
        torch.tensor([each.uniform for each in rows], dtype=torch.float64, device=device),
    )
