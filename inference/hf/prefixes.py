"""Which keys and values can be used again: prefixes of token ids, and what is kept of them. Pure; no tensors.

Invariants:

1. What is found for a prompt belongs to exactly the ids it begins with, and never to all of them: the last one is
   always read, since its logits are wanted.
2. A row waits for another one of its batch only where that saves at least `BLOCK` tokens of reading, and never in a
   circle.
3. What is kept never has more than `limit` bytes after `trim`. What was used longest ago goes first; of what one batch
   used, the last rows go first, so that those who fit are found again by the next batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

T = TypeVar("T")

BLOCK = 16
"""Tokens that are worth waiting, or copying, for."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences (of one type) begin with alike."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Shared:
    """A row may take its first `tokens` from the row at `index` of the batch, once that one has read them."""

    index: int
    tokens: int


def share(prompts: Sequence[tuple[int, ...]], known: Sequence[int]) -> list[Shared | None]:
    """Where each row of a batch takes its beginning from, when `known` tokens of each are known already.

    Prompts are compared in sorted order, where neighbours share most. A row takes from the first one that shares as
    much as any does, in whole blocks, so that rows which differ in their questions alone all wait for one.
    """
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    found: list[Shared | None] = [None] * len(prompts)
    alike = [0]
    for before, here in pairwise(order):
        alike.append(common_prefix(prompts[before], prompts[here]))
        tokens = min(alike[-1], len(prompts[here]) - 1) // BLOCK * BLOCK
        if tokens - known[here] >= BLOCK:
            first = len(alike) - 1
            while alike[first] >= tokens:  # ends at 0, which shares with none before it
                first -= 1
            found[here] = Shared(order[first], tokens)
    return found


@dataclass(slots=True)
class _Entry(Generic[T]):
    ids: tuple[int, ...]
    content: T
    size: int
    rank: tuple[int, int]
    """Goes first when it is least."""


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """What covers the first `tokens` of a prompt: the session's own, to go on with, or another's, to be copied."""

    content: T
    tokens: int
    own: bool


class PrefixStore(Generic[T]):
    """What sessions keep between their turns: token ids, and a content that belongs to them."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise ValueError(f"limit must be at least 0, not {limit}")
        self.limit = limit
        self._entries: dict[int, _Entry[T]] = {}
        self._batch = 0
        self._puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return self.size_besides(())

    def size_besides(self, keys: Collection[int]) -> int:
        """Bytes of what is kept under other keys than these."""
        return sum(entry.size for key, entry in self._entries.items() if key not in keys)

    def begin(self, open_keys: Collection[int]) -> None:
        """Begin a batch, and forget the sessions that have ended."""
        self._batch += 1
        for key in self._entries.keys() - set(open_keys):
            del self._entries[key]

    def find(self, key: int, prompt: tuple[int, ...]) -> Found[T] | None:
        """Find what a session's next prompt may begin with, and take out what the session itself has kept."""
        own = self._entries.pop(key, None)
        covered = _covered(own, prompt) if own is not None else 0
        found = Found(own.content, covered, own=True) if own is not None and covered else None
        if own is not None and covered == len(own.ids):
            return found
        # The first turn of a session, or one that has dropped its oldest turns.
        most = covered + BLOCK - 1
        for entry in self._entries.values():
            if (tokens := _covered(entry, prompt)) > most:
                found, most = Found(entry.content, tokens, own=False), tokens
        return found

    def put(self, key: int, ids: tuple[int, ...], content: T, size: int) -> None:
        """Keep the content that belongs to `ids`."""
        self._puts += 1
        self._entries[key] = _Entry(ids, content, size, (self._batch, -self._puts))

    def trim(self) -> bool:
        """Let go of what is beyond the limit; tell whether anything was."""
        size, before = self.size, len(self)
        for key in sorted(self._entries, key=lambda key: self._entries[key].rank):
            if size <= self.limit:
                break
            size -= self._entries.pop(key).size
        return len(self) < before

    def contents(self) -> Iterator[T]:
        """All that is kept."""
        return (entry.content for entry in self._entries.values())

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _covered(entry: _Entry[T], prompt: tuple[int, ...]) -> int:
    return min(common_prefix(entry.ids, prompt), len(prompt) - 1)
