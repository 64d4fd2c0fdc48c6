"""Tests of the answer text: canonical form and readings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.dataset import Row
from env_server.judging.answers import Cell, format_answer, normalize_text, parse_answer


def bare(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text, quoted=False) for text in texts)


def quoted(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text, quoted=True) for text in texts)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "[]"),
        ([(42,)], "42"),
        ([("Paris",)], "Paris"),
        ([(None,)], "NULL"),
        ([(b"\x00\xff",)], "x'00ff'"),
        ([(1e20,)], "1e+20"),
        ([("a",), ("b",), (None,)], "a, b, NULL"),
        ([("a", 1), ("b", 2.5)], "a | 1\nb | 2.5"),
        ([("Smith, John", 1)], "Smith, John | 1"),
        ([("Smith, John",)], '"Smith, John"'),
        ([("Smith, John",), ("b",)], '["Smith, John", "b"]'),
        ([("a | b", None)], '[["a | b", null]]'),
        ([("NULL",)], '"NULL"'),
        ([("",)], '""'),
        ([(" a",)], '" a"'),
        ([("a\nb",), (b"\x01",)], '["a\\nb", "x\'01\'"]'),
    ],
)
def test_canonical_text(rows: list[Row], text: str) -> None:
    assert format_answer(rows) == text


@pytest.mark.parametrize(
    "text",
    [
        "42",
        "42.",
        " 42\n",
        "Answer: 42",
        "answer = 42",
        "The answer is 42.",
        "The final answer is: 42",
        "`42`",
        "```\n42\n```",
        "```text\n42\n```",
        "The answer is:\n```42```",
        "[42]",
        "(42)",
        "[[42]]",
        '{"count": 42}',
        '[{"count": 42}]',
    ],
)
def test_wrappers_of_a_scalar(text: str) -> None:
    assert (bare("42"),) in parse_answer(text, 1)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a, b", (bare("a"), bare("b"))),
        ("a,\nb,", (bare("a"), bare("b"))),
        ("a\n\nb", (bare("a"), bare("b"))),
        ("[a, b]", (bare("a"), bare("b"))),
        ('["a", "b"]', (quoted("a"), quoted("b"))),
        ("['a', 'b']", (quoted("a"), quoted("b"))),
        ("[('a',), ('b',)]", (quoted("a"), quoted("b"))),
        ('"a, b", c', (quoted("a, b"), bare("c"))),
        ("'it''s', 'it's'", (quoted("it's"), quoted("it's"))),
        ('5" disk, 3" disk', (bare('5" disk'), bare('3" disk'))),
        ("[1, 2.50, null, true]", (bare("1"), bare("2.50"), bare("NULL"), quoted("True"))),
    ],
)
def test_lists(text: str, rows: tuple[tuple[Cell, ...], ...]) -> None:
    assert rows in parse_answer(text, 1)


@pytest.mark.parametrize(
    "text",
    [
        "a | 1\nb | 2",
        "a|1\nb|2",
        "| a | 1 |\n| b | 2 |",
        "a, 1\nb, 2",
        "[[a, 1], [b, 2]]",
        "(a, 1), (b, 2)",
        "((a, 1), (b, 2),)",
    ],
)
def test_rows(text: str) -> None:
    assert (bare("a", "1"), bare("b", "2")) in parse_answer(text, 2)


def test_quotes_protect_separators_inside_rows() -> None:
    assert (quoted("it's | x") + bare("3"),) in parse_answer("'it's | x' | 3", 2)
    assert (quoted("a, b") + bare("3"),) in parse_answer('"a, b", 3', 2)


def test_a_quoted_text_is_never_a_list_nor_null() -> None:
    readings = parse_answer('"NULL"', 1)
    assert (quoted("NULL"),) in readings
    assert (bare("NULL"),) not in readings
    assert all(len(table) == 1 for table in parse_answer("[1]", 1))
    assert (bare("a"), bare("b")) not in parse_answer('"a, b"', 1)


@pytest.mark.parametrize("text", ["", "   ", "name | n\na | 1\nb", "a | 1 | x", "[[1, 2], [3, 4, 5]]", "[[[1, 2, 3]]]"])
def test_no_reading_of_two_columns(text: str) -> None:
    assert parse_answer(text, 2) == []


@pytest.mark.parametrize("text", ["[" * 20_000, "(" * 20_000, '{"a":' * 20_000, "[(1", "[1))", "[1 'a']", "[,]"])
def test_broken_literals_are_only_read_as_text(text: str) -> None:
    assert (bare(text),) in parse_answer(text, 1)
    assert parse_answer(text, 3) == []


@given(st.text() | st.text(alphabet=" ,|\"'`[](){}:\n\\.aN1"), st.integers(0, 4))
def test_reading_never_raises_and_keeps_the_width(text: str, width: int) -> None:
    for table in parse_answer(text, width):
        assert table == () or {len(row) for row in table} == {width}


@given(st.text() | st.text(alphabet=" ,|\"'`[](){}:\n\\.aN1", min_size=1))
def test_json_strings_are_read_exactly(text: str) -> None:
    assert (quoted(text),) in parse_answer(json.dumps(text), 1)


@given(st.text())
def test_normalized_text_ignores_case_and_padding(text: str) -> None:
    assert normalize_text(f"\t {text}\n") == normalize_text(text)


def test_normalized_text_examples() -> None:
    assert normalize_text(" Straße ") == normalize_text("STRASSE")
    assert normalize_text("\uff21\u00a0") == "a"
    assert normalize_text("a  b") != normalize_text("a b")
