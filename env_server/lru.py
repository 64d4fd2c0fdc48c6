"""A cache that gives up the least recently used entries first. Not for several threads at once."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Values by their keys; their sizes, 1 each unless said otherwise, sum to at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0
        """The sum of the sizes."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value, from now on the most recently used; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int = 1) -> list[V]:
        """Keep a value, instead of the key's earlier one; return the values that are no longer kept."""
        dropped = [self._pop(key)] if key in self._entries else []
        self._entries[key] = (value, size)
        self.size += size
        while self.size > self._capacity:
            dropped.append(self._pop(next(iter(self._entries))))
        return dropped

    def clear(self) -> list[V]:
        """Keep nothing; return what was kept."""
        return [self._pop(key) for key in list(self._entries)]

    def _pop(self, key: K) -> V:
        value, size = self._entries.pop(key)
        self.size -= size
        return value
