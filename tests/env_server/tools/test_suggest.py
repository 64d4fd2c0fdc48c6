"""`sqlenv data suggest`: accept, edit or reject at the terminal, or all at once; the file is read as questions."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.data.loading import load_dataset
from env_server.data.question_files import SUGGESTED_FILE
from env_server.errors import DataError
from env_server.tools.commands import run
from tests.env_server.tools.planted import CUSTOMERS, QUESTIONS, database

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One table, and no questions."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "customers.csv").write_text(CUSTOMERS)
    return folder


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sits a person at the terminal, who types these lines."""

    def typing(*lines: str) -> None:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr("sys.stdin", stdin)

    return typing


def entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_all_at_once_and_twice(folder: Path, capsys: Captured) -> None:
    file = folder / SUGGESTED_FILE
    assert run(["suggest", str(folder), "--count", "12", "--yes"]) == 0
    assert capsys.readouterr().out == f"12 added to {file}.\nnext: sqlenv data doctor {folder}\n"
    first = file.read_text()
    assert run(["suggest", str(folder), "--count", "3", "--yes"]) == 0
    assert file.read_text().startswith(first), "what is there stays"
    asked = entries(file)
    assert len({entry["question"] for entry in asked}) == len(asked) == 15
    assert set(asked[0]) == {"question", "sql", "answer"}
    dataset = load_dataset(str(folder))
    assert (len(dataset.questions), dataset.excluded) == (15, ())


def test_accept_edit_reject(folder: Path, terminal: Callable[..., None], capsys: Captured) -> None:
    bad, good = "SELECT nmae FROM customers", "SELECT name FROM customers WHERE city = 'Rome'"
    terminal("n", "y", "w", "", "w", "Who?", "s", bad, "s", good, "y", "x", "q")
    assert run(["suggest", str(folder), "--count", "9"]) == 0
    out = capsys.readouterr().out
    assert "1 of 9, shop, easy" in out or "1 of 9, shop, medium" in out
    assert "That cannot be asked: the query fails: missing: no such column: nmae." in out
    accepted, edited = entries(folder / SUGGESTED_FILE)
    assert f"\n{accepted['question']}\n{accepted['sql']}\nanswer: " in out
    assert edited == {"question": "Who?", "sql": good, "answer": "Dee"}


def test_all_that_are_left(folder: Path, terminal: Callable[..., None]) -> None:
    terminal("n", "a")
    assert run(["suggest", str(folder), "--count", "4"]) == 0
    assert len(entries(folder / SUGGESTED_FILE)) == 3


def test_nothing_accepted_is_nothing_written(folder: Path, terminal: Callable[..., None], capsys: Captured) -> None:
    terminal("q")
    assert run(["suggest", str(folder)]) == 1
    assert capsys.readouterr().out.endswith("Nothing was accepted, and nothing written.\n")
    assert not (folder / SUGGESTED_FILE).exists()


def test_ctrl_d_leaves_and_what_was_accepted_stays(
    folder: Path, terminal: Callable[..., None], capsys: Captured
) -> None:
    terminal("y", "y", "s")
    assert run(["suggest", str(folder)]) == 0
    assert len(entries(folder / SUGGESTED_FILE)) == 2
    assert "2 added to" in capsys.readouterr().out


def test_tables_that_give_nothing_are_told(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "items.csv").write_text("a\n1\n")
    assert run(["suggest", str(tmp_path / "empty"), "--yes"]) == 1
    assert "There is nothing to ask about" in capsys.readouterr().out
    rows = ", ".join(f"({n}, 'name {n}', '{'ab'[n % 2]}')" for n in range(1, 20))
    script = f"CREATE TABLE pets (id INTEGER PRIMARY KEY, name, kind); INSERT INTO pets VALUES {rows};"
    database(tmp_path / "notes", "notes.sqlite", f"{script} CREATE VIRTUAL TABLE words USING fts5(text)")
    assert run(["suggest", str(tmp_path / "notes"), "--yes"]) == 1
    assert "the database has virtual tables: words" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not tables that are too small: no question could be verified."""
    (folder / "customers.csv").unlink()
    database(folder, "shop.sqlite", "CREATE TABLE t (name, n); INSERT INTO t VALUES ('a', 1), ('b', 2), ('c', 3)")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(DataError, match=CACHE_VARIABLE):
        run(["suggest", str(folder), "--yes"])


def test_what_else_the_other_questions_state(folder: Path, tmp_path: Path) -> None:
    """With several databases each question names its own; where all state a split, so do the new ones."""
    inner = folder / "north"
    inner.mkdir()
    (inner / "customers.csv").write_text(CUSTOMERS)
    own = [{"question": text, "sql": sql, "database": "shop", "split": "eval"} for text, sql in QUESTIONS]
    (folder / "questions.json").write_text(json.dumps(own))
    out = tmp_path / "drafts.jsonl"
    out.write_text('{"kept": 1}')
    assert run(["suggest", str(folder), "--count", "2", "--yes", "--out", str(out)]) == 0
    kept, *added = entries(out)
    assert kept == {"kept": 1}
    assert [(entry["database"], entry["split"]) for entry in added] == [("shop", "train"), ("north", "train")]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["synthetic", "--yes"], "synthetic is no custom folder"),
        (["shop"], "there is no terminal to ask at. Add --yes"),
        (["shop", "--yes", "--out", "no/where.jsonl"], "there is no folder no"),
    ],
)
def test_what_cannot_be_done(argv: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(DataError) as raised:
        run(["suggest", *argv])
    assert words in str(raised.value)
    with pytest.raises(SystemExit):
        run(["suggest", "shop", "--count", "0"])
