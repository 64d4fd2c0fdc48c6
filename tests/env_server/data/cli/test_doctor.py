"""`sqlenv data doctor`: what it says, asks and writes, and its exit statuses; `validate` warns of the same."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from env_server.cache import CACHE_VARIABLE
from env_server.data.cli.commands import run
from env_server.data.doctor.findings import Kind
from env_server.errors import DataError
from tests.env_server.data.doctor.planted import Planted, plant, table

Captured = pytest.CaptureFixture[str]
TROUBLE = Planted(
    Kind.NUMBER_AS_TEXT,
    {
        "items.csv": table("item,price", "lamp,$5", 'desk,"1,234.50"', "chair,3", "sofa,N/A"),
        "colours.csv": table("item,colour", *("a,red", "b,blue") * 4, "c,Red "),
    },
    [
        ("What is the average price?", "SELECT AVG(price) FROM items"),
        ("Which are red?", "SELECT item FROM colours WHERE colour = 'Red '"),
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(plant(TROUBLE, tmp_path))


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


def test_a_healthy_folder(healthy: str, capsys: Captured) -> None:
    assert run(["doctor", healthy, "--quick"]) == 0
    assert capsys.readouterr().out == f"{healthy}: nothing is wrong, as far as it can be told\n"


def test_trouble_is_told_with_its_place_and_its_repair(folder: str, capsys: Captured) -> None:
    assert run(["doctor", folder, "--quick"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: 2 errors, 3 warnings")
    assert f"{folder}/items.csv, lines 2, 3, 5, column price: 3 of 4 cells are numbers, but it is text for" in out
    assert "'$5' as 5, '1,234.50' as 1234.5, 'N/A' as NULL" in out
    assert f"can be repaired, in a copy: sqlenv data doctor {folder} --fix" in out


def test_as_json(folder: str, capsys: Captured) -> None:
    assert run(["doctor", folder, "--quick", "--json", "--only", "number_as_text"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["counts"] == {"number_as_text": 1}
    (finding,) = said["findings"]
    assert (finding["table"], finding["column"], finding["lines"]) == ("items", "price", [2, 3, 5])
    assert finding["repairable"] is True


def test_all_repairs_in_a_copy(folder: str, tmp_path: Path, capsys: Captured) -> None:
    before = Path(folder, "items.csv").read_bytes()
    assert run(["doctor", folder, "--quick", "--fix", "--yes"]) == 1
    out = capsys.readouterr().out
    target = tmp_path / "fixed" / "shop"
    assert f"repaired in {target}; {folder} is as it was." in out
    assert "What is the average price? It was 1.0, it is 414.1666666666667\n" in out
    assert "Which are red? It was c; now the gold query returns no row\n" in out
    assert Path(folder, "items.csv").read_bytes() == before
    assert (target / "items.csv").read_text() == "item,price\nlamp,5\ndesk,1234.5\nchair,3\nsofa,\n"
    with pytest.raises(DataError, match="is there already"):
        run(["doctor", folder, "--quick", "--fix", "--yes"])


@pytest.mark.parametrize(
    ("answers", "repaired"),
    [
        ("n\nx\ny\nq\n", "1 repaired"),
        ("n\na\n", "2 repaired"),
        ("q\n", "Nothing was repaired"),
        ("", "Nothing was repaired"),
    ],
)
def test_each_repair_is_asked_for(
    answers: str, repaired: str, folder: str, tmp_path: Path, terminal: Callable[[str], None], capsys: Captured
) -> None:
    terminal(answers)
    out = tmp_path / "clean"
    kinds = "number_as_text,outer_blanks,spellings"
    assert run(["doctor", folder, "--quick", "--fix", "--only", kinds, "--out", str(out)]) == 1
    assert repaired in capsys.readouterr().out
    assert out.is_dir() is not repaired.startswith("Nothing")
    if out.is_dir():
        assert "$5" in (out / "items.csv").read_text(), "the first one was declined"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "x"], "--out says how to repair, and nothing is repaired without --fix"),
        (["--yes"], "--yes says how to repair"),
        (["--fix"], "there is no terminal to ask at. Add --yes"),
        (["--only", "spelling"], "there is no kind of trouble 'spelling'. Did you mean 'spellings'?"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], words: str, healthy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(DataError) as raised:
        run(["doctor", healthy, *flags])
    assert words in str(raised.value)


def test_only_a_folder_of_ones_own_is_repaired(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--fix repairs a folder of your own, and synthetic is none"):
        run(["doctor", "synthetic", "--fix", "--yes"])


def test_validate_warns_of_the_same(folder: str, capsys: Captured) -> None:
    assert run(["validate", folder]) == 0
    out = capsys.readouterr().out
    assert "13 questions over 1 database" in out
    assert "error number_as_text: numbers that are text" in out
    assert run(["validate", folder, "--json"]) == 0
    kinds = {warning["kind"] for warning in json.loads(capsys.readouterr().out)["warnings"]}
    assert kinds == {"number_as_text", "gold_reads_text_as_numbers", "outer_blanks", "spellings", "duplicate_rows"}
