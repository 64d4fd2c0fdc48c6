"""What the terminal says about a comparison: who is better, in 80 columns, with any text in it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.trainer.comparison.folders import ANSWERED, BETTER, WORSE, make_records
from tests.trainer.comparison.test_comparison import compared
from trainer.comparison.comparison import Comparison, compare_sides
from trainer.comparison.sides import Side
from trainer.comparison.text import SHOWN, print_comparison, verdict


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
    for words in ("success (40)", "easy (10)", "steps", "tokens read", "turns that parsed", "failed: gave up"):
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


def test_warnings_are_loud_and_what_differs_is_a_table() -> None:
    a = Side("a", WORSE, settings={"step_budget": 5}, flags={"beta": 0.0, "lora": None}, notes=("of another time",))
    b = Side("b", BETTER, settings={"step_budget": 9}, flags={"beta": 0.1, "lora": {"r": 8}})
    text = printed(compare_sides(a, b))
    assert "WARNING: of another time\n" in text
    rows = [line.replace("│", " ").split() for line in text.splitlines()]
    assert ["step_budget", "5", "9"] in rows
    assert ["beta", "0.0", "0.1"] in rows
    assert ["lora", "-", '{"r":', "8}"] in rows
    assert "played differently: 1" in text
    assert "runs started with other flags: 2" in text
    assert "played differently" not in printed(compared(WORSE, BETTER))


def test_text_from_data_is_no_markup_and_takes_one_place() -> None:
    turns = [ANSWERED[0] | {"argument": "[red]1[/red]\n2"}]
    a = make_records([False], question="[bold]Which\nones?[/nothing]", turns=turns)
    b = make_records([True], question="[bold]Which\nones?[/nothing]", turns=turns)
    text = printed(compared(a, b))
    assert "q000: [bold]Which ones?[/nothing]\n" in text
    assert "A  failed (gave up) in 4 steps: ANSWER [red]1[/red] 2\n" in text
