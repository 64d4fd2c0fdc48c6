"""`sqlenv data doctor`: its counts, what it shows, asks and writes, and its exit statuses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.errors import DataError
from env_server.tools.commands import run
from env_server.tools.findings import Kind
from tests.env_server.tools.planted import QUESTIONS, Planted, database, plant, table

Captured = pytest.CaptureFixture[str]
FAULTY = Planted(
    Kind.NUMBER_AS_TEXT,
    {
        "items.csv": table("item,price", "lamp,$5", 'desk,"1,234.50"', "chair,3", "sofa,N/A"),
        "colours.csv": table("item,colour", *("a,red", "b,blue") * 4, "c,Red "),
    },
    [
        ("What is the average price?", "SELECT AVG(price) FROM items"),
        ("Which are red?", "SELECT item FROM colours WHERE colour = 'Red '"),
        ("Who lives on the moon?", "SELECT name FROM customers WHERE city = 'the moon'"),
        ("How many people are there?", "select COUNT(*)  FROM customers"),
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(plant(FAULTY, tmp_path))


@pytest.fixture
def healthy(tmp_path: Path) -> str:
    return str(plant(Planted(Kind.EMPTY_TABLE), tmp_path))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sits a person at the terminal, who answers so."""

    def answering(lines: str) -> None:
        stdin = io.StringIO(lines)
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", stdin)

    return answering


def as_json(*argv: str, capsys: Captured) -> dict[str, Any]:
    run(["doctor", *argv, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_healthy_folder(healthy: str, capsys: Captured) -> None:
    assert run(["doctor", healthy, "--quick"]) == 0
    out = capsys.readouterr().out
    assert f"{healthy}: 11 questions, answered with a value: 11 usable, 0 excluded" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert rows["train"] == ["1", "9", "9"]
    assert rows["eval"] == ["1", "2", "2"]
    assert rows["shop"] == ["11", "1", "4", "5", "train", "and", "eval"]
    assert out.endswith(f"{healthy}: no issues found\n")


def test_findings_have_their_place_and_their_fix(folder: str, capsys: Captured) -> None:
    assert run(["doctor", folder, "--quick"]) == 1
    out = capsys.readouterr().out
    assert "15 questions, answered with a value: 14 usable, 1 excluded (1 gold_empty), 1 duplicate" in out
    assert f"{folder}/items.csv, lines 2, 3, 5, column price: 3 of 4 cells are numbers" in out
    assert "'$5' as 5, '1,234.50' as 1234.5, 'N/A' as NULL" in out
    assert f"can be fixed, in a copy: sqlenv data doctor {folder} --fix" in out


def test_every_question_is_accounted_for_as_json(folder: str, capsys: Captured) -> None:
    found = as_json(folder, "--quick", capsys=capsys)
    assert (found["usable"], found["excluded"], found["splits"]) == (14, {"gold_empty": 1}, {"train": 11, "eval": 3})
    assert [each["question_id"] for each in found["questions"] if not each["usable"]] == ["questions-0013"]
    assert len(found["questions"]) == len(QUESTIONS) + len(FAULTY.questions)
    copies = {each["question_id"]: each["duplicate_of"] for each in found["questions"] if each.get("duplicate_of")}
    assert copies == {"questions-0014": "questions-0000"}
    (finding,) = [each for each in found["findings"] if each["kind"] == "number_as_text"]
    assert (finding["table"], finding["column"], finding["lines"]) == ("items", "price", [2, 3, 5])
    assert finding["fixable"] is True
    only = as_json(folder, "--quick", "--only", "number_as_text", capsys=capsys)
    assert only["counts"] == {"number_as_text": 1}


def test_mutants_are_counted_with_test_databases(healthy: str, capsys: Captured) -> None:
    records = as_json(healthy, capsys=capsys)["questions"]
    assert all(each["agreeing_mutants"] * 2 <= each["mutants"] for each in records)


def test_nothing_usable_is_an_issue(tmp_path: Path, capsys: Captured) -> None:
    database(tmp_path / "bad", "t.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES (1)")
    (tmp_path / "bad" / "questions.json").write_text(json.dumps([{"question": "?", "sql": "SELECT * FROM nowhere"}]))
    assert run(["doctor", str(tmp_path / "bad")]) == 1
    assert "0 usable, 1 excluded (1 gold_fails)" in capsys.readouterr().out


def test_one_database_with_its_columns_and_samples(folder: str, capsys: Captured) -> None:
    assert run(["doctor", folder, "--quick", "--db", "shop", "--samples", "2"]) == 1
    out = capsys.readouterr().out
    assert "customer_id INTEGER primary key" in out
    assert out.count("  answer: ") == 2


def test_all_fixes_in_a_copy(folder: str, tmp_path: Path, capsys: Captured) -> None:
    before = Path(folder, "items.csv").read_bytes()
    assert run(["doctor", folder, "--quick", "--fix", "--yes"]) == 1
    out = capsys.readouterr().out
    target = tmp_path / "fixed" / "shop"
    assert f"fixed in {target}; {folder} is as it was." in out
    assert "What is the average price? It was 1.0, it is 414.1666666666667\n" in out
    assert "Which are red? It was c; now the gold query returns no row\n" in out
    assert Path(folder, "items.csv").read_bytes() == before
    assert (target / "items.csv").read_text() == "item,price\nlamp,5\ndesk,1234.5\nchair,3\nsofa,\n"
    assert "--only duplicate_rows" in out
    assert (target / "colours.csv").read_text().count("a,red\n") == 4, "equal rows may be meant so"
    with pytest.raises(DataError, match="exists already"):
        run(["doctor", folder, "--quick", "--fix", "--yes"])
    out_folder = str(tmp_path / "once")
    run(["doctor", folder, "--quick", "--fix", "--yes", "--only", "duplicate_rows", "--out", out_folder])
    assert Path(out_folder, "colours.csv").read_text().count("a,red\n") == 1


@pytest.mark.parametrize(
    ("answers", "fixed"),
    [("n\nx\ny\nq\n", "1 fixed"), ("n\na\n", "2 fixed"), ("q\n", "Nothing was fixed"), ("", "Nothing was fixed")],
)
def test_each_fix_is_asked_for(
    answers: str, fixed: str, folder: str, tmp_path: Path, terminal: Callable[[str], None], capsys: Captured
) -> None:
    terminal(answers)
    out = tmp_path / "clean"
    kinds = "number_as_text,surrounding_whitespace,inconsistent_values"
    assert run(["doctor", folder, "--quick", "--fix", "--only", kinds, "--out", str(out)]) == 1
    assert fixed in capsys.readouterr().out
    assert out.is_dir() is not fixed.startswith("Nothing")
    if out.is_dir():
        assert "$5" in (out / "items.csv").read_text(), "the first one was declined"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "x"], "--out says how to fix"),
        (["--yes"], "--yes says how to fix"),
        (["--fix"], "there is no terminal to ask at. Add --yes"),
        (["--fix", "--yes", "--db", "shop"], "Leave --db out"),
        (["--samples", "1", "--json"], "Leave --samples out"),
        (["--only", "inconsistent_value"], "Did you mean 'inconsistent_values'?"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], words: str, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(DataError) as raised:
        run(["doctor", healthy, *flags])
    assert words in str(raised.value)


def test_only_a_custom_folder_is_fixed() -> None:
    with pytest.raises(DataError, match="--fix needs a custom folder, and synthetic is none"):
        run(["doctor", "synthetic", "--fix", "--yes"])


def test_an_encoding_that_is_stated_is_read(tmp_path: Path) -> None:
    text = table("item,town", "lamp,Łódź", "desk,Oslo")
    folder = plant(Planted(Kind.NOT_UTF8, {"items.csv": text.encode("cp1250")}), tmp_path)
    assert run(["doctor", str(folder), "--quick", "--fix", "--yes"]) == 1
    assert not (tmp_path / "fixed").exists(), "no encoding was stated"
    run(["doctor", str(folder), "--quick", "--fix", "--yes", "--encoding", "cp1250"])
    assert (tmp_path / "fixed" / "shop" / "items.csv").read_text(encoding="utf-8") == text
