"""`sqlenv data build | export` and the flags of all subcommands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE, default_cache_dir
from env_server.data.loading import load_dataset
from env_server.settings import EnvSettings
from env_server.test_suites.store import Suites
from env_server.tools.commands import run
from env_server.types import AnswerMode
from tests.env_server.data.folders import spider_entry, write_entries

Captured = pytest.CaptureFixture[str]
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30) SELECT i FROM n"


@pytest.fixture
def data(tmp_path: Path, pets_file: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "data"
    (folder / "database").mkdir(parents=True)
    shutil.copy(pets_file, folder / "database" / "pets.sqlite")
    queries = ["SELECT 1", ROWS, "SELECT COUNT(*) FROM pets", "select  1;"]
    write_entries(folder, [spider_entry("pets", query=sql) for sql in queries], "train_spider.json")
    return f"spider:{folder}"


def test_build(data: str, capsys: Captured) -> None:
    dataset = load_dataset(data, answer_mode=AnswerMode.SQL)
    suites = Suites(dataset.databases, EnvSettings().sandbox, default_cache_dir(), read_only=True)
    assert run(["build", data, "--split", "train"]) == 0
    assert len(suites.missing(dataset.questions)["pets"]) == 4
    for made in (4, 0):
        assert run(["build", data, "--processes", "2"]) == 0
        assert f"{made} gold queries" in capsys.readouterr().out
    assert suites.missing(dataset.questions) == {}


def test_export(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "for-trl"
    assert run(["export", data, "--out", str(folder), "--split", "eval"]) == 0
    assert {file.name for file in folder.iterdir()} == {"eval.parquet", "README.md", "databases"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND"),
        (["doctor"], "required: data"),
        (["doctor", "synthetic", "--samples", "-1"], "--samples must be a whole number from 0 on, not '-1'"),
        (["doctor", "synthetic", "--answer_mode", "guess"], "guess"),
        (["export", "synthetic"], "required: --out"),
        (["fetch", "wikisql", "--out", "x"], "wikisql"),
        (["fetch", "spider"], "required: --out"),
    ],
)
def test_bad_flags_end_with_the_usage(argv: list[str], words: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as raised:
        run(argv)
    assert raised.value.code == 2
    assert words in capsys.readouterr().err
