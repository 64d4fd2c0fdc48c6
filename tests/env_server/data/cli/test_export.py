"""An exported data set: `datasets` loads it, TRL takes its prompts, and its reward function rewards the gold."""

from __future__ import annotations

import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_server.data.cli.export import COLUMNS, card, export_dataset, prompt_of, schema_text
from env_server.dataset import Dataset, Split
from env_server.errors import DataError
from env_server.settings import SandboxSettings
from env_server.sql.pool import DatabasePool
from env_server.sql.sandbox import Sandbox
from env_server.sql.schema import read_schema

SCHEMA = """
CREATE TABLE "my shop" (id INTEGER PRIMARY KEY, "unit price" REAL, "order" TEXT, kind);
CREATE TABLE sold (
    shop INT, day TEXT, n INT NOT NULL, PRIMARY KEY (shop, day), FOREIGN KEY (shop) REFERENCES "my shop");
CREATE VIEW "the ""best"" day" AS SELECT day, n FROM sold;
"""
WRITTEN = """\
CREATE TABLE "my shop" (
  id INTEGER PRIMARY KEY,
  "unit price" REAL,
  "order" TEXT,
  kind
);

CREATE TABLE sold (
  shop INT,
  day TEXT,
  n INT,
  PRIMARY KEY (shop, day),
  FOREIGN KEY (shop) REFERENCES "my shop" (id)
);

CREATE VIEW "the ""best"" day" (day, n);"""


@pytest.fixture
def dataset(pets: Dataset) -> Dataset:
    first, *others = pets.questions
    return replace(pets, questions=(replace(first, evidence="cats say meow", duplicate_of="x"), *others))


@pytest.fixture
def loaded(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The exported folder as the real `datasets` loads it, without the Hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "exported"
    assert export_dataset(dataset, folder) == {"train": 3, "eval": 1}
    datasets.disable_progress_bars()
    return datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))


def test_datasets_loads_it(loaded: Any, dataset: Dataset) -> None:
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 3, "eval": 1}
    assert loaded["train"].column_names == list(COLUMNS)
    rows = [row for split in loaded.values() for row in split]
    assert [row["question_id"] for row in rows] == [q.question_id for q in dataset.questions]
    assert rows[0]["evidence"] == "cats say meow"
    assert rows[0]["duplicate_of"] == "x"
    assert [row["ordered"] for row in rows] == [False, True, False, False]
    assert [row["answer"] for row in rows] == ["2", "Max", "Rex, Kit, Max", "cat | 2\ndog | 2\nowl | 1"]
    assert rows[3]["sql"] == "SELECT species, COUNT(*) FROM pets GROUP BY species"
    assert {row["split"] for row in loaded["eval"]} == {"eval"}


def test_the_prompts_are_conversations_for_trl(loaded: Any) -> None:
    trl = pytest.importorskip("trl")
    for row in loaded["train"]:
        assert trl.is_conversational(row)
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert all(set(message) == {"role", "content"} for message in row["prompt"])
        assert row["question"] in row["prompt"][1]["content"]
        assert "CREATE TABLE pets" in row["prompt"][1]["content"]
        assert row["sql"] not in str(row["prompt"])


def test_the_prompt_holds_the_schema_the_question_and_the_evidence(dataset: Dataset) -> None:
    with closing(DatabasePool(dataset.databases, SandboxSettings())) as pool:
        schema = pool.schema("pets")
    system, user = prompt_of(dataset.questions[0], schema)
    assert system["role"] == "system"
    assert user["content"].endswith("\n\nQuestion: How many cats are there?\nHint: cats say meow")
    assert prompt_of(dataset.questions[1], schema)[1]["content"].endswith("name?")


def test_the_schema_is_written_as_sql(tmp_path: Path) -> None:
    file = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SCHEMA)
    with closing(Sandbox(file, SandboxSettings())) as sandbox:
        text = schema_text(read_schema(sandbox))
    assert text == WRITTEN
    tables, _, _ = text.partition("CREATE VIEW")
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(tables)


def card_function(folder: Path) -> Callable[..., list[float]]:
    """The reward function of the exported README, as a person would copy it."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    first, _second = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(first.replace('Path(".")', f"Path({str(folder)!r})"), names)
    function: Callable[..., list[float]] = names["reward_rows"]
    return function


def test_the_reward_function_of_the_card(dataset: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "a folder, 100% odd?"
    export_dataset(dataset, folder)
    reward = card_function(folder)
    cases = [
        ("SELECT COUNT(*) FROM pets WHERE species = 'cat'", "SELECT 2", False, 1.0),
        ("SELECT COUNT(*) FROM pets WHERE species = 'cat'", "```sql\nSELECT 2\n```", False, 1.0),
        ("SELECT COUNT(*) FROM pets WHERE species = 'cat'", "SELECT 3", False, 0.0),
        ("SELECT name FROM pets ORDER BY age", "SELECT name FROM pets ORDER BY age", True, 1.0),
        ("SELECT name FROM pets ORDER BY age", "SELECT name FROM pets ORDER BY age DESC", True, 0.0),
        ("SELECT name FROM pets", "SELECT name FROM pets ORDER BY age DESC", False, 1.0),
        ("SELECT name FROM pets", "I do not know", False, 0.0),
        ("SELECT name FROM pets", "DELETE FROM pets", False, 0.0),
        ("SELECT 1", "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT count(*) FROM n", False, 0.0),
    ]
    golds, answers, ordered, expected = map(list, zip(*cases, strict=True))
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    files = ["databases/pets.sqlite"] * len(cases)
    assert reward(completions, files, golds, ordered, question_id=["?"] * len(cases)) == expected


def test_the_databases_are_copied(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out", Split.EVAL)
    assert (tmp_path / "out" / "databases" / "pets.sqlite").read_bytes() == dataset.databases["pets"].read_bytes()
    assert not (tmp_path / "out" / "train.parquet").exists()
    assert "train.parquet" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_the_same_data_set_gives_the_same_bytes(dataset: Dataset, tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        export_dataset(dataset, tmp_path / name)
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        contents.append([(file.relative_to(tmp_path / name), file.read_bytes()) for file in files])
    assert contents[0] == contents[1]


def test_an_empty_folder_is_used_and_another_one_is_not(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    export_dataset(dataset, out)
    with pytest.raises(DataError, match="exists and is not empty"):
        export_dataset(dataset, out)
    with pytest.raises(DataError, match="exists and is not empty"):
        export_dataset(dataset, dataset.databases["pets"])


def test_a_failure_leaves_nothing_behind(dataset: Dataset, tmp_path: Path) -> None:
    lost = replace(dataset, databases={"pets": tmp_path / "gone.sqlite"})
    with pytest.raises(DataError, match="out cannot be written: No such file"):
        export_dataset(lost, tmp_path / "out")
    odd = tuple(replace(question, db_id="../pets") for question in dataset.questions)
    unsafe = replace(dataset, questions=odd, databases={"../pets": dataset.databases["pets"]})
    with pytest.raises(DataError, match=r"'\.\./pets' cannot be a file's name"):
        export_dataset(unsafe, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_split_without_questions(dataset: Dataset, tmp_path: Path) -> None:
    train = replace(dataset, questions=tuple(dataset.select(Split.TRAIN)))
    with pytest.raises(DataError, match="no usable question in split 'eval'"):
        export_dataset(train, tmp_path / "out", Split.EVAL)
    assert export_dataset(train, tmp_path / "out") == {"train": 3}


def test_without_pyarrow_it_says_what_to_install(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None in sys.modules is how Python marks what cannot be imported.
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"not installed. pip install 'sqlenv\[parquet\]'"):
        export_dataset(dataset, tmp_path / "out")


def test_progress_counts_every_question(dataset: Dataset, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export_dataset(dataset, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 4), (4, 4)]


def test_any_name_makes_a_valid_card() -> None:
    yaml = pytest.importorskip("yaml")
    name = 'my "shop": data #1\n- x'
    _, front, _ = card(name, {"train": 1}).split("---\n", 2)
    assert yaml.safe_load(front)["pretty_name"] == name
    assert yaml.safe_load(front)["configs"][0]["data_files"] == [{"split": "train", "path": "train.parquet"}]
