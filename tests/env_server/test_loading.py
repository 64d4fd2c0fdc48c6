"""Data sets by name, and where generated ones are kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import platformdirs
import pytest

from env_server.data.loading import CACHE_VARIABLE, default_cache_dir, load_dataset
from env_server.data.questions import Dataset, Split
from env_server.data.synthetic import GENERATOR_VERSION
from env_server.errors import DataError
from env_server.settings import DisplaySettings, EnvSettings
from env_server.types import AnswerMode


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def synthetic(cache_dir: Path) -> Dataset:
    return load_dataset("synthetic", cache_dir=cache_dir)


@pytest.fixture
def spider_folder(tmp_path: Path, pets_file: Path) -> Path:
    """A small Spider folder: one database, one gold of five rows, one that fails."""
    file = tmp_path / "database" / "pets" / "pets.sqlite"
    file.parent.mkdir(parents=True)
    shutil.copy(pets_file, file)
    golds = ("SELECT name FROM pets", "SELECT name FROM people", "SELECT count(*) FROM pets")
    entries = [{"db_id": "pets", "question": "Which?", "query": sql} for sql in golds]
    (tmp_path / "train_spider.json").write_text(json.dumps(entries), encoding="utf-8")
    return tmp_path


def test_synthetic_is_split_by_database_and_needs_no_exclusion(synthetic: Dataset, cache_dir: Path) -> None:
    assert synthetic.name == "synthetic"
    assert synthetic.excluded == ()
    train, evaluation = ({q.db_id for q in synthetic.select(split)} for split in (Split.TRAIN, Split.EVAL))
    assert train
    assert evaluation
    assert train.isdisjoint(evaluation)
    folders = {path.parent for path in synthetic.databases.values()}
    assert folders == {cache_dir / f"synthetic-v{GENERATOR_VERSION}-seed0"}


def test_the_cache_changes_nothing(synthetic: Dataset, cache_dir: Path) -> None:
    assert load_dataset("synthetic:0", cache_dir=cache_dir) == synthetic


def test_the_seed_is_part_of_the_name(synthetic: Dataset, cache_dir: Path) -> None:
    other = load_dataset(" synthetic : 7 ", cache_dir=cache_dir)
    assert {path.parent.name for path in other.databases.values()} == {f"synthetic-v{GENERATOR_VERSION}-seed7"}
    assert [q.gold_sql for q in other.questions] != [q.gold_sql for q in synthetic.questions]


def test_a_spider_folder(spider_folder: Path) -> None:
    dataset = load_dataset(f"spider:{spider_folder}")
    assert dataset.name == "spider"
    assert [q.gold.rows[0] for q in dataset.questions] == [("Rex",), (5,)]
    assert [e.detail for e in dataset.excluded] == ["missing: no such table: people"]


def test_settings_and_answer_mode_reach_the_curation(spider_folder: Path) -> None:
    settings = EnvSettings(display=DisplaySettings(max_rows=4))
    small = load_dataset(f"spider:{spider_folder}", settings=settings)
    assert [e.reason.value for e in small.excluded] == ["gold_too_large", "gold_fails"]
    typed = load_dataset(f"spider:{spider_folder}", settings=settings, answer_mode=AnswerMode.SQL)
    assert [e.reason.value for e in typed.excluded] == ["gold_fails"]


def test_progress_is_reported(spider_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_dataset(f"spider:{spider_folder}", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 3)]


def test_a_tilde_in_the_path(spider_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(spider_folder.parent))
    assert len(load_dataset(f"spider:~/{spider_folder.name}").questions) == 2


@pytest.mark.parametrize("spec", ["", "nothing", "spider", "spider:", "spider: ", "Synthetic", "/some/path"])
def test_an_unknown_name_lists_the_known_ones(spec: str) -> None:
    with pytest.raises(DataError) as raised:
        load_dataset(spec)
    assert repr(spec) in str(raised.value)
    assert "synthetic[:SEED], scrambled[:SEED], spider:PATH" in str(raised.value)


@pytest.mark.parametrize("spec", ["synthetic:x", "scrambled:-1", "synthetic:1.5", "synthetic:²"])
def test_a_seed_is_a_whole_number(spec: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a whole number"):
        load_dataset(spec, cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["synthetic", "scrambled"])
def test_a_cache_that_cannot_be_written_names_the_variable(name: str, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(DataError, match=CACHE_VARIABLE) as raised:
        load_dataset(f"{name}:3", cache_dir=occupied)
    assert str(occupied / f"{name}-v{GENERATOR_VERSION}-seed3") in str(raised.value)


def test_the_cache_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert default_cache_dir() == Path(platformdirs.user_cache_dir("sqlenv"))
    monkeypatch.delenv(CACHE_VARIABLE)
    assert default_cache_dir() == Path(platformdirs.user_cache_dir("sqlenv"))


def test_the_real_folder(spider_dir: Path) -> None:
    dataset = load_dataset(f"spider:{spider_dir}")
    assert (len(dataset.questions), len(dataset.excluded), len(dataset.databases)) == (2106, 168, 46)
    assert (len(dataset.select(Split.TRAIN)), len(dataset.select(Split.EVAL))) == (1590, 516)
