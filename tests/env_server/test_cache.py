"""The cache: entries are complete or absent and never another input's; facts do no harm where they cannot be kept."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from env_server.cache import CACHE_VARIABLE, FACTS, KEPT_DAYS, Cache, LRUCache, identity, key_of
from env_server.errors import DataError
from env_server.settings import SandboxSettings


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pets.sqlite"
    path.write_bytes(b"one")
    return path


@pytest.mark.parametrize("change", ["size", "content", "same_time", "time"])
def test_a_changed_file_is_another_one(file: Path, change: str) -> None:
    known, before = identity(file), file.stat()
    assert identity(file) == known
    file.write_bytes({"size": b"longer", "time": b"one"}.get(change, b"two"))
    later = before.st_mtime_ns + (change == "time")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns if change in ("same_time", "size") else later))
    assert identity(file) != known


def test_a_copy_that_keeps_its_time_and_a_link_are_the_same_file(file: Path, tmp_path: Path) -> None:
    copy, link = tmp_path / "copy.sqlite", tmp_path / "link.sqlite"
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    link.symlink_to(file)
    assert identity(copy) == identity(link) == identity(file)


def test_of_a_large_file_only_blocks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as sink:
        sink.truncate(3 * 10**9)
    before, status = identity(path), path.stat()
    with path.open("r+b") as sink:
        sink.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identity(path) != before


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.sqlite cannot be read: No such file"):
        identity(tmp_path / "gone.sqlite")


def test_keys_differ_with_their_parts() -> None:
    keys = [key_of("golds", SandboxSettings(vm_steps=steps), mode) for steps in (1, 2) for mode in ("value", "sql")]
    assert len({*keys, key_of("golds"), key_of("schema")}) == 6
    assert key_of("golds", SandboxSettings(), "value") == key_of("golds", SandboxSettings(), "value")


def test_an_entry_is_made_once_and_complete_or_absent(cache: Cache, tmp_path: Path) -> None:
    calls: list[Path] = []

    def make(path: Path) -> None:
        calls.append(path)
        path.mkdir()
        (path / "part").write_text("a")
        if len(calls) == 1:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cache.made("kind", "name", make)
    assert list(cache.path("kind", "name").parent.iterdir()) == []
    first = cache.made("kind", "name", make)
    assert Cache(tmp_path / "cache").made("kind", "name", make) == first == cache.path("kind", "name")
    assert len(calls) == 2
    assert [each.name for each in first.parent.iterdir()] == ["name"]


def test_who_comes_second_keeps_the_first_entry(cache: Cache) -> None:
    def inner(path: Path) -> None:
        path.mkdir()
        (path / "part").write_text("first")

    def outer(path: Path) -> None:
        cache.made("kind", "name", inner)
        path.mkdir()
        (path / "part").write_text("second")

    assert (cache.made("kind", "name", outer) / "part").read_text() == "first"


def test_a_directory_that_cannot_be_written_is_an_error_but_for_facts(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(file / "below a file")
    with pytest.raises(DataError, match=CACHE_VARIABLE):
        cache.made("kind", "name", Path.touch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache.set("schema", "three tables")
            assert cache.get("schema") is None
    (warning,) = caplog.messages
    assert CACHE_VARIABLE in warning


def test_facts_are_shared_and_replaced(cache: Cache, tmp_path: Path) -> None:
    for fact in ("old", "new"):
        cache.set("schema", fact)
    assert Cache(tmp_path / "cache").get("schema") == "new"
    assert cache.get("other") is None


def test_without_a_directory_nothing_is_kept() -> None:
    nothing = Cache(None)
    nothing.set("schema", "three tables")
    assert nothing.get("schema") is None


def test_old_facts_are_learned_again(cache: Cache, tmp_path: Path) -> None:
    cache.set("schema", "three tables")
    old = time.time() - (KEPT_DAYS + 1) * 86_400
    os.utime(cache.path(FACTS, "schema"), (old, old))
    again = Cache(tmp_path / "cache")
    again.set("golds", "two")
    assert (again.get("schema"), again.get("golds")) == (None, "two")


def _learn(folder: Path, name: str) -> None:
    cache = Cache(folder)
    for number in range(20):
        cache.set(f"{name}-{number}", f"{name} says {number}")
        cache.set("shared", name)


def test_processes_write_at_the_same_time_and_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_learn, args=(tmp_path / "cache", name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    cache = Cache(tmp_path / "cache")
    assert all(cache.get(f"{name}-{number}") == f"{name} says {number}" for name in "abc" for number in range(20))
    assert cache.get("shared") in ("a", "b", "c")


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
