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

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.hf.decoding import Decoded, Row, decoded, draw, uniforms
from inference.hf.packed import KeysValues, SideBySide, forward, packed_attention
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
        on_end: Callable[[Row, Decoded], None] | None = None,
    ) -> list[Decoded | None]:
        """Generate for every row until a stop token or the row's limit; None for a row that was cancelled.

        `on_end` is told of each row when it ends. `open_keys` are the sessions that may come again. The model must be
        in eval mode. Raises EngineError when its logits are not numbers, and UnsupportedModelError.
        """
        if weights != self._weights:
            self.clear()
            self._weights = weights
        self._store.begin(open_keys)
        try:
            with packed_attention(model) as layers:
                batch = _Batch(model, layers, stop_ids, self._begin(rows, layers))
                while batch.running:
                    for each in batch.advance():
                        if each.row.key in open_keys:
                            ids = tuple(each.ids[: each.content.length])
                            self._store.put(each.row.key, ids, each.content, each.content.size)
                        each.decoded = decoded(each.ids[len(each.row.prompt_ids) :], each.logprobs, stop_ids)
                        if on_end is not None:
                            on_end(each.row, each.decoded)
        except BaseException:
            self.clear()
            raise
        if self._store.trim():
            for content in self._store.contents():
                content.move_out()
        return [each.decoded for each in batch.rows]

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
        self.complete = False
        self.decoded: Decoded | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be done for the row: it is complete, or nobody wants it."""
        return self.complete or self.row.cancelled.is_set()

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
        self.complete = token in stop_ids or len(self.logprobs) == self.row.max_new_tokens


class _Batch:
    """Rows on their way through a model."""

    def __init__(
        self, model: PreTrainedModel, layers: int, stop_ids: Collection[int], rows: Sequence[_LiveRow]
    ) -> None:
        self.rows = rows
        self._model = model
        self._layers = layers
        self._stop_ids = stop_ids
        self._side_by_side: SideBySide | None = None

    @property
    def running(self) -> list[_LiveRow]:
        """The rows that have not ended."""
        return [each for each in self.rows if not each.ended]

    def advance(self) -> list[_LiveRow]:
        """One pass: each row that waits for none reads what it has not read, and gets a token when that was all.

        Returns the rows that are complete with it.
        """
        room = _PASS_TOKENS
        reading: list[_LiveRow] = []
        new: list[list[int]] = []
        for each in self.running:
            if room and not each.waits():
                reading.append(each)
                new.append(each.ids[each.content.length : each.content.length + room])
                room -= len(new[-1])
        if not reading:  # all were cancelled just now
            return []
        contents = [each.content for each in reading]
        goes_on = all(each.logprobs for each in reading) and len(reading) > 1
        beside = self._laid_out(contents) if goes_on else None
        logits = forward(self._model, self._layers, new, contents, beside)
        ready = [index for index, each in enumerate(reading) if each.content.length == len(each.ids)]
        if not ready:
            return []
        chosen = [reading[index] for index in ready]
        tokens, logprobs = draw(logits[ready], *_choices(chosen, logits.device))
        for each, token, logprob in zip(chosen, tokens.tolist(), logprobs.tolist(), strict=True):
            each.add(token, logprob, self._stop_ids)
        return [each for each in chosen if each.complete]

    def _laid_out(self, contents: Sequence[KeysValues]) -> SideBySide:
        """The rows side by side, for one token each; laid so anew where they are not, or few are left."""
        if self._side_by_side is None or not self._side_by_side.suits(contents):
            self._side_by_side = None  # what it alone holds can go first
            self._side_by_side = SideBySide(contents, self._layers)
        return self._side_by_side


def _choices(rows: Sequence[_LiveRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows' temperatures and next random numbers."""
    return (
        torch.tensor([each.row.temperature for each in rows], dtype=torch.float32, device=device),
        torch.tensor([each.uniform for each in rows], dtype=torch.float64, device=device),
    )
