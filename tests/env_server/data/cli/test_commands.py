"""`sqlenv data`: flags, what is printed, the files that are written and the exit statuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from env_server.cache import CACHE_VARIABLE, default_cache_dir
from env_server.data.cli.commands import run
from env_server.data.loading import load_dataset
from env_server.settings import EnvSettings
from env_server.test_suites.store import Suites
from env_server.types import AnswerMode
from tests.env_server.data.folders import spider_entry, write_entries

Captured = pytest.CaptureFixture[str]
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 30) SELECT i FROM n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def spider(folder: Path, database: Path, queries: list[str]) -> str:
    """Write a Spider folder over the pets; return its name as a data set."""
    (folder / "database").mkdir(parents=True)
    shutil.copy(database, folder / "database" / "pets.sqlite")
    write_entries(folder, [spider_entry("pets", query=sql) for sql in queries], "train_spider.json")
    return f"spider:{folder}"


@pytest.fixture
def data(tmp_path: Path, pets_file: Path) -> str:
    return spider(tmp_path / "data", pets_file, ["SELECT 1", ROWS, "SELECT COUNT(*) FROM pets", "select  1;"])


def test_inspect(data: str, capsys: Captured) -> None:
    assert run(["inspect", data]) == 0
    captured = capsys.readouterr()
    assert "spider: 3 usable questions, 1 database, 1 question left out" in captured.out
    assert captured.out.count("gold SQL") == 3
    assert captured.err == ""
    assert run(["inspect", data, "--answer_mode", "sql", "--questions", "0", "--db", "pets"]) == 0
    out = capsys.readouterr().out
    assert "spider, database pets: 4 usable questions, 1 database, 0 questions left out" in out
    assert "gold SQL" not in out


def test_validate(data: str, tmp_path: Path, capsys: Captured) -> None:
    assert run(["validate", data]) == 0
    captured = capsys.readouterr()
    assert "spider: 4 questions over 1 database, answered with a value" in captured.out
    assert "train_spider-0001  pets  gold_too_large  the gold query returns more than 20 rows" in captured.out
    assert captured.err == ""
    out = tmp_path / "questions.jsonl"
    flags = ["--answer_mode", "sql", "--json", "--out", str(out)]
    for variants in (["--no_variants"], []):
        assert run(["validate", data, *flags, *variants]) == 0
        assert any((tmp_path / "cache").glob("test-databases-*")) is not bool(variants), (
            "variants are made unless refused"
        )
        summary: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (summary["questions"], summary["usable"], summary["left_out"]) == (4, 4, 0)
        assert summary["duplicate_of"] == {"train_spider-0003": "train_spider-0000"}
        assert summary["split"] == {"pets": "eval"}
        records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [record["question_id"] for record in records] == [f"train_spider-{i:04d}" for i in range(4)]


def test_build(data: str, capsys: Captured) -> None:
    dataset = load_dataset(data, answer_mode=AnswerMode.SQL)
    suites = Suites(dataset.databases, EnvSettings().sandbox, default_cache_dir(), read_only=True)
    assert run(["build", data, "--split", "train"]) == 0
    assert len(suites.missing(dataset.questions)["pets"]) == 4
    for made in (4, 0):
        assert run(["build", data, "--processes", "2"]) == 0
        assert f"{made} gold queries" in capsys.readouterr().out
    assert suites.missing(dataset.questions) == {}


def test_validate_fails_when_nothing_is_usable(tmp_path: Path, pets_file: Path, capsys: Captured) -> None:
    data = spider(tmp_path / "bad", pets_file, ["SELECT NULL", "SELECT * FROM nowhere"])
    assert run(["validate", data]) == 1
    captured = capsys.readouterr()
    assert "train_spider-0000  pets  gold_all_null" in captured.out
    assert "train_spider-0001  pets  gold_fails  missing: no such table: nowhere" in captured.out
    assert captured.err.startswith("sqlenv data validate: data set spider has no usable question")
    assert run(["validate", data, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["left_out_by_reason"]["gold_fails"] == 1


def test_a_report_cannot_be_written_into_a_folder_that_is_not_there(data: str, tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(SystemExit) as stopped:
            run(["validate", data, "--out", str(target)])
        assert stopped.value.code == 2


def test_export(data: str, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "for-trl"
    assert run(["export", data, "--out", str(folder), "--split", "eval"]) == 0
    assert f"{folder / 'eval.parquet'}: 4 questions" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {"eval.parquet", "README.md", "databases"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND"),
        (["inspect", "--questions", "-1"], "--questions must be a whole number from 0 on, not '-1'"),
        (["inspect", "--questions", "many"], "--questions must be a whole number from 0 on, not 'many'"),
        (["inspect", "--answer_mode", "guess"], "guess"),
        (["validate"], "required: data"),
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
