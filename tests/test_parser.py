"""The parser of flags: what it says of words that it does not know, and what it takes."""

from __future__ import annotations

from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlenv.parser import MOST_IN_USAGE, Parser, choice, did_you_mean, whole_number


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def parser(flags: int = 0) -> Parser:
    made = Parser(prog="paint")
    made.add_argument("--colour", type=choice(Colour), required=True)
    made.add_argument("--coats", type=int, choices=(1, 2), default=1)
    for number in range(flags):
        made.add_argument(f"--extra_{number}", metavar="X")
    return made


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(words)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(" (paint --help lists the flags)\n")
    return err.removesuffix(" (paint --help lists the flags)\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--color", "red"), "there is no flag --color; did you mean --colour?"),
        (("--color=red",), "there is no flag --color; did you mean --colour?"),
        (("--col", "red"), "there is no flag --col; did you mean --colour?"),
        (("--roller", "wide"), "there is no flag --roller"),
        (("--colour", "rde"), "--colour must be one of red, blue, not 'rde'; did you mean red?"),
        (("--colour", "green"), "--colour must be one of red, blue, not 'green'"),
        (("--colour", "red", "--coats", "3"), "--coats must be one of 1, 2, not '3'"),
        (("--colour", "red", "--coats", "many"), "--coats: invalid int value: 'many'"),
        ((), "the following arguments are required: --colour"),
        (("--colour", "red", "wall"), "unrecognized arguments: wall"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words) == f"paint: {said}"


@pytest.mark.parametrize("text", ["two", "1.5", "-1", ""])
def test_a_whole_number_is_named_with_its_bound(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    house = Parser(prog="house")
    house.add_argument("--coats", type=whole_number(0))
    assert house.parse_args(["--coats", "0"]).coats == 0
    with pytest.raises(SystemExit):
        house.parse_args([f"--coats={text}"])
    assert f"--coats must be a whole number from 0 on, not {text!r}" in capsys.readouterr().err


def test_an_unknown_flag_of_a_subcommand_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    house = Parser(prog="house")
    commands = house.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("paint").add_argument("--colour")
    assert house.parse_args(["paint", "--colour", "red"]).colour == "red"
    for words, said in (
        (["paint", "--color", "red"], "house paint: there is no flag --color; did you mean --colour?"),
        (["pain"], "house: COMMAND must be one of paint, not 'pain'; did you mean paint?"),
    ):
        with pytest.raises(SystemExit):
            house.parse_args(words)
        assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("flags", "usage"), [(2, "[--extra_1 X]"), (MOST_IN_USAGE, "paint --colour COLOUR [flags]")])
def test_a_long_usage_names_what_is_required(flags: int, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser(flags).parse_args(["--help"])
    assert usage in capsys.readouterr().out


@given(st.text(), st.lists(st.text(), max_size=5))
def test_what_was_meant_is_something_that_there_is(word: str, known: list[str]) -> None:
    said = did_you_mean(word, known)
    assert said == "" or said in {f"; did you mean {name}?" for name in known}
    if word in known and not word.startswith("-"):
        assert said
