"""What a cell stands for: numbers with decoration, dates in many forms, letters in the wrong encoding."""

from __future__ import annotations

import math
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_server.data.cells import (
    PLAIN_INTEGER,
    PLAIN_REAL,
    DecimalMark,
    Twins,
    date_orders,
    decimal_marks,
    fix_mojibake,
    is_missing,
    is_mojibake,
    is_nearly_number,
    is_placeholder,
    read_date,
    read_number,
)


@pytest.mark.parametrize(
    ("text", "mark", "value", "unit"),
    [
        ("5", ".", 5, ""),
        ("-5.50", ".", -5.5, ""),
        (".5", ".", 0.5, ""),
        ("$5", ".", 5, "$"),
        ("-$1,234.50", ".", -1234.5, "$"),
        ("$-3", ".", -3, "$"),
        ("(1,200)", ".", -1200, ""),
        ("1.234,50 €", ",", 1234.5, "€"),
        ("1 234,5", ",", 1234.5, ""),
        ("1'234.5", ".", 1234.5, ""),
        ("EUR 12", ".", 12, "eur"),
        ("12 %", ".", 12, "%"),
        ("3.69 MB", ".", 3.69, "mb"),
        ("1,234", ".", 1234, ""),
        ("1,234", ",", 1.234, ""),
        ("\u22127", ".", -7, ""),
        ("1\u2019234", ".", 1234, ""),
        ("5-", ".", -5, ""),
        ("'-4.0", ".", -4, ""),
        ("R$ 10,50", ",", 10.5, "r$"),
        ("Rs. 100", ".", 100, "rs"),
        ("Rs. 1,23,456.50", ".", 123456.5, "rs"),
        ("1,23,456", ".", 123456, ""),
        ("$(5.00)", ".", -5, "$"),
        ("5.00 €-", ".", -5, "€"),
        ("12,50 zł", ",", 12.5, "zł"),
        ("kr 100", ".", 100, "kr"),
        ("5,-", ",", 5, ""),
        ("CHF 5.--", ".", 5, "chf"),
        ('="5"', ".", 5, ""),
        ("1e-05", ".", 1e-05, ""),
        ("1,5E+03", ",", 1500, ""),
        ("5.", ".", 5, ""),
    ],
)
def test_numbers(text: str, mark: DecimalMark, value: float, unit: str) -> None:
    number = read_number(text)
    assert number is not None
    assert (number.value(mark), number.unit) == (value, unit)
    assert not number.is_code


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1st",
        "A1",
        "6-2",
        "1.2.3",
        "2024-05-01",
        "+49 30 1234",
        "(5",
        "5)",
        "12:30",
        "-(5)",
        "--5",
        "1E5",
        "inf",
        "1e+400",
        "-",
    ],
)
def test_no_numbers(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize("text", ["007", "00501", "1234567890123456", '="007"', "'00501"])
def test_codes(text: str) -> None:
    number = read_number(text)
    assert number is not None
    assert number.is_code


@given(st.floats(-1e9, 1e9).map(repr) | st.from_regex(PLAIN_INTEGER, fullmatch=True) | st.from_regex(PLAIN_REAL))
def test_what_an_import_takes_for_a_number_is_that_number(text: str) -> None:
    number = read_number(text)
    is_plain = PLAIN_INTEGER.fullmatch(text) or (PLAIN_REAL.fullmatch(text) and math.isfinite(float(text)))
    assert (number is not None and number.plain) == bool(is_plain)
    if number and is_plain and len(number.digits) <= 15:
        assert number.value(".") == float(text)


@given(st.floats(-1e9, 1e9), st.sampled_from(["${:,.2f}", "{:,.2f} kg", "{:.2f}", "({:,.2f})"]))
def test_a_number_is_read_as_it_is_written(value: float, form: str) -> None:
    number = read_number(form.format(abs(value)))
    assert number is not None
    assert number.value(".") == pytest.approx((-1 if form.startswith("(") else 1) * float(f"{abs(value):.2f}"))


@pytest.mark.parametrize(
    ("texts", "marks"),
    [
        (["1,5", "2"], ","),
        (["5", "7"], "."),
        (["1,234", "1.234,5"], ","),
        (["0,500"], ","),
        (["1.5", "1,5"], ""),
        (["1,234", "2"], ".,"),
    ],
)
def test_a_column_decides_on_the_decimal_mark(texts: list[str], marks: str) -> None:
    assert decimal_marks([number for text in texts if (number := read_number(text))]) == list(marks)


FORMATS = ["%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%d %B %Y", "%B %d, %Y", "%d-%b-%Y", "%b %d %Y", "%d-%m-%Y"]


@given(st.dates(date(1, 1, 1)), st.sampled_from(FORMATS))
def test_a_date_is_read_as_it_is_written(day: date, form: str) -> None:
    text = day.strftime(form.replace("%Y", f"{day.year:04d}"))
    written = read_date(text)
    assert written is not None
    assert written.iso(day_first=True) == day.isoformat()


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("3rd of May", None),
        ("2024-02-30", None),
        ("1st March 2024", "2024-03-01"),
        ("17-MAR-02", "2002-03-17"),
        ("5/1/24 3:05 pm", "2024-01-05 15:05"),
        ("2024-01-05T12:00:30Z", "2024-01-05 12:00:30Z"),
        ("12/11/1999 12:30 AM", "1999-11-12 00:30"),
        ("5. März 2024", "2024-03-05"),
        ("Dienstag, 5. März 2024", "2024-03-05"),
        ("1er janvier 2024", "2024-01-01"),
        ("lundi 5 févr. 2024", "2024-02-05"),
        ("5 de marzo de 2024", "2024-03-05"),
        ("3 grudnia 2023", "2023-12-03"),
        ("5 мая 2024", "2024-05-05"),
        ("Tue, 05 Mar 2024 09:00:00 +0100", "2024-03-05 09:00:00+01:00"),
        ("Tue, 05 Mar 2024 09:00:00 GMT", "2024-03-05 09:00:00Z"),
        ("05MAR2024", "2024-03-05"),
        ("2024-Mar-05", "2024-03-05"),
        ("20240105", "2024-01-05"),
        ("20241340", None),
        ("2024-01-05 9:00 PM", "2024-01-05 21:00"),
        ("Jan 2024", "2024-01"),
        ("Jan-24", "2024-01"),
        ("05/2024", "2024-05"),
        ("9:00 AM", "09:00"),
        ("12:30 a.m.", "00:30"),
        ("1 PM", "13:00"),
        ("9:05", "09:05"),
        ("25:10", None),
        ("13 PM", None),
        ("None", None),
        ("mark 2024", None),
    ],
)
def test_dates_with_times_and_without(text: str, iso: str | None) -> None:
    written = read_date(text)
    assert (written.iso(day_first=True, pivot_year=68) if written else None) == iso


@pytest.mark.parametrize(
    ("texts", "orders"),
    [
        (["13/1/2024", "1/2/2024"], [True]),
        (["1/13/2024", "1/2/2024"], [False]),
        (["1/2/2024"], [True, False]),
        (["13/1/2024", "1/13/2024"], []),
        (["2024-05-13"], [True, False]),
    ],
)
def test_a_column_decides_which_is_the_day(texts: list[str], orders: list[bool]) -> None:
    assert date_orders([written for text in texts if (written := read_date(text))]) == orders


@pytest.mark.parametrize(
    ("text", "certain", "missing"),
    [
        *[(text, True, True) for text in ("", "-", "..", ":", "\\N", "(null)", "#DIV/0!", "N/A", "???", "NULL")],
        *[(text, False, True) for text in ("NA", "none", "unknown", "NaT")],
        *[(text, False, False) for text in ("+", "x", "0", "$", "\U0001f600", "No")],
    ],
)
def test_what_stands_for_a_missing_value(text: str, certain: bool, missing: bool) -> None:
    assert (is_placeholder(text), is_missing(text)) == (certain, missing)


@pytest.mark.parametrize(
    ("text", "nearly"), [("<0.5", True), ("12*", True), ("3.1 p", True), ("5 [1]", True), ("12a", False)]
)
def test_numbers_with_a_bound_or_a_note(text: str, nearly: bool) -> None:
    assert is_nearly_number(text) is nearly


@pytest.mark.parametrize(
    ("texts", "pair"),
    [
        (["1.1", "1.2", "1.10"], ("1.1", "1.10")),
        (["250.0", "250.00"], ("250.0", "250.00")),
        (["2", "2.0"], ("2", "2.0")),
        (["1.5", "2.50"], None),
        (["0", "0.0"], None),
        (["-1.5", "2.5", "2.50"], None),
        (["1e+2", "100"], None),
    ],
)
def test_two_texts_of_one_number(texts: list[str], pair: tuple[str, str] | None) -> None:
    assert Twins(texts).pair == pair


@given(st.text(st.characters(min_codepoint=0xC0, max_codepoint=0xFF), min_size=1))
def test_letters_come_back(text: str) -> None:
    spoilt = text.encode().decode("latin-1")
    assert fix_mojibake(spoilt) == text
    assert is_mojibake(spoilt)


@pytest.mark.parametrize("text", ["Zürich", "São Paulo", "Â", "naïve", "Ångström", "âge"])
def test_letters_that_are_right_are_left(text: str) -> None:
    assert not is_mojibake(text)
