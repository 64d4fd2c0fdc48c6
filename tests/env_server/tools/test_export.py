"""An exported data set: `datasets` loads it, TRL takes its prompts, and its reward function rewards the gold."""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from env_server.dataset import Dataset, Split
from env_server.errors import DataError
from env_server.tools.export import COLUMNS, card, export_dataset


@pytest.fixture
def dataset(pets: Dataset) -> Dataset:
    first, *others = pets.questions
    return replace(pets, questions=(replace(first, evidence="cats say meow", duplicate_of="x"), *others))


def test_datasets_and_trl_take_it(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "exported"
    seen: list[tuple[int, int]] = []
    assert export_dataset(dataset, folder, progress=lambda *counts: seen.append(counts)) == {"train": 3, "eval": 1}
    assert seen == [(3, 4), (4, 4)]
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 3, "eval": 1}
    assert loaded["train"].column_names == list(COLUMNS)
    rows = [row for split in loaded.values() for row in split]
    assert [row["question_id"] for row in rows] == [q.question_id for q in dataset.questions]
    assert (rows[0]["evidence"], rows[0]["duplicate_of"]) == ("cats say meow", "x")
    assert [row["ordered"] for row in rows] == [False, True, False, False]
    assert [row["answer"] for row in rows] == ["2", "Max", "Rex, Kit, Max", "cat | 2\ndog | 2\nowl | 1"]
    assert rows[3]["sql"] == "SELECT species, COUNT(*) FROM pets GROUP BY species"
    assert [row["split"] for row in rows] == ["train"] * 3 + ["eval"]
    for row in rows:
        assert trl.is_conversational(row)
        system, user = row["prompt"]
        assert (system["role"], user["role"], set(user)) == ("system", "user", {"role", "content"})
        hint = f"\nHint: {row['evidence']}" if row["evidence"] else ""
        assert user["content"].endswith(f"\n\nQuestion: {row['question']}{hint}")
        assert "CREATE TABLE pets" in user["content"]
        assert row["sql"] not in str(row["prompt"])


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


LONG = "hex(zeroblob(49000))"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT "
HOSTILE = [
    "ATTACH 'stolen.sqlite' AS stolen",
    "VACUUM INTO 'stolen.sqlite'",
    "PRAGMA table_info(pets)",
    "SELECT * FROM pragma_database_list",
    "CREATE TEMP TABLE t (a)",
    "SELECT load_extension('libc.so.6')",
    "SELECT hex(randomblob(8))",
    "SELECT zeroblob(900000000)",
    "SELECT printf('%.*c', 900000000, 'x')",
    "SELECT 1; SELECT 2",
    "SELECT \0",
    "SELECT '\ud800'",
    f"{ENDLESS} i FROM n",
    f"{ENDLESS} count(*) FROM n",
    f"{ENDLESS} i, {LONG} FROM n ORDER BY 2 DESC",
    f"WITH RECURSIVE n(i) AS (SELECT {LONG} UNION SELECT i || 1 FROM n) SELECT count(*) FROM n",
    f"{ENDLESS} count(*) FROM n WHERE {LONG} || i LIKE '%{'0' * 190}1'",
    f"{ENDLESS} count(*) FROM n WHERE hex(zeroblob(4900)) || i LIKE '%0_0_0_0_0_0_0_0_0_0_0_0_1'",
    f"{ENDLESS} count(*) FROM n WHERE instr(hex(zeroblob(4900)) || i, hex(zeroblob(2400)) || '1')",
    f'{ENDLESS} sum(length("trim"(hex(zeroblob(4900)), hex(zeroblob(4800)) || i))) FROM n',
    f"{ENDLESS} sum(length(replace(hex(zeroblob(4900)), hex(zeroblob(2400)) || '1', i))) FROM n",
    "SELECT count(*) FROM pets a, pets b, pets c, pets d, pets e, pets f, pets g, pets h, pets i, pets j, pets k",
]


@pytest.mark.parametrize("query", HOSTILE, ids=lambda query: ascii(query)[:60])
def test_the_reward_function_bounds_what_a_model_writes(
    query: str, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exported"
    export_dataset(dataset, folder)
    reward = card_function(folder)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    completions = [[{"role": "assistant", "content": query}]]
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for gold in ("SELECT 1", query):
        assert reward(completions, ["databases/pets.sqlite"], [gold], [False]) == [0.0]
    # Three queries, each two seconds at most, and what a hundred instructions take.
    assert time.process_time() - began < 12
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1_000_000  # kB; other tests ran here before
    assert sorted(tmp_path.rglob("*")) == before


def test_the_same_data_set_gives_the_same_bytes(dataset: Dataset, tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        export_dataset(dataset, tmp_path / name, Split.EVAL)
        files = sorted(file for file in (tmp_path / name).rglob("*") if file.is_file())
        contents.append({str(file.relative_to(tmp_path / name)): file.read_bytes() for file in files})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {"README.md", "databases/pets.sqlite", "eval.parquet"}, "a split alone"
    assert contents[0]["databases/pets.sqlite"] == dataset.databases["pets"].read_bytes()
    assert b"train.parquet" not in contents[0]["README.md"]


def test_an_empty_folder_is_used_and_another_one_is_not(dataset: Dataset, tmp_path: Path) -> None:
    train = replace(dataset, questions=tuple(dataset.select(Split.TRAIN)))
    out = tmp_path / "deep" / "out"
    out.mkdir(parents=True)
    with pytest.raises(DataError, match="no usable question in split 'eval'"):
        export_dataset(train, out, Split.EVAL)
    assert export_dataset(train, out) == {"train": 3}
    for occupied in (out, dataset.databases["pets"]):
        with pytest.raises(DataError, match="exists and is not empty"):
            export_dataset(dataset, occupied)


def test_a_failure_leaves_nothing_behind(dataset: Dataset, tmp_path: Path) -> None:
    lost = replace(dataset, databases={"pets": tmp_path / "gone.sqlite"})
    with pytest.raises(DataError, match="out cannot be written: No such file"):
        export_dataset(lost, tmp_path / "out")
    odd = tuple(replace(question, db_id="../pets") for question in dataset.questions)
    unsafe = replace(dataset, questions=odd, databases={"../pets": dataset.databases["pets"]})
    with pytest.raises(DataError, match=r"'\.\./pets' cannot be a file's name"):
        export_dataset(unsafe, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_pyarrow_it_says_what_to_install(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python marks what cannot be imported.
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        DataError, match=r"written with pyarrow, .* not installed\. In SQLEnv's folder: pip install -e '\.\[parquet\]'$"
    ):
        export_dataset(dataset, Path("out"))


def test_any_name_makes_a_valid_card() -> None:
    yaml = pytest.importorskip("yaml")
    name = 'my "shop": data #1\n- x'
    _, front, _ = card(name, {"train": 1}).split("---\n", 2)
    assert yaml.safe_load(front)["pretty_name"] == name
    assert yaml.safe_load(front)["configs"][0]["data_files"] == [{"split": "train", "path": "train.parquet"}]
