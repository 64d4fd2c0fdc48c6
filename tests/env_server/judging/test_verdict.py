"""Tests of the judges: examples of every rule, and agreement with a brute-force oracle."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from decimal import Decimal
from itertools import permutations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from env_server.dataset import Gold, Row, SQLValue
from env_server.judging.answers import format_answer, normalize_text
from env_server.judging.verdict import floats_agree, judge_rows, judge_value
from env_server.settings import SQLRule


def gold(*rows: Row, ordered: bool = False) -> Gold:
    return Gold(rows=rows, ordered=ordered)


NASTY = " ,|\"'`[](){}:\n\\.aNUL1-x"
TEXTS = st.one_of(
    st.text(),
    st.text(alphabet=NASTY),
    st.sampled_from(
        [
            "NULL",
            "null",
            "None",
            "'NULL'",
            '"NULL"',
            "007",
            "42",
            "1,234",
            "nan",
            "inf",
            "x'00'",
            "[]",
            "[1, 2]",
            "a | b",
            "",
            " ",
            "```",
            "```a```",
            "Answer: 42",
            "The answer is x.",
            "a\\nb",
            "it's",
            "true",
            "\ud800",
            "\u2028",
        ]
    ),
)
VALUES: st.SearchStrategy[SQLValue] = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=True),
    st.sampled_from([1e-9, 1e20, -0.0, 0.0, 0.1 + 0.2, math.inf, -math.inf, math.nan, 2**53 + 1, 5e-324]),
    st.binary(max_size=6),
    TEXTS,
)
# Values whose text says all there is to say: no separators, no text that reads as another type.
TAME: st.SearchStrategy[SQLValue] = st.one_of(
    st.none(), st.integers(-3, 3), st.sampled_from(["a", "b", "A", "NULL", "none", " a", "a b", "it's"])
)


def tables(values: st.SearchStrategy[SQLValue], max_rows: int = 5) -> st.SearchStrategy[list[Row]]:
    return st.integers(1, 3).flatmap(
        lambda width: st.lists(st.tuples(*[values] * width), min_size=1, max_size=max_rows)
    )


def identity(value: SQLValue) -> Hashable:
    return ("text", normalize_text(value)) if isinstance(value, str) else value


def same_table(rows: Sequence[Row], wanted: Sequence[Row], *, ordered: bool) -> bool:
    """Compare by trying every permutation of the columns."""
    if len(rows) != len(wanted) or len(rows[0]) != len(wanted[0]):
        return False
    target = [tuple(identity(v) for v in row) for row in wanted]
    for order in permutations(range(len(rows[0]))):
        candidate = [tuple(identity(row[i]) for i in order) for row in rows]
        if candidate == target or (not ordered and Counter(candidate) == Counter(target)):
            return True
    return False


# --- value mode: cells ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42", 42),
        ("42.0", 42),
        ("+42", 42),
        ("4.2e1", 42),
        ('"42"', 42),
        ("1,234", 1234),
        ("1,234,567.5", 1234567.5),
        ("9223372036854775807", 2**63 - 1),
        ("3.14", 3.14159),
        ("3.1416", 3.14159),
        ("3.14159", 3.14159),
        ("3", 3.0),
        ("2.68", 2.675),
        ("0.3", 0.1 + 0.2),
        ("17.330000000000002", 17.33),
        ("0.00", 0.0),
        ("0", -0.0),
        ("1e-9", 1e-9),
        ("100000000000000000000", 1e20),
        ("inf", math.inf),
        ("-Infinity", -math.inf),
        ("new  york", " New  York"),
        ("\uff30\uff21\uff32\uff29\uff33", "Paris"),
        ("007", "007"),
        ("2020-01-31", "2020-01-31"),
        ("NULL", None),
        ("null", None),
        ("None", None),
        ("None", "None"),
        ("null", "null"),
        ('"NULL"', "NULL"),
        ("'NULL'", "NULL"),
        ("x'00FF'", b"\x00\xff"),
        ("a, b", "a, b"),
        ("'it's '", "it's "),
        ('"The Pilot"', '"The Pilot"'),
        ("first\\nsecond", "first\nsecond"),
        ("[1, 2]", "[1, 2]"),
        ("Inc.", "Inc."),
        ("The answer is 42.", "The answer is 42."),
        ("true", "true"),
    ],
)
def test_right_values(answer: str, value: SQLValue) -> None:
    assert judge_value(answer, gold((value,))).correct


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("42.3", 42),
        ("9223372036854775806", 2**63 - 1),
        ("12,34", 1234),
        ("3", 3.14159),
        ("3.15", 3.14159),
        ("3.141", 3.14159),
        ("3.14159", 3.14),
        ("0", 0.004),
        ("0", 1e-9),
        ("0.0", 1e-300),
        ("1e-9", 0.0),
        ("1.1", 1.0),
        ("-3.14", 3.14),
        ("1e20", 1.02e20),
        ("inf", 1e308),
        ("1e9999", math.inf),
        ("nan", 1.0),
        ("7", "007"),
        ("42.0", "42"),
        ("true", 1),
        ("[true]", 1),
        ("yes", 1),
        ("NULL", "NULL"),
        ("NULL", "null"),
        ('"NULL"', None),
        ("'None'", None),
        ("['NULL']", None),
        ("", None),
        ("", "a"),
        ("0", None),
        ("x'00'", b"\x00\x00"),
        ("a, b", "a"),
        ("a or b", "a"),
        ("1 or 2", 1),
        ("1, 2", 1),
        ("1\n2", 1),
        ("1 | 2", 1),
        ("[1, 2]", 1),
        ("1/2", 1),
        ("count\n1", 1),
        ("about 42", 42),
        ("42 people", 42),
        ("45%", 45),
        ("x" * 1_000_000, "x"),
        ("1" * 20_000, 1),
        ("[" * 9_000, 1),
    ],
)
def test_wrong_values(answer: str, value: SQLValue) -> None:
    verdict = judge_value(answer, gold((value,)))
    assert not verdict.correct
    assert verdict.reason


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 12))
def test_rounding_a_float_is_accepted_up_to_one_percent(value: float, decimals: int) -> None:
    typed = f"{value:.{decimals}f}"
    loose = abs(Decimal(typed) - Decimal(repr(value))) > abs(Decimal(repr(value))) / 100
    assert judge_value(typed, gold((value,))).correct != loose


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_never_looser_than_one_percent(typed: float, value: float) -> None:
    assume(abs(Decimal(repr(typed)) - Decimal(repr(value))) > abs(Decimal(repr(value))) / 100)
    assert not floats_agree(Decimal(repr(typed)), Decimal(repr(value)))
    assert not judge_value(repr(typed), gold((value,))).correct


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_integers_are_exact(typed: int, value: int) -> None:
    assert judge_value(str(typed), gold((value,))).correct == (typed == value)
    assert judge_value(f"{typed:,}", gold((value,))).correct == (typed == value)


# --- value mode: tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        ("b, a", [("a",), ("b",)]),
        ("a\nb", [("a",), ("b",)]),
        ('["b", "a"]', [("a",), ("b",)]),
        ("a, a, b", [("a",), ("b",), ("a",)]),
        ("1,234\n5,678", [(1234,), (5678,)]),
        ("a | 1", [("a", 1)]),
        ("a, 1", [("a", 1)]),
        ("1 | a", [("a", 1)]),
        ('["a", 1]', [("a", 1)]),
        ('{"name": "a", "n": 1}', [("a", 1)]),
        ("2 | b\n1 | a", [("a", 1), ("b", 2)]),
        ('```json\n[["a", 1], ["b", 2]]\n```', [("a", 1), ("b", 2)]),
        ("'a | b' | 3\nc | 4", [("a | b", 3), ("c", 4)]),
        ("Smith, John | 3", [("Smith, John", 3)]),
        ("42 | 42", [(42, "42")]),
        ("42, 42", [(42,), ("42",)]),
        # Only one pairing works: 3.1 with 3.13, so that 3.12 is left for 3.12.
        ("3.1, 3.12", [(3.12,), (3.13,)]),
        ("3.1 | x\n3.12 | x", [(3.12, "x"), (3.13, "x")]),
    ],
)
def test_right_tables(answer: str, rows: list[Row]) -> None:
    assert judge_value(answer, gold(*rows)).correct


@pytest.mark.parametrize(
    ("answer", "rows"),
    [
        ("a", [("a",), ("b",)]),
        ("a, b, c", [("a",), ("b",)]),
        ("a, b", [("a",), ("a",), ("b",)]),
        ("a, b, b", [("a",), ("a",), ("b",)]),
        ('"a, b"', [("a",), ("b",)]),
        ("a", [("a", 1)]),
        ("a | 1 | x", [("a", 1)]),
        ("a | 2\nb | 1", [("a", 1), ("b", 2)]),
        ("a | 1\n2 | b", [("a", 1), ("b", 2)]),
        ("name | n\na | 1\nb | 2", [("a", 1), ("b", 2)]),
        ("a, 1, b, 2", [("a", 1), ("b", 2)]),
        ("1,234, 5,678", [(1234,), (5678,)]),
        ("3.12, 3.12", [(3.12,), (3.13,)]),
        ("[]", [("a",)]),
    ],
)
def test_wrong_tables(answer: str, rows: list[Row]) -> None:
    assert not judge_value(answer, gold(*rows)).correct


def test_order_counts_only_where_the_gold_is_ordered() -> None:
    rows: list[Row] = [("a", 1), ("b", 2)]
    assert judge_value("b | 2\na | 1", gold(*rows)).correct
    assert not judge_value("b | 2\na | 1", gold(*rows, ordered=True)).correct
    assert judge_value("1 | a\n2 | b", gold(*rows, ordered=True)).correct


def test_no_rows() -> None:
    assert judge_value("[]", gold()).correct
    assert not judge_value("", gold()).correct
    assert not judge_value("a", gold()).correct


@given(tables(VALUES), st.booleans())
def test_canonical_answer_is_right(rows: list[Row], ordered: bool) -> None:
    assert judge_value(format_answer(rows), gold(*rows, ordered=ordered)).correct


@given(tables(VALUES), st.randoms(use_true_random=False))
def test_canonical_answer_is_right_in_any_order(rows: list[Row], rng: random.Random) -> None:
    order = rng.sample(range(len(rows[0])), len(rows[0]))
    shuffled = [tuple(row[i] for i in order) for row in rng.sample(rows, len(rows))]
    assert judge_value(format_answer(shuffled), gold(*rows)).correct


@given(st.data(), st.booleans())
def test_value_verdict_agrees_with_brute_force(data: st.DataObject, ordered: bool) -> None:
    rows = data.draw(tables(TAME))
    other = data.draw(st.one_of(tables(TAME), st.permutations(rows), st.just([*rows, rows[0]]), st.just(rows[1:])))
    # One row and one column are both written `a, b`; between equal widths the text is unambiguous.
    assume(other and len(other[0]) == len(rows[0]))
    expected = same_table(other, rows, ordered=ordered)
    assert judge_value(format_answer(other), gold(*rows, ordered=ordered)).correct == expected


def test_null_in_json_is_never_a_text() -> None:
    rows = [(None, None), (3, "NULL"), ("NULL", None)]
    other = [(None, None), (3, None), ("NULL", None)]
    assert judge_value(format_answer(rows), gold(*rows)).correct
    assert not judge_value(format_answer(other), gold(*rows)).correct


@given(st.text() | st.text(alphabet=NASTY), tables(VALUES), st.booleans())
def test_judging_text_never_raises(answer: str, rows: list[Row], ordered: bool) -> None:
    assert judge_value(answer, gold(*rows, ordered=ordered)).reason


def test_canonical_answer_of_large_tables() -> None:
    rng = random.Random(0)
    close: list[Row] = [(1 + i * 1e-7, f"name {i % 7}", i) for i in range(500)]
    equal: list[Row] = [(1, 1, 1, 1, 1, 1)] * 500
    booleans: list[Row] = [tuple(rng.randint(0, 1) for _ in range(12)) for _ in range(60)]
    for rows in (close, equal, booleans):
        shuffled = rng.sample(rows, len(rows))
        assert judge_value(format_answer(shuffled), gold(*rows)).correct
        assert judge_value(format_answer(rows), gold(*rows, ordered=True)).correct


def test_adversarial_answers_are_wrong_and_bounded() -> None:
    close = gold(*[(0.5 + i * 1e-6,) for i in range(1000)])
    assert not judge_value(", ".join(["0.5"] * 999 + ["0.7"]), close).correct
    assert not judge_value(", ".join(["0.5"] * 999 + ["0.5009991"]), close).correct
    rows: list[Row] = [tuple(int(i == j) for j in range(12)) for i in range(12)]
    altered = [*rows[:-2], rows[-1], rows[-1]]
    assert not judge_value(format_answer(altered), gold(*rows)).correct
    for text in ('"x,' * 4_000, "'a' " * 3_000, " " * 12_000 + "x", ",|" * 5_000, '"\\' * 5_000):
        assert not judge_value(text, gold(("a", 1), ("b", 2))).correct
        assert not judge_value(text, gold(("a",), ("b",))).correct


# --- sql mode ------------------------------------------------------------------------------------------------


def test_tables_without_rows_are_equal() -> None:
    """A gold may return nothing on a variant of its database; how many columns it has is then not known."""
    for rule in SQLRule:
        assert judge_rows([], gold(ordered=True), rule).correct
        assert not judge_rows([(None,)], gold(), rule).correct


def test_tables_that_cannot_be_compared_are_wrong() -> None:
    """A projective plane and one with two corners turned over: everything about them is alike."""
    points = [(1, a, b) for a in range(7) for b in range(7)] + [(0, 1, a) for a in range(7)] + [(0, 0, 1)]
    plane = [[int(sum(x * y for x, y in zip(p, q, strict=True)) % 7 == 0) for p in points] for q in points]
    rows: list[Row] = [tuple(row) for row in plane]
    first, second = plane[:2]
    i = next(i for i in range(57) if first[i] and not second[i])
    j = next(j for j in range(57) if second[j] and not first[j])
    for row in (first, second):
        row[i], row[j] = row[j], row[i]
    assert judge_rows([tuple(row) for row in plane], gold(*rows)) == (
        False,
        "the tables are too ambiguous to compare",
    )


@pytest.mark.parametrize(
    ("stated", "answer", "correct"),
    [
        (3.33, "3.3333333", True),
        (3.33, "3.33", True),
        (3.3, "3.3333333", True),
        (3.33, "3.3", True),
        (3.33, "3.34", False),
        (3.33, "3.336", False),
        (0.1, "0.14", True),
        (0.1, "0.2", False),
        (1e20, "1.1e20", False),
        (3, "3.2", False),
    ],
)
def test_a_stated_float_stands_for_all_that_round_to_it(stated: float, answer: str, correct: bool) -> None:
    assert judge_value(answer, Gold(((stated,),), ordered=False, stated=True)).correct is correct


@given(st.floats(-1e6, 1e6), st.integers(1, 4))
def test_what_a_person_rounded_is_what_it_was_rounded_from(value: float, digits: int) -> None:
    assert judge_value(repr(value), Gold(((round(value, digits),),), ordered=False, stated=True)).correct
