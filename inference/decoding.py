"""Batched decoding with a Hugging Face causal language model: rows in, tokens and log-probabilities out.

Synchronous and free of shared state; `HFEngine` calls `decode` in its worker thread. The loop is its own rather
than `generate`'s because rows differ in temperature, token limit and seed, and because each of these saves
time that `generate` cannot save: a row that is done leaves the batch, a prompt that occurs several times (a
group's first turn) is prefilled once, and an episode's next turn prefills only what is new since its last one.
The model's `generation_config` plays no part.

Invariants:

1. A row's tokens depend on its prompt, limit, temperature and seed, not on the rows beside it (up to rounding
   of the logits, which batching changes in the last bits). The same batch gives bit-identical results.
2. `logprobs` are the float32 log-softmax of the temperature-scaled logits under exactly the row's prefix.
3. A token of probability 0 is never drawn.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from inference.engine import EngineError, FinishReason

PREFILL_ROWS = 16
"""Prompts in one prefill forward: enough to fill the arithmetic units, few enough to waste little on padding."""
COMPACT_BELOW = 0.8
"""The batch is made smaller once this fraction of its rows, or less, is still running; copying costs about a step."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Attention states of `token_ids`; `keys` and `values` have shape (layers, heads, len(token_ids), head size)."""

    token_ids: tuple[int, ...]
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One request. `prefix` holds states computed earlier with the same weights, as far as it fits the prompt."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    prefix: Prefix | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set by any thread: nobody wants this row any more, and it leaves at the next step."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """A row's result; `prefix` is for the row's next turn (None when the model's cache cannot be taken apart)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    prefix: Prefix | None


@torch.no_grad()
def decode(
    model: PreTrainedModel, rows: Sequence[Row], *, stop_ids: Collection[int], pad_id: int
) -> list[Decoded | None]:
    """Generate for every row until a stop token or the row's limit; None for a row that was cancelled.

    The model must be in eval mode. Raises EngineError when the model's logits are not numbers.
    """
    batch = _prefill(model, rows, pad_id)
    drafts = [_Draft(row) for row in rows]
    results: list[Decoded | None] = [None] * len(rows)
    stops = frozenset(stop_ids)
    step = 0
    while True:
        tokens, logprobs = draw(batch.logits, batch.temperatures, batch.uniforms[:, step])
        for index, token, logprob in zip(batch.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            drafts[index].add(token, logprob, stops)
        running = [lane for lane, index in enumerate(batch.rows) if not drafts[index].done]
        if len(running) <= COMPACT_BELOW * len(batch.rows):
            for lane in sorted(set(range(len(batch.rows))) - set(running)):
                index = batch.rows[lane]
                results[index] = drafts[index].result(batch, lane)
            if not running:
                return results
            kept = torch.tensor(running, device=tokens.device)
            batch.keep(kept)
            tokens = tokens[kept]
        batch.feed(model, tokens)
        step += 1


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the distribution function; greedy where the temperature is 0.

    `logits` (rows, vocabulary), `temperatures` (rows,) float32 >= 0, `uniforms` (rows,) float64 in [0, 1).
    Returns tokens (rows,) int64 and their log-probabilities (rows,) float32, at temperature 1 for greedy rows.
    """
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    probs = logprobs.exp()
    # A parallel cumsum need not be monotone to the last bit, so tokens without mass are ruled out by name.
    mass = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
    total = mass.amax(dim=-1)
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = (mass > target[:, None]).int().argmax(dim=-1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), sampled)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


class _Draft:
    """What a row has generated so far."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finish: FinishReason | None = None

    @property
    def done(self) -> bool:
        return self._finish is not None or self._row.cancelled.is_set()

    def add(self, token: int, logprob: float, stop_ids: Collection[int]) -> None:
        if self._finish is not None:
            return
        if not math.isfinite(logprob):
            raise EngineError("the model's logits are not finite; its weights or its precision are broken")
        self._tokens.append(token)
        self._logprobs.append(logprob)
        if token in stop_ids:
            self._finish = FinishReason.STOP
        elif len(self._tokens) == self._row.max_new_tokens:
            self._finish = FinishReason.LENGTH

    def result(self, batch: _Batch, lane: int) -> Decoded | None:
        if self._finish is None or self._row.cancelled.is_set():
            return None
        # The last token was drawn but never fed: the cache holds no states for it.
        prefix = batch.prefix(lane, self._row.prompt_ids + tuple(self._tokens[:-1]))
        return Decoded(tuple(self._tokens), tuple(self._logprobs), self._finish, prefix)


@dataclass(slots=True)
class _Batch:
    """The running rows, one lane each, left-padded to a common width.

    `mask` (lanes, columns) covers the columns still to come; `positions` (lanes, 1) is the next position;
    `logits` (lanes, vocabulary) is the last column's output.
    """

    rows: list[int]
    starts: list[int]
    cache: DynamicCache
    separable: bool
    logits: Tensor
    mask: Tensor
    width: int
    positions: Tensor
    temperatures: Tensor
    uniforms: Tensor

    def feed(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Append one token to every lane."""
        self.width += 1
        self.logits = _forward(model, tokens[:, None], self.mask[:, : self.width], self.positions, self.cache)
        self.positions = self.positions + 1

    def keep(self, lanes: Tensor) -> None:
        """Drop all other lanes."""
        self.cache.reorder_cache(lanes)
        kept = lanes.tolist()
        self.rows = [self.rows[lane] for lane in kept]
        self.starts = [self.starts[lane] for lane in kept]
        self.mask, self.positions = self.mask[lanes], self.positions[lanes]
        self.temperatures, self.uniforms = self.temperatures[lanes], self.uniforms[lanes]

    def prefix(self, lane: int, token_ids: tuple[int, ...]) -> Prefix | None:
        """Copy a lane's states out."""
        if not self.separable:
            return None
        columns = slice(self.starts[lane], self.starts[lane] + len(token_ids))
        layers = self.cache.layers
        return Prefix(
            token_ids,
            torch.stack([layer.keys[lane, :, columns] for layer in layers]),
            torch.stack([layer.values[lane, :, columns] for layer in layers]),
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt to prefill; the first `shared` of its tokens have their states in `prefix`."""

    token_ids: tuple[int, ...]
    prefix: Prefix | None
    shared: int

    @property
    def fresh(self) -> tuple[int, ...]:
        return self.token_ids[self.shared :]


@dataclass(frozen=True, slots=True)
class _States:
    """A prefilled prompt: its states, shape (layers, heads, tokens, head size), and its last logits."""

    keys: Tensor
    values: Tensor
    logits: Tensor


def _prefill(model: PreTrainedModel, rows: Sequence[Row], pad_id: int) -> _Batch:
    """Run every prompt through the model and lay the rows out for decoding."""
    device = model.device
    lengths = [len(row.prompt_ids) for row in rows]
    width, limit = max(lengths), max(row.max_new_tokens for row in rows)
    cache = _new_cache(model)
    separable = all(type(layer) is DynamicLayer for layer in cache.layers)
    if separable:
        logits = _prefill_distinct(model, rows, pad_id, cache)
    else:
        # Recurrent or sliding-window states cannot be cut at a token: one padded forward, nothing reused.
        ids = _left_padded([row.prompt_ids for row in rows], pad_id, device)
        mask = _ones_at_right(lengths, width, device)
        logits = _forward(model, ids, mask, _positions(lengths, lengths, device), cache)
    mask = torch.cat(
        [_ones_at_right(lengths, width, device), torch.ones(len(rows), limit, dtype=torch.long, device=device)], 1
    )
    return _Batch(
        rows=list(range(len(rows))),
        starts=[width - length for length in lengths],
        cache=cache,
        separable=separable,
        logits=logits,
        mask=mask,
        width=width,
        positions=torch.tensor(lengths, device=device)[:, None],
        temperatures=torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
        uniforms=_uniforms(rows, limit).to(device),
    )


def _prefill_distinct(model: PreTrainedModel, rows: Sequence[Row], pad_id: int, cache: DynamicCache) -> Tensor:
    """Prefill each distinct prompt once, fill `cache` with every row's states, return the rows' last logits."""
    prompts: dict[tuple[int, ...], _Prompt] = {}
    for row in rows:
        shared = shared_length(row.prefix.token_ids, row.prompt_ids) if row.prefix else 0
        known = prompts.get(row.prompt_ids)
        if known is None or shared > known.shared:
            prompts[row.prompt_ids] = _Prompt(row.prompt_ids, row.prefix, shared)
    ordered = sorted(prompts.values(), key=lambda prompt: len(prompt.fresh))
    states: dict[tuple[int, ...], _States] = {}
    for first in range(0, len(ordered), PREFILL_ROWS):
        chunk = ordered[first : first + PREFILL_ROWS]
        for prompt, state in zip(chunk, _extend(model, chunk, pad_id), strict=True):
            states[prompt.token_ids] = state
    of_rows = [states[row.prompt_ids] for row in rows]
    _load(cache, [state.keys for state in of_rows], [state.values for state in of_rows])
    return torch.stack([state.logits for state in of_rows])


def shared_length(known: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    """Return how many leading tokens of `prompt` need no forward: at most all but the last one."""
    limit = min(len(known), len(prompt) - 1)
    if known[:limit] == prompt[:limit]:
        return limit
    return next(i for i in range(limit) if known[i] != prompt[i])


def _extend(model: PreTrainedModel, prompts: Sequence[_Prompt], pad_id: int) -> list[_States]:
    """Run the fresh tokens of some prompts after the states they already have.

    Columns are [padding, shared | padding, fresh]; the mask hides both paddings and positions count real tokens.
    """
    device = model.device
    shared = [prompt.shared for prompt in prompts]
    fresh = [len(prompt.fresh) for prompt in prompts]
    past, new = max(shared), max(fresh)
    cache = _new_cache(model)
    if past:
        _load(
            cache,
            [p.prefix.keys[:, :, : p.shared] if p.prefix else None for p in prompts],
            [p.prefix.values[:, :, : p.shared] if p.prefix else None for p in prompts],
        )
    mask = torch.cat([_ones_at_right(shared, past, device), _ones_at_right(fresh, new, device)], dim=1)
    ids = _left_padded([prompt.fresh for prompt in prompts], pad_id, device)
    positions = _positions([len(prompt.token_ids) for prompt in prompts], fresh, device)
    logits = _forward(model, ids, mask, positions, cache)
    keys = torch.stack([layer.keys for layer in cache.layers])
    values = torch.stack([layer.values for layer in cache.layers])
    states = []
    for lane, (old, length) in enumerate(zip(shared, fresh, strict=True)):
        pieces = (slice(past - old, past), slice(past + new - length, past + new))
        states.append(
            _States(
                torch.cat([keys[:, lane, :, piece] for piece in pieces], dim=2),
                torch.cat([values[:, lane, :, piece] for piece in pieces], dim=2),
                logits[lane],
            )
        )
    return states


def _new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _forward(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """Run `ids` (lanes, tokens), extend the cache, return the last column's logits (lanes, vocabulary)."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _load(cache: DynamicCache, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    """Fill an empty cache with one lane per entry, left-padded; None is a lane of padding alone."""
    for layer, k, v in zip(cache.layers, _stack_right(keys), _stack_right(values), strict=True):
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v  # `update` would copy them once more


def _stack_right(lanes: Sequence[Tensor | None]) -> Tensor:
    """Stack (layers, heads, tokens, size) pieces to (layers, lanes, heads, width, size), aligned at the right."""
    present = [lane for lane in lanes if lane is not None]
    width = max(lane.shape[2] for lane in present)
    layers, heads, _, size = present[0].shape
    stacked = present[0].new_zeros(layers, len(lanes), heads, width, size)
    for index, lane in enumerate(lanes):
        if lane is not None:
            stacked[:, index, :, width - lane.shape[2] :] = lane
    return stacked


def _left_padded(rows: Sequence[tuple[int, ...]], pad_id: int, device: torch.device) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([(pad_id,) * (width - len(row)) + row for row in rows], device=device)


def _ones_at_right(counts: Sequence[int], width: int, device: torch.device) -> Tensor:
    """Return (rows, width) int64: each row's last `counts` columns are 1."""
    columns = torch.arange(width, device=device)
    return (columns >= width - torch.tensor(counts, device=device)[:, None]).long()


def _positions(ends: Sequence[int], fresh: Sequence[int], device: torch.device) -> Tensor:
    """Return (rows, width) positions of right-aligned tokens that end before `ends`; 0 for padding."""
    width = max(fresh)
    offsets = torch.arange(width, device=device) - width
    positions = torch.tensor(ends, device=device)[:, None] + offsets
    return positions * _ones_at_right(fresh, width, device)


def _uniforms(rows: Sequence[Row], limit: int) -> Tensor:
    """Return (rows, limit) float64 uniforms, each row from a generator of its own seed.

    NumPy's generators mix all 64 bits of a seed; torch's CPU generator keeps the lower 32 only.
    """
    uniforms = np.zeros((len(rows), limit))
    for index, row in enumerate(rows):
        draws = np.random.default_rng(row.seed % 2**64).random(row.max_new_tokens)
        uniforms[index, : row.max_new_tokens] = draws
    return torch.from_numpy(uniforms)
