"""`sqlenv compare`, from its arguments to what it prints, in 80 columns and with any text in it, and writes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sqlenv import cli
from tests.trainer.report.folders import ANSWERED, BETTER, WORSE, as_json, make_file, make_records, make_run
from tests.trainer.report.test_comparison import compared
from trainer.report.compare import SHOWN, print_comparison
from trainer.report.comparison import Comparison, Side, compare_sides
from trainer.report.tables import verdict

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


def printed(comparison: Comparison, width: int = 80, everything: bool = False) -> str:
    file = io.StringIO()
    print_comparison(comparison, Console(file=file, width=width, highlight=False), everything=everything)
    return file.getvalue()


def test_the_verdict_is_about_the_interval() -> None:
    assert verdict(compared(WORSE, BETTER)).startswith("B is better: A 0.0% (0.0 to 32.5) and B 50.0% (")
    assert verdict(compared(BETTER, WORSE)).startswith("A is better: A 50.0% (")
    one = make_records([i == 0 for i in range(40)])
    assert verdict(compared(WORSE, one)).startswith("no measurable difference: A 0.0% (")
    assert "paired over 40 questions of 4 databases" in verdict(compared(WORSE, BETTER))


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_terminal(width: int) -> None:
    text = printed(compared(WORSE, BETTER), width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for words in ("success (40)", "easy (10)", "steps", "prompt tokens", "turns that parsed", "failed: gave up"):
        assert words in text
    assert "WARNING" not in text


def test_flipped_questions_are_shown_up_to_a_number_or_all() -> None:
    comparison = compared(WORSE, BETTER)
    text, whole = printed(comparison), printed(comparison, everything=True)
    assert f"right in B alone: 20 questions (the first {SHOWN}; --all shows them all)" in text
    assert "right in A alone: 0 questions" in text
    assert "right in B alone: 20 questions\n" in whole
    for shown, count in ((text, SHOWN), (whole, 20)):
        assert shown.count("A  failed (gave up) in 4 steps: ANSWER 17\n") == count
        assert shown.count("B  right in 2 steps: ANSWER 17\n") == count
    assert "db0, easy, q000: question q000" in text


def test_warnings_and_what_differs_are_shown() -> None:
    a = Side("a", WORSE, settings={"step_budget": 5}, flags={"beta": 0.0, "lora": None}, notes=("of another time",))
    b = Side("b", BETTER, settings={"step_budget": 9}, flags={"beta": 0.1, "lora": {"r": 8}})
    text = printed(compare_sides(a, b))
    assert "WARNING: of another time\n" in text
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["step_budget", "5", "9"] in rows
    assert ["beta", "0.0", "0.1"] in rows
    assert ["lora", "-", '{"r":', "8}"] in rows


def test_text_from_data_is_no_markup_and_one_line() -> None:
    turns = [ANSWERED[0] | {"argument": "[red]1[/red]\n2"}]
    a = make_records([False], question="[bold]Which\nones?[/nothing]", turns=turns)
    b = make_records([True], question="[bold]Which\nones?[/nothing]", turns=turns)
    text = printed(compared(a, b))
    assert "q000: [bold]Which ones?[/nothing]\n" in text
    assert "A  failed (gave up) in 4 steps: ANSWER [red]1[/red] 2\n" in text
