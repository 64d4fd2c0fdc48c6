"""`sqlenv compare`, from its arguments to what it prints and writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlenv import cli
from tests.trainer.comparison.folders import BETTER, WORSE, as_json, make_file, make_run

Captured = pytest.CaptureFixture[str]


def test_two_evaluations_of_a_run(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path / "run", {"before": WORSE, "after": BETTER})
    assert cli.main(["compare", f"{run.path}:before", str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert "B is better" in " ".join(out.split())
    assert err == ""


def test_json_is_all_that_there_is_on_stdout(tmp_path: Path, capsys: Captured) -> None:
    run = make_run(tmp_path / "run", {"after": BETTER}, config={"grpo": {"beta": 0.0}})
    other = make_run(tmp_path / "other", {"after": BETTER}, config={"grpo": {"beta": 0.1}})
    base = make_file(tmp_path / "base.jsonl", WORSE[:-1])
    png = tmp_path / "p.png"
    assert cli.main(["compare", str(base), str(run.path), "--json", "--png", str(png)]) == 0
    out, err = capsys.readouterr()
    found = as_json(out)
    assert (found["a"]["name"], found["b"]["policy"]) == (str(base), "after")
    assert found["success"]["difference"]["n"] == 39
    low, high = found["success"]["difference"]["interval"]
    assert 0 < low < found["success"]["difference"]["mean"] < high
    assert list(found["by_difficulty"]) == ["easy", "medium", "hard", "extra"]
    assert found["means"]["steps"]["interval"][0] <= found["means"]["steps"]["mean"]
    assert len(found["gained"]) == found["success"]["difference"]["better"] == 20, "all of them"
    assert found["flags"] == [], "an evaluation alone has none"
    assert "B alone 1" in found["warnings"][0]
    assert err == f"picture {png}\n"
    assert png.is_file()
    assert cli.main(["compare", str(run.path), str(other.path), "--json"]) == 0
    assert as_json(capsys.readouterr().out)["flags"] == [{"name": "beta", "a": 0.0, "b": 0.1}]


def test_what_cannot_be_compared_is_one_line_and_status_2(tmp_path: Path, capsys: Captured) -> None:
    a = make_file(tmp_path / "a.jsonl", WORSE[:2])
    b = make_file(tmp_path / "b.jsonl", WORSE[2:])
    assert cli.main(["compare", str(a), str(b)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sqlenv compare: they have no question in common: ")
    assert err.count("\n") == 1
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", str(a), str(a), "--png", str(tmp_path / "no" / "p.png")])
    assert stopped.value.code == 2
    assert "--png " in capsys.readouterr().err
