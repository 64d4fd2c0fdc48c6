"""Prefixes of token ids: what is found is right, nothing waits in a circle, and what is kept is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.hf.prefixes import BLOCK, Found, PrefixStore, common_prefix, share

IDS = st.lists(st.integers(0, 1), max_size=60).map(tuple)
"""Ids that often begin alike, and differ anywhere."""
STEMS = st.sampled_from([(7,) * 40, (7,) * 20 + (8,) * 20, (9,) * 33])
PROMPTS = st.builds(lambda stem, rest: stem + rest, STEMS, IDS)


@given(IDS, IDS)
def test_a_common_prefix_is_the_longest(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    shared = common_prefix(a, b)
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]


@given(st.lists(PROMPTS, max_size=12), st.data())
def test_rows_take_from_rows_that_begin_alike_and_never_in_a_circle(
    prompts: list[tuple[int, ...]], data: st.DataObject
) -> None:
    known = [data.draw(st.integers(0, len(prompt) - 1)) for prompt in prompts]
    sources = share(prompts, known)
    for index, source in enumerate(sources):
        if source is None:
            continue
        prompt = prompts[index]
        assert prompt[: source.tokens] == prompts[source.index][: source.tokens]
        assert known[index] + BLOCK <= source.tokens < len(prompt)
        seen = {index}
        while source is not None:
            assert source.index not in seen
            seen.add(source.index)
            source = sources[source.index]


def test_rows_that_differ_in_their_questions_wait_for_one_and_copies_for_their_own() -> None:
    system = tuple(range(100))
    prompts = [system + (1000 + index // 4,) * 30 for index in range(16)]
    sources = share(prompts, [0] * 16)
    assert sum(source is None for source in sources) == 1
    assert sorted(source.tokens for source in sources if source is not None) == [96] * 3 + [128] * 12
    depth = [0] * 16
    for index, source in sorted(enumerate(sources), key=lambda pair: pair[1].tokens if pair[1] else 0):
        depth[index] = 0 if source is None else depth[source.index] + 1
    assert max(depth) == 2


@given(st.lists(PROMPTS, max_size=12))
def test_whole_batches_read_no_block_twice(prompts: list[tuple[int, ...]]) -> None:
    sources = share(prompts, [0] * len(prompts))
    read = sum(len(prompt) - (s.tokens if s else 0) for prompt, s in zip(prompts, sources, strict=True))
    new = set()
    for prompt in prompts:
        new |= {prompt[:end] for end in range(1, len(prompt) + 1)}
    assert read <= len(new) + (2 * BLOCK - 1) * len(prompts)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(0, 4), PROMPTS, st.integers(0, 50)),
        st.tuples(st.just("batch"), st.sets(st.integers(0, 4))),
    ),
    max_size=40,
)


@given(STEPS, st.integers(0, 200))
def test_what_is_found_begins_the_prompt_and_what_is_kept_is_bounded(
    steps: list[tuple[str, int, tuple[int, ...], int] | tuple[str, set[int]]], limit: int
) -> None:
    """A content is the ids that it belongs to, so that it can be checked."""
    store: PrefixStore[tuple[int, ...]] = PrefixStore(limit)
    for step in steps:
        if len(step) == 2:
            store.trim()
            assert store.size <= limit
            store.begin(step[1])
            assert len(store) <= len(step[1])
            continue
        _, key, prompt, size = step
        found = store.find(key, prompt)
        if found is not None:
            assert 0 < found.tokens < len(prompt)
            assert found.content[: found.tokens] == prompt[: found.tokens]
        store.put(key, prompt, prompt, size)


def kept(store: PrefixStore[str], prompt: tuple[int, ...]) -> Found[str] | None:
    """What another session finds for a prompt."""
    return store.find(-1, prompt)


def test_a_session_goes_on_with_its_own() -> None:
    store: PrefixStore[str] = PrefixStore(100)
    store.begin({0, 1})
    store.put(0, (1, 2, 3), "own", 10)
    store.put(1, (1, 2, 3, 4), "other", 10)
    assert store.find(0, (1, 2, 3, 4, 5)) == Found("own", 3, own=True)
    assert store.size == 10


def test_a_session_that_dropped_its_oldest_turns_takes_what_covers_most() -> None:
    system = tuple(range(BLOCK))
    store: PrefixStore[str] = PrefixStore(100)
    store.begin({0, 1})
    store.put(1, (*system, *system, 8), "other", 10)
    store.put(0, (*system, 9, 9), "own", 10)
    assert store.find(0, (*system, *system, 7)) == Found("other", 2 * BLOCK, own=False)
    store.put(0, (*system, 0, 9, 9), "own", 10)  # less than a block more elsewhere is not worth a copy
    assert store.find(0, (*system, *system, 7)) == Found("own", BLOCK + 1, own=True)


def test_what_was_used_longest_ago_goes_first_and_of_one_batch_the_last() -> None:
    prompts = {key: (key,) * (BLOCK + 1) for key in range(4)}
    store: PrefixStore[str] = PrefixStore(30)
    store.begin(set(prompts))
    store.put(3, prompts[3], "d", 10)
    store.begin(set(prompts))
    for key in range(3):
        store.put(key, prompts[key], "abc"[key], 10)
    store.trim()
    assert [kept(store, prompts[key]) is not None for key in range(4)] == [True, True, True, False]
    store.limit = 20
    store.trim()
    assert [kept(store, prompts[key]) is not None for key in range(4)] == [True, True, False, False]


def test_sessions_that_have_ended_are_forgotten() -> None:
    store: PrefixStore[str] = PrefixStore(100)
    store.begin({0, 1})
    store.put(0, (1,) * 40, "a", 1)
    store.put(1, (2,) * 40, "b", 1)
    store.begin({1})
    assert kept(store, (1,) * 40) is None
    assert kept(store, (2,) * 40) is not None
    assert store.size_besides([1]) == 0


def test_refuses_a_limit_below_zero() -> None:
    with pytest.raises(ValueError, match="limit"):
        PrefixStore(-1)
