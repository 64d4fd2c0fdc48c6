"""The cache keeps what was used last, within its capacity, and gives back what it no longer keeps."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from env_server.lru import LRUCache

STEPS = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(1, 9)), max_size=40)


@given(STEPS)
@example([(0, 8), (0, 1)])
@example([(0, 1), (1, 9)])
def test_it_holds_the_most_recent_that_fit(steps: list[tuple[int, int | None]]) -> None:
    """None reads a key; a number keeps it with that size. The model is a list of keys and sizes, the latest last."""
    cache: LRUCache[int, tuple[int, int]] = LRUCache(8)
    kept: list[tuple[int, int]] = []
    for key, size in steps:
        known = next((entry for entry in kept if entry[0] == key), None)
        kept = [entry for entry in kept if entry is not known]
        if size is None:
            assert cache.get(key) == known
            kept += [known] if known else []
        else:
            dropped = [known] if known else []
            kept.append((key, size))
            while sum(size for _, size in kept) > 8:
                dropped.append(kept.pop(0))
            assert cache.put(key, (key, size), size) == dropped
        assert (len(cache), cache.size) == (len(kept), sum(size for _, size in kept))
    assert cache.clear() == kept
    assert (len(cache), cache.size) == (0, 0)
