"""The cache of generated data sets: loads what is whole, rebuilds what is not, leaves other files alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from env_server.data.raw import RawDataset, RawQuestion
from env_server.data.synthetic import build_scrambled
from env_server.data.synthetic.cache import MANIFEST, QUESTIONS, Recipe, cached, load
from env_server.dataset import Hardness, Split
from env_server.errors import DataError

RECIPE: Recipe = {"name": "toy", "version": 1}
QUESTION = RawQuestion("toy-a-0000", "How many?", "a", "SELECT 1", Split.EVAL, "count", hardness=Hardness.EASY)


class Builder:
    """Counts how often it is asked to build."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Iterator[tuple[str, bytes, list[RawQuestion]]]:
        self.calls += 1
        yield "a", b"content", [QUESTION]


def test_the_second_call_loads(tmp_path: Path) -> None:
    build = Builder()
    (tmp_path / "toy").mkdir()
    first = cached(tmp_path / "toy", RECIPE, build)
    assert cached(tmp_path / "toy", RECIPE, build) == first
    assert build.calls == 1
    assert first == RawDataset("toy", (QUESTION,), {"a": tmp_path / "toy" / "a.sqlite"})
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "a.sqlite").write_bytes(b"contend"),
        lambda d: (d / "a.sqlite").unlink(),
        lambda d: (d / QUESTIONS).write_text(""),
        lambda d: (d / MANIFEST).write_text("{"),
        lambda d: (d / MANIFEST).write_text("[]"),
        lambda d: (d / MANIFEST).unlink(),
    ],
    ids=["changed", "missing", "questions", "broken manifest", "other manifest", "no manifest"],
)
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    build = Builder()
    first = cached(tmp_path / "toy", RECIPE, build)
    damage(tmp_path / "toy")
    assert load(tmp_path / "toy", RECIPE) is None
    assert cached(tmp_path / "toy", RECIPE, build) == first
    assert build.calls == 2
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_another_recipe_replaces_the_cache(tmp_path: Path) -> None:
    build = Builder()
    cached(tmp_path / "toy", RECIPE, build)
    cached(tmp_path / "toy", RECIPE | {"version": 2}, build)
    assert build.calls == 2
    assert load(tmp_path / "toy", RECIPE) is None


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, bytes, list[RawQuestion]]]:
        yield "a", b"content", [QUESTION]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cached(tmp_path / "toy", RECIPE, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "thesis.tex"
    other.write_text("work")
    with pytest.raises(DataError, match=r"thesis\.tex"):
        cached(tmp_path, RECIPE, Builder())
    with pytest.raises(DataError, match="is a file"):
        cached(other, RECIPE, Builder())
    assert other.read_text() == "work"


def test_a_process_that_comes_second_keeps_the_first_result(tmp_path: Path) -> None:
    inner = Builder()

    def outer() -> Iterator[tuple[str, bytes, list[RawQuestion]]]:
        cached(tmp_path / "toy", RECIPE, inner)
        yield "a", b"content", [QUESTION]

    assert cached(tmp_path / "toy", RECIPE, outer).questions == (QUESTION,)
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(build_scrambled, tmp_path / "s", 0, 20) for _ in range(2)]
        first, second = (f.result() for f in futures)
    assert first == second
    assert len(first.databases) == 20
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert len(build_scrambled(tmp_path / "s", databases=3, questions_per_database=3).questions) == 9, "another recipe"
