"""What the text of a cell stands for: a number, a date, a missing value, yes or no. Pure.

One cell may be read in several ways: `1,234` is a thousand or a little more than one, `03/04/2024` is in March or in
April. So these functions return all readings that make sense, and `env_server.tools.columns` decides by the column.
"""

from __future__ import annotations

import re
from calendar import month_abbr
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from typing import Literal

_DASHES = ("-", "--", "---", "\u2013", "\u2014")
_MARKED = ("n/a", "#n/a", "n.a.", "nan", "null", "?", "??", "???", "", "not available", "not applicable", "no data")
CERTAIN_NULL_WORDS = frozenset((*_DASHES, *_MARKED))
"""What stands for a missing value, in lower case: among words, where `none` may be an answer, and `NA` a country."""
NULL_WORDS = CERTAIN_NULL_WORDS | {"na", "n.a", "none", "nil", "unknown", "missing", "tbd", "tba", "not known"}
"""What does so among numbers and dates."""

YES_NO = (("yes", "no"), ("y", "n"), ("true", "false"), ("t", "f"), ("1", "0"))
YES, NO = (frozenset(pair[i] for pair in YES_NO) for i in (0, 1))

DecimalMark = Literal[".", ","]
MARKS: tuple[DecimalMark, ...] = (".", ",")
_GAPS = " '\u2019\u00a0\u2009\u202f"
_CURRENCY = r"[$€£¥₹]|US\$|R\$|Rs\.?|(?:USD|EUR|GBP|CHF|JPY|CAD|AUD|INR|CNY|SEK|NOK|DKK|PLN|BRL)\b"
_UNITS = r"""%|°[CF]?|(?:kg|mg|g|lbs?|oz|km|cm|mm|m|miles?|mi|ft|in|inches|mph|km/h|kph|hp|kw|mw|l|ml|sqft|
    seconds?|secs?|s|minutes?|mins?|hours?|hrs?|h|days?|weeks?|months?|years?|yrs?|[kmg]b|pcs|pieces?|people)\b\.?"""
_NUMBER = re.compile(
    rf"""(?P<open>\()?\s*(?P<sign>[-+\u2212])?\s*(?P<before>{_CURRENCY})?\s*(?P<inner>[-\u2212])?
    (?P<digits>\d[\d.,{_GAPS}]*\d|\d|[.,]\d+)(?P<trailing>-)?\s*(?P<after>{_CURRENCY}|{_UNITS})?\s*(?P<close>\))?""",
    re.VERBOSE | re.IGNORECASE,
)
_PLAIN = re.compile(r"-?(?:\d+\.?\d*|\.\d+)")
# No group of thousands begins with 0: 0,500 is a half.
_READINGS = {
    mark: re.compile(rf"(?:[1-9]\d{{0,2}}(?:[{other}{_GAPS}]\d{{3}})+|\d+)?(?:[{mark}](?P<part>\d+))?")
    for mark, other in ((".", ","), (",", "."))
}


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number as it is written: its digits with their marks, its sign, and the unit or currency beside it."""

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
        whole = re.sub(r"\D", "", self.digits[: -len(part) - 1] if part else self.digits)
        number = float(f"{whole or 0}.{part}") if part else int(whole)
        return -number if self.negative else number


def read_number(text: str) -> WrittenNumber | None:
    """Read a cell as a number; None where it is none."""
    text = text.strip()
    found = _NUMBER.fullmatch(text.removeprefix("'"))  # a spreadsheet's mark for text
    if found is None or bool(found["open"]) != bool(found["close"]):
        return None
    negative = bool(found["open"] or found["sign"] in ("-", "\u2212") or found["inner"] or found["trailing"])
    unit = " ".join(filter(None, (found["before"], found["after"]))).casefold().rstrip(".")
    number = WrittenNumber(found["digits"], negative, unit, _PLAIN.fullmatch(text) is not None)
    return number if any(number.value(mark) is not None for mark in MARKS) else None


def decimal_marks(numbers: Collection[WrittenNumber]) -> list[DecimalMark]:
    """Return the decimal marks under which all of a column's numbers can be read: two where it is ambiguous."""
    readings = {mark: [number.value(mark) for number in numbers] for mark in MARKS}
    if readings["."] == readings[","]:
        return ["."]
    return [mark for mark, values in readings.items() if None not in values]


_TIME = (
    r"(?:[ T,]\s*(?P<hour>\d{1,2}):(?P<rest>\d{2}(?::\d{2}(?:\.\d+)?)?)\s*(?P<half>[AaPp])?(?(half)\.?[Mm]\.?)"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?)?"
)
_MONTHS = [name.casefold() for name in month_abbr]
_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4}|\d{2})"
ISO_FORM = "2024-05-01"
AMBIGUOUS_FORM = "01/05/2024"
"""The form in which either the day or the month may come first."""
_FORMS = {
    form: re.compile(pattern + _TIME, re.IGNORECASE)
    for form, pattern in {
        ISO_FORM: r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})",
        "2024/5/1": r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>\d{1,2})(?P=mark)(?P<day>\d{1,2})",
        "1.5.2024": rf"(?P<day>\d{{1,2}})\.\s?(?P<month>\d{{1,2}})\.\s?{_YEAR}",
        AMBIGUOUS_FORM: rf"(?P<day>\d{{1,2}})(?P<mark>[-/])(?P<month>\d{{1,2}})(?P=mark){_YEAR}",
        "1 May 2024": rf"{_DAY}[ .-]+{_MONTH},?[ -]+{_YEAR}",
        "May 1, 2024": rf"{_MONTH}[ -]+{_DAY},?[ -]+(?P<year>\d{{4}})",
    }.items()
}
"""How dates are written, each called by an example."""


@dataclass(frozen=True, slots=True)
class WrittenDate:
    """A date as it is written. Of the ambiguous form, `day` is the first number and `month` the second."""

    form: str
    day: int
    month: int
    year: str
    time: str = ""

    @property
    def has_short_year(self) -> bool:
        """Whether its century is not stated."""
        return len(self.year) == 2

    def iso(self, day_first: bool, pivot_year: int = 0) -> str | None:
        """Return it as SQLite's date functions read it; None for a day that there never was.

        `pivot_year`: the last two-digit year of this century.
        """
        swap = self.form == AMBIGUOUS_FORM and not day_first
        day, month = (self.month, self.day) if swap else (self.day, self.month)
        year = int(self.year)
        if self.has_short_year:
            year += 2000 if year <= pivot_year else 1900
        try:
            return date(year, month, day).isoformat() + self.time
        except ValueError:
            return None


def read_date(text: str) -> WrittenDate | None:
    """Read a cell as a date; None where it is none."""
    for form, pattern in _FORMS.items():
        if found := pattern.fullmatch(text.strip()):
            month = found["month"]
            number = int(month) if month.isdigit() else _MONTHS.index(month[:3].casefold())
            return WrittenDate(form, int(found["day"]), number, found["year"], _time(found))
    return None


def _time(found: re.Match[str]) -> str:
    if found["hour"] is None:
        return ""
    hour = int(found["hour"])
    if found["half"]:
        hour = hour % 12 + (12 if found["half"].lower() == "p" else 0)
    return f" {hour:02d}:{found['rest']}{found['zone'] or ''}"


def date_orders(dates: Collection[WrittenDate]) -> list[bool]:
    """Return whether the day comes first in a column's dates: both where it is open, none where they contradict."""
    ambiguous = [each for each in dates if each.form == AMBIGUOUS_FORM]
    day_first = all(each.month <= 12 for each in ambiguous)
    month_first = all(each.day <= 12 for each in ambiguous)
    return [order for order, possible in ((True, day_first), (False, month_first)) if possible]


_MOJIBAKE = re.compile("[\u00c3\u00c2\u00e2][^\0-\x7f]")


def is_mojibake(text: str) -> bool:
    """Tell whether a text is UTF-8 that was read in another encoding, as `ZÃ¼rich` is, or has lost letters."""
    return "\ufffd" in text or (_MOJIBAKE.search(text) is not None and fix_mojibake(text) is not None)


def fix_mojibake(text: str) -> str | None:
    """Read the text in UTF-8 after all; None where it cannot be."""
    for encoding in ("cp1252", "latin-1"):
        try:
            return text.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return None
