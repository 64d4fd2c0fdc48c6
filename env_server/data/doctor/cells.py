"""What the text of a cell may stand for: a number with decoration, a date, nothing, yes or no. Pure.

A column decides how its cells are read, since one cell alone may be read in several ways: `1,234` is a thousand or a
little more than one, `03/04/2024` is in March or in April.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from typing import Literal

_DASHES = ("-", "--", "---", "\u2013", "\u2014")
_MARKED = ("n/a", "#n/a", "n.a.", "nan", "null", "?", "??", "???", "", "not available", "not applicable", "no data")
NOTHING = frozenset((*_DASHES, *_MARKED, "na", "n.a", "none", "nil", "unknown", "missing", "tbd", "tba", "not known"))
"""What stands for no value among numbers and dates, in lower case."""
SURELY_NOTHING = frozenset((*_DASHES, *_MARKED))
"""What does so among words, too, where `none` and `unknown` may be an answer, and `NA` a country."""

YES = frozenset(("yes", "y", "true", "t", "1"))
NO = frozenset(("no", "n", "false", "f", "0"))

DecimalMark = Literal[".", ","]
MARKS: tuple[DecimalMark, ...] = (".", ",")
_GAPS = " '\u00a0\u2009\u202f"
_CURRENCY = r"[$€£¥₹]|US\$|(?:USD|EUR|GBP|CHF|JPY|CAD|AUD|INR|CNY|SEK|NOK|DKK|PLN)\b"
_UNITS = r"""%|°[CF]?|(?:kg|mg|g|lbs?|oz|km|cm|mm|m|miles?|mi|ft|in|inches|mph|km/h|kph|hp|kw|mw|l|ml|sqft|
    seconds?|secs?|s|minutes?|mins?|hours?|hrs?|h|days?|weeks?|months?|years?|yrs?|[kmg]b|pcs|pieces?|people)\b\.?"""
_NUMBER = re.compile(
    rf"""(?P<open>\()?\s*(?P<sign>[-+\u2212])?\s*(?P<before>{_CURRENCY})?\s*(?P<inner>[-\u2212])?
    (?P<digits>\d[\d.,{_GAPS}]*\d|\d|[.,]\d+)\s*(?P<after>{_CURRENCY}|{_UNITS})?\s*(?P<close>\))?""",
    re.VERBOSE | re.IGNORECASE,
)
_PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_READINGS = {
    mark: re.compile(rf"(?:\d{{1,3}}(?:[{other}{_GAPS}]\d{{3}})+|\d+)?(?:[{mark}](?P<part>\d+))?")
    for mark, other in ((".", ","), (",", "."))
}


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number as it was written: its digits with their marks, its sign, and the unit or currency beside it."""

    digits: str
    negative: bool
    unit: str
    plain: bool

    @property
    def is_code(self) -> bool:
        """Whether its leading zeros say that it is no quantity, or it has too many digits for one."""
        return re.match(r"0\d", self.digits) is not None or len(re.sub(r"\D", "", self.digits)) > 15

    def value(self, mark: DecimalMark) -> int | float | None:
        """Return the number when `mark` is the decimal mark; None where that makes no sense."""
        found = _READINGS[mark].fullmatch(self.digits)
        if found is None:
            return None
        part = found["part"]
        whole = re.sub(r"\D", "", self.digits[: len(self.digits) - len(part) - 1] if part else self.digits)
        number = float(f"{whole or 0}.{part}") if part else int(whole)
        return -number if self.negative else number


def written_number(text: str) -> WrittenNumber | None:
    """Read a cell as a number; None where it is none."""
    text = text.strip()
    found = _NUMBER.fullmatch(text)
    if found is None or bool(found["open"]) != bool(found["close"]):
        return None
    negative = bool(found["open"] or found["sign"] in ("-", "\u2212") or found["inner"])
    unit = " ".join(filter(None, (found["before"], found["after"]))).casefold().rstrip(".")
    number = WrittenNumber(found["digits"], negative, unit, _PLAIN.fullmatch(text) is not None)
    return number if any(number.value(mark) is not None for mark in MARKS) else None


def decimal_mark(numbers: Collection[WrittenNumber]) -> DecimalMark | None:
    """Return the decimal mark that reads all of a column's numbers, the point if both do; None where neither does."""
    return next((mark for mark in MARKS if all(each.value(mark) is not None for each in numbers)), None)


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_TIME = (
    r"(?:[ T,]\s*(?P<time>\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)\s*(?P<half>[AaPp]\.?[Mm]\.?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?"
)
_ORDINAL = r"(?:st|nd|rd|th)?"


def _form(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern + _TIME, re.IGNORECASE)


FORMS: dict[str, re.Pattern[str]] = {
    "2024-05-01": _form(r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})"),
    "2024/5/1": _form(r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{1,2})(?P=mark)(?P<day>\d{1,2})"),
    "1.5.2024": _form(r"(?P<day>\d{1,2})\.\s?(?P<month>\d{1,2})\.\s?(?P<year>\d{4}|\d{2})"),
    "01/05/2024": _form(r"(?P<first>\d{1,2})(?P<mark>[-/])(?P<second>\d{1,2})(?P=mark)(?P<year>\d{4}|\d{2})"),
    "1 May 2024": _form(rf"(?P<day>\d{{1,2}}){_ORDINAL}[ .-]+{_MONTH},?[ -]+(?P<year>\d{{4}}|\d{{2}})"),
    "May 1, 2024": _form(rf"{_MONTH}[ -]+(?P<day>\d{{1,2}}){_ORDINAL},?[ -]+(?P<year>\d{{4}})"),
}
"""How dates are written, each called by an example."""
ISO_FORM = "2024-05-01"
UNDECIDED_FORM = "01/05/2024"
"""The form in which either the day or the month may come first."""


@dataclass(frozen=True, slots=True)
class WrittenDate:
    """A date as it was written: one of the `FORMS`, and its parts."""

    form: str
    parts: dict[str, str | None]

    @property
    def ends(self) -> tuple[int, int]:
        """The first two numbers of a form that leaves open which of them is the day."""
        return int(self.parts.get("first") or 0), int(self.parts.get("second") or 0)

    def iso(self, day_first: bool) -> str | None:
        """Return it as SQLite's date functions read it; None for a day that there never was."""
        first, second = self.ends
        day, month = (first, second) if day_first else (second, first)
        if self.form != UNDECIDED_FORM:
            day, month = int(self.parts["day"] or 0), _month(self.parts["month"] or "")
        try:
            written = date(_year(self.parts["year"] or ""), month, day).isoformat()
        except ValueError:
            return None
        clock = self.parts.get("time")
        if clock is None:
            return written
        hour, rest = clock.split(":", 1)
        half = (self.parts.get("half") or "").lower()
        if half:
            hour = str(int(hour) % 12 + (12 if half.startswith("p") else 0))
        return f"{written} {hour:0>2}:{rest}{self.parts.get('zone') or ''}"


def written_date(text: str) -> WrittenDate | None:
    """Read a cell as a date; None where it is none."""
    for form, pattern in FORMS.items():
        if found := pattern.fullmatch(text.strip()):
            return WrittenDate(form, found.groupdict())
    return None


def day_first(dates: Collection[WrittenDate]) -> bool | None:
    """Tell from a column's dates whether the day comes first in those that leave it open; None where they do not say.

    Dates that contradict each other do not say it either.
    """
    open_dates = [each.ends for each in dates if each.form == UNDECIDED_FORM]
    day = any(first > 12 for first, _ in open_dates)
    month = any(second > 12 for _, second in open_dates)
    return None if day == month else day


def _month(text: str) -> int:
    return int(text) if text.isdigit() else _MONTHS.index(text[:3].casefold()) + 1


def _year(text: str) -> int:
    """Return the year; of two digits as POSIX reads them, from 1969 to 2068."""
    return int(text) if len(text) > 2 else int(text) + (2000 if int(text) < 69 else 1900)


_BROKEN = re.compile("[\u00c3\u00c2\u00e2][^\0-\x7f]")


def broken_letters(text: str) -> bool:
    """Tell whether a text is UTF-8 that was read as another encoding, as `ZÃ¼rich` is, or has lost letters."""
    return "\ufffd" in text or (_BROKEN.search(text) is not None and mended_letters(text) is not None)


def mended_letters(text: str) -> str | None:
    """Undo that; None where it cannot be undone."""
    for encoding in ("cp1252", "latin-1"):
        try:
            return text.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return None


def spelling_key(text: str) -> str:
    """Return what spellings of one word have in common: they differ in case and in blanks."""
    return " ".join(text.split()).casefold()
