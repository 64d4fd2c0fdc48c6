"""Rows of any lengths through a model in one forward pass, each over keys and values of its own.

The tokens of all rows lie one after another in a single sequence, without padding: whole prompts, the rest of prompts
whose beginning has been read, and single tokens, mixed as they come. Only attention has to know where a row begins, and
that is a function that `transformers` lets one bring (`AttentionInterface`); the rest of the model is the library's. A
row's keys and values lie in buffers that it keeps, are written in place and read where they are: nothing is copied for
a token, nor repeated for the heads of a group. Rows that only go on token by token are laid side by side once
(`SideBySide`), and then attend in one call instead of one each.

It needs a model whose layers all attend to everything before them, through that interface, and whose rotation of a
position does not depend on the length of the sequence. `refusal` tells from a model's configuration; what only shows in
its forward pass (soft caps, sinks, position biases, layers that share keys) raises `UnsupportedModelError` there.

Why not what `transformers` has: `generate` and its caches want one length for a batch, so rows are padded, and buffers
grow by a copy for each token; its continuous batching pages a cache much as this does, but draws all its requests from
one generator, so that a row's tokens would depend on the rows beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

NAME: Final = "sqlenv_packed_rows"
_KNOWN_ARGUMENTS: Final = frozenset(
    ("dropout", "position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_causal")
)
"""What a layer may tell its attention without it meaning anything here."""
_ROOM: Final = 64
_STEP: Final = 16


class UnsupportedModelError(Exception):
    """The model attends in a way that packed rows do not follow; the text says which."""


class KeysValues:
    """The keys and values of one row, layer by layer; `length` tokens of them are read."""

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._capacity = 0
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.nbytes for pair in self._layers if pair is not None for tensor in pair)

    def reserve(self, tokens: int) -> None:
        """Make room; a buffer that is too short is replaced by one with room to spare."""
        if tokens > self._capacity:
            self._resize(tokens + tokens // 4 + _ROOM)

    def copy(self, length: int) -> KeysValues:
        """Return the keys and values of the first `length` tokens, with room to grow."""
        other = KeysValues(len(self._layers))
        other._layers = list(self._layers)
        other.length = length
        other._resize(length + length // 4 + _ROOM)
        return other

    def move_out(self) -> None:
        """Move to buffers of its own, so that those of the rows beside it can go."""
        self._resize(self._capacity)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put a layer's new ones, (heads, tokens, width), after the `length` there are; return all, as views."""
        pair = self._layers[layer]
        if pair is None:
            pair = (_buffer(keys, self._capacity), _buffer(values, self._capacity))
            self._layers[layer] = pair
        end = self.length + keys.shape[1]
        pair[0][:, self.length : end] = keys
        pair[1][:, self.length : end] = values
        return pair[0][:, :end], pair[1][:, :end]

    def move(self, layer: int, place: tuple[Tensor, Tensor], capacity: int) -> None:
        """Move a layer to another place, (heads, capacity, width); the capacity counts when all layers are there."""
        pair = self._layers[layer]
        assert pair is not None
        for new, old in zip(place, pair, strict=True):
            new[:, : self.length] = old[:, : self.length]
        self._layers[layer] = place
        self._capacity = capacity

    def buffers(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's buffers, (heads, capacity, width) each."""
        pair = self._layers[layer]
        assert pair is not None
        return pair

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        for layer, pair in enumerate(self._layers):
            if pair is not None:
                larger = (_buffer(pair[0], capacity), _buffer(pair[1], capacity))
                for new, old in zip(larger, pair, strict=True):
                    new[:, : self.length] = old[:, : self.length]
                self._layers[layer] = larger


def _buffer(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty((like.shape[0], capacity, like.shape[2]), dtype=_dtype(like))


def _dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that attention works in: under autocast, it would cast what is kept again for each token."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class Attending(Protocol):
    """Who attends in one forward pass."""

    layers: int
    """How many layers have."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend to what is kept and to the pass: (heads, tokens, width) each; returns (tokens, heads, width)."""

    def read(self) -> None:
        """Note that the pass is over: the new tokens count as read."""


class PackedRows:
    """The rows of one forward pass: `counts` new tokens of each, in the order in which they are packed."""

    def __init__(self, rows: Sequence[KeysValues], counts: Sequence[int]) -> None:
        self._rows = rows
        self._counts = counts
        self._masks: dict[int, Tensor] = {}
        self.layers = 0
        for row, count in zip(rows, counts, strict=True):
            row.reserve(row.length + count)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend, row by row."""
        self.layers += 1
        heads, tokens, _ = query.shape
        groups = heads // key.shape[0]
        query = query.to(_dtype(query))
        output = query.new_empty((tokens, heads, value.shape[-1]))
        start = 0
        for index, (row, count) in enumerate(zip(self._rows, self._counts, strict=True)):
            end = start + count
            keys, values = row.write(layer, key[:, start:end], value[:, start:end])
            # The heads that share keys are so many queries after one another, so that keys need not be repeated.
            asked = query[:, start:end].reshape(key.shape[0], groups * count, -1)
            mask = self._mask(index, row.length, count, groups, query) if count > 1 else None
            got = scaled_dot_product_attention(asked[None], keys[None], values[None], attn_mask=mask, scale=scaling)
            output[start:end] = got.view(heads, count, -1).transpose(0, 1)
            start = end
        return output

    def read(self) -> None:
        """Note that the pass is over: the new tokens count as read."""
        for row, count in zip(self._rows, self._counts, strict=True):
            row.length += count

    def _mask(self, index: int, length: int, count: int, groups: int, like: Tensor) -> Tensor:
        if index not in self._masks:
            hidden = torch.ones((count, length + count), dtype=torch.bool, device=like.device).triu(length + 1)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)
            self._masks[index] = mask.repeat(groups, 1)
        return self._masks[index]


class SideBySide:
    """Rows whose keys and values lie in one buffer, so that one call attends for a token of each.

    They move there when this is made, with room for a few tokens more; some of them may have ended since.
    """

    def __init__(self, rows: Sequence[KeysValues], layers: int) -> None:
        self.rows = list(rows)
        self.layers = 0
        self._places = {id(row): place for place, row in enumerate(rows)}
        self._going_on: Sequence[KeysValues] = rows
        self._width = _whole_steps(max(row.length for row in rows) + _ROOM)
        self._layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(layers):
            # Zeros, since what is masked still takes part, with weight 0.
            keys, values = (
                like.new_zeros((len(rows), like.shape[0], self._width, like.shape[2]))
                for like in rows[0].buffers(layer)
            )
            for row, own_keys, own_values in zip(rows, keys, values, strict=True):
                row.move(layer, (own_keys, own_values), self._width)
            self._layers.append((keys, values))

    def suits(self, rows: Sequence[KeysValues]) -> bool:
        """Whether these rows lie here, with room for a token, and are not few beside those that have ended."""
        return (
            4 * len(rows) > len(self.rows)
            and all(id(row) in self._places for row in rows)
            and max(row.length for row in rows) < self._width
        )

    def go_on(self, rows: Sequence[KeysValues]) -> Self:
        """Begin a pass with a token of each of these rows."""
        device = self._layers[0][0].device
        self.layers = 0
        self._going_on = rows
        self._whole = len(rows) == len(self.rows) and all(map(is_, rows, self.rows))
        self._index = torch.tensor([self._places[id(row)] for row in rows], device=device)
        self._lengths = torch.tensor([row.length for row in rows], device=device)
        self._shown = min(self._width, _whole_steps(max(row.length for row in self.rows) + 1))
        last = torch.tensor([row.length for row in self.rows], device=device)
        hidden = torch.arange(self._shown, device=device) > last[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._layers[0][0].dtype, device=device)
        self._mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend in one call."""
        self.layers += 1
        keys, values = self._layers[layer]
        keys[self._index, :, self._lengths] = key.transpose(0, 1).to(keys.dtype)
        values[self._index, :, self._lengths] = value.transpose(0, 1).to(values.dtype)
        heads, tokens, width = query.shape
        # The heads that share keys are so many queries, so that keys need not be repeated.
        asked = query.transpose(0, 1).reshape(tokens, key.shape[0], -1, width).to(keys.dtype)
        if not self._whole:
            asked = asked.new_zeros((len(self.rows), *asked.shape[1:])).index_copy_(0, self._index, asked)
        shown = self._shown
        got = scaled_dot_product_attention(
            asked, keys[:, :, :shown], values[:, :, :shown], attn_mask=self._mask, scale=scaling
        )
        return (got if self._whole else got[self._index]).reshape(tokens, heads, -1)

    def read(self) -> None:
        """Note that the pass is over."""
        for row in self._going_on:
            row.length += 1


def _whole_steps(tokens: int) -> int:
    """Round up: kernels like it, and a mask of one length serves several passes."""
    return -(-tokens // _STEP) * _STEP


def refusal(model: PreTrainedModel) -> str | None:
    """Why a model's rows cannot be packed, as far as its configuration tells; None when it says nothing against it."""
    base = _base(model)
    config = _text_config(base)
    if not getattr(base, "_supports_attention_backend", False):
        return f"the attention of {type(base).__name__} is its own"
    if "logits_to_keep" not in inspect.signature(type(base).forward).parameters:
        return f"{type(base).__name__} gives the logits of all positions or none"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if by_length := _rope_types(getattr(config, "rope_parameters", None)) & {"dynamic", "longrope"}:
        return f"its rotation ({', '.join(by_length)}) depends on the length"
    return None


def _rope_types(parameters: object) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    found = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return found.union(*(_rope_types(value) for value in parameters.values()))


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[int]:
    """Let the model attend to packed rows, and then as it did before; yields the number of its layers."""
    config = _text_config(_base(model))
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield int(config.num_hidden_layers)
    finally:
        config._attn_implementation = own


def forward(
    model: PreTrainedModel,
    layers: int,
    ids: Sequence[Sequence[int]],
    rows: Sequence[KeysValues],
    side_by_side: SideBySide | None = None,
) -> Tensor:
    """Read new ids of each row, within `packed_attention`; return the logits after the last of each, a row each.

    `side_by_side`, if it suits the rows, is for one id of each. Raises UnsupportedModelError.
    """
    device = model.device
    counts = [len(new) for new in ids]
    attending: Attending = PackedRows(rows, counts) if side_by_side is None else side_by_side.go_on(rows)
    positions = [row.length + offset for row, count in zip(rows, counts, strict=True) for offset in range(count)]
    logits: Tensor = model(
        input_ids=torch.tensor([[token for new in ids for token in new]], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        logits_to_keep=torch.tensor(counts, device=device).cumsum(0) - 1,
        packed_rows=attending,
    ).logits[0]
    if attending.layers != layers:
        raise UnsupportedModelError(f"{attending.layers} of its {layers} layers attend")
    attending.read()
    return logits


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_rows: Attending,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer calls; (1, heads, tokens, width) in, (1, tokens, heads, width) out."""
    unknown = sorted(
        name
        for name, given in others.items()
        if name not in _KNOWN_ARGUMENTS and given is not None and given is not False
    )
    if attention_mask is not None or unknown:
        raise UnsupportedModelError(f"its attention takes {', '.join(unknown) or 'a mask of its own'}")
    return packed_rows.attend(int(module.layer_idx), query[0], key[0], value[0], scaling)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)


def _base(model: PreTrainedModel) -> PreTrainedModel:
    """The model that an adapter is on."""
    base: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def _text_config(model: PreTrainedModel) -> PretrainedConfig:
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    return config
