"""The cache keeps what was used last, within its capacity."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from env_server.lru import LRUCache

STEPS = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(1, 4)), max_size=40)


def test_the_least_recently_used_goes_first() -> None:
    cache: LRUCache[str, int] = LRUCache(2)
    assert cache.put("a", 1) == cache.put("b", 2) == []
    assert cache.get("a") == 1
    assert cache.put("c", 3) == [2]
    assert (cache.get("b"), cache.get("a"), cache.get("c")) == (None, 1, 3)


def test_a_second_value_replaces_the_first() -> None:
    cache: LRUCache[str, int] = LRUCache(3)
    cache.put("a", 1, size=3)
    assert cache.put("a", 2, size=1) == [1]
    assert (cache.get("a"), cache.size, len(cache)) == (2, 1, 1)


def test_what_is_larger_than_the_capacity_is_not_kept() -> None:
    cache: LRUCache[str, int] = LRUCache(3)
    cache.put("a", 1)
    assert cache.put("b", 2, size=4) == [1, 2]
    assert (len(cache), cache.size) == (0, 0)


def test_clearing_gives_everything_back() -> None:
    cache: LRUCache[str, int] = LRUCache(3)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.clear() == [1, 2]
    assert (cache.get("a"), cache.size) == (None, 0)


@given(STEPS)
def test_it_holds_the_most_recent_that_fit(steps: list[tuple[int, int | None]]) -> None:
    """None reads a key; a number keeps it with that size. The model is a list, the most recent last."""
    cache: LRUCache[int, int] = LRUCache(8)
    kept: list[tuple[int, int]] = []
    for key, size in steps:
        known = next((entry for entry in kept if entry[0] == key), None)
        if size is None:
            assert cache.get(key) == (None if known is None else known[1])
        else:
            cache.put(key, size, size)
        entry = known if size is None else (key, size)
        kept = [each for each in kept if each is not known] + ([entry] if entry else [])
        while sum(size for _, size in kept) > 8:
            kept.pop(0)
        assert (len(cache), cache.size) == (len(kept), sum(size for _, size in kept))
