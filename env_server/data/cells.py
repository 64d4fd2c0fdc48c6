"""What the text of a cell stands for: a number, a date, a missing value, yes or no. Pure; import and doctor share it.

One cell may be read in several ways: `1,234` is a thousand or a little more than one, `03/04/2024` is in March or in
April. So these functions return all readings that make sense, and `env_server.tools.columns` decides by the column.
What is `plain` has one reading alone, and that is what an import takes for a number (`env_server.data.csv_table`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import date
from typing import Literal

INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060\u00ad"
"""Marks of zero width that stick to copied text: they are no letters, and `str.strip` keeps them."""


def normal(text: str) -> str:
    """Return the text in Unicode's composed form (NFC), in which `=` finds it, and without NUL characters."""
    return text if text.isascii() and "\0" not in text else unicodedata.normalize("NFC", text).replace("\0", "")


def stripped(text: str) -> str:
    """Return the text without white space and INVISIBLE marks around it."""
    bare = text.strip()
    return bare if bare.isascii() else bare.strip(INVISIBLE + " \t\r\n\u00a0")


_WORDS = ("n/a", "n.a.", "nan", "null", "not available", "not applicable", "no data", "\\n", "1.#ind", "1.#qnan")
_ERRORS = ("#n/a", "#div/0!", "#ref!", "#value!", "#name?", "#num!", "#null!", "#error!", "#spill!", "#calc!")
_BRACKETED = ("<null>", "<na>", "[null]", "(null)", "(none)", "(blank)", "(empty)", "#n/a n/a")
CERTAIN_NULL_WORDS = frozenset(
    (*_WORDS, *_ERRORS, *_BRACKETED, "", "-", "--", "---", "\u2013", "\u2014", "?", "??", "..", "...", ":")
)
"""What stands for a missing value, in lower case: among words, where `none` may be an answer, and `NA` a country."""
_MARKS = frozenset("-\u2013\u2014\u2212.\u2026:? ")
_AMONG_VALUES = frozenset(("na", "n.a", "none", "nil", "unknown", "missing", "tbd", "tba", "not known", "nat", "void"))


def is_placeholder(text: str) -> bool:
    """Tell whether a text stands for a missing value even among words, where `none` may be an answer: or it is blank.

    So does a text of nothing but marks, such as `-`, `..`, `:` and `???`.
    """
    return text.casefold() in CERTAIN_NULL_WORDS or _MARKS.issuperset(text)


def is_missing(text: str) -> bool:
    """Tell whether a text stands for a missing value among numbers and dates."""
    return text.casefold() in _AMONG_VALUES or (_MARKS | set("*_/\\#~")).issuperset(text) or is_placeholder(text)


YES_NO = (("yes", "no"), ("y", "n"), ("true", "false"), ("t", "f"), ("1", "0"))
YES, NO = (frozenset(pair[i] for pair in YES_NO) for i in (0, 1))

DecimalMark = Literal[".", ","]
MARKS: tuple[DecimalMark, ...] = (".", ",")
EXACT_DIGITS = 15
"""Decimal digits that every REAL keeps."""
PLAIN_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
# An exponent without a sign or a point, as in 1E5, is more often a code than a number.
PLAIN_REAL = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.)(?:[eE][+-]?[0-9]+)?|-?(?:0|[1-9][0-9]*)[eE][+-][0-9]+"
)
_GAPS = " '\u2018\u2019\u00a0\u2009\u202f"
_CURRENCY = r"""(?:[A-Z]{1,3})?\$|[€£¥₹₽₩₪₺₴₫฿₦₱₡₲₵₸¢]|R\$|(?:Rs|Fr|SFr|kr)\b\.?|(?:K\u010d|z\u0142|Ft|RM|Rp|lei)(?!\w)|
    (?:USD|EUR|GBP|JPY|CHF|CNY|INR|CAD|AUD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|RON|BGN|BRL|MXN|ARS|CLP|COP|ZAR|RUB|TRY|KRW|SGD|
    HKD|TWD|THB|IDR|MYR|PHP|VND|ILS|AED|SAR|EGP|NGN|KES|UAH|euros?|dollars?|pounds?|rupees?|francs?|yen)\b|%"""
_MAGNITUDES = r"(?:k|bn|mn|mio|mia|mrd|tsd|thousand|lakhs?|crores?|million|billion|trillion)s?\b\.?|(?-i:[MB])\b"
_UNITS = r"""°[CF]?|(?:kg|mg|g|lbs?|oz|km|cm|mm|m|miles?|mi|ft|in|inches|mph|km/h|kph|hp|kw|mw|l|ml|sqft|
    seconds?|secs?|s|minutes?|mins?|hours?|hrs?|h|days?|weeks?|months?|years?|yrs?|[kmg]b|pcs|pieces?|people)\b\.?"""
_TYPES = (
    r"int(?:eger)?|text|string|str|float|real|double|bool(?:ean)?|date(?:time)?|num(?:eric|ber)?|(?:var)?char|object"
)
_UNIT = re.compile(rf"{_CURRENCY}|{_MAGNITUDES}|{_UNITS}|{_TYPES}", re.VERBOSE | re.IGNORECASE)
_NUMBER = re.compile(
    rf"""(?P<sign>[-+\u2212])?\s*(?P<before>{_CURRENCY})?\s*(?P<open>\()?\s*(?P<inner>[-+\u2212])?
    \s*(?P<within>{_CURRENCY})?\s*(?P<digits>\d(?:[\d.,{_GAPS}]*\d)?(?:\.(?![-\u2013\u2014]))?|[.,]\d+)
    (?P<exponent>[eE][+-]?\d+)?(?P<even>[.,](?:--?|[\u2013\u2014]))?(?P<trailing>[-\u2212])?
    \s*(?P<power>{_MAGNITUDES})?\s*(?P<after>{_CURRENCY}|{_UNITS})?\s*(?P<last>[-\u2212])?(?P<close>\))?""",
    re.VERBOSE | re.IGNORECASE,
)
# No group of thousands begins with 0: 0,500 is a half. Groups of two before the last are India's.
_READINGS = {
    mark: re.compile(
        rf"(?:[1-9]\d{{0,2}}(?P<gap>[{other}{_GAPS}])\d{{3}}(?:(?P=gap)\d{{3}})*|[1-9]\d?(?:[{other}]\d\d)+[{other}]\d{{3}}"
        rf"|\d+)?(?:[{mark}](?P<part>\d+))?"
    )
    for mark, other in ((".", ","), (",", "."))
}
_NEARLY = re.compile(
    r"(?P<bound>[<>≤≥~≈]=?\s*|(?:ca\.?|approx\.?|about)\s+)?(?P<number>.*?\d.*?)"
    r"(?P<note>\s*[*†‡#]+|\s*\[\w{1,3}\]|\s*\([a-z]\)|(?<=\d)\s[a-z]{1,2})?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """A number as it is written: its digits with their marks, its sign, and the unit or currency beside it.

    `power`: a word such as `k` or `million`, by which it is to be multiplied. `plain`: an import takes it for a number.
    """

    digits: str
    negative: bool
    unit: str
    plain: bool
    plus: bool = False
    power: str = ""
    exponent: str = ""

    @property
    def is_code(self) -> bool:
        """Whether it is no quantity: it has leading zeros, too many digits for one, or a plus and a phone's."""
        count = len(re.sub(r"\D", "", self.digits))
        is_phone = self.plus and count >= 7 and self.digits.isdigit()
        return re.match(r"0\d", self.digits) is not None or count > EXACT_DIGITS or is_phone

    def value(self, mark: DecimalMark) -> int | float | None:
        """Return the number when `mark` is the decimal mark; None where that makes no sense."""
        found = _READINGS[mark].fullmatch(self.digits)
        if found is None:
            return None
        part = found["part"]
        whole = re.sub(r"\D", "", self.digits[: -len(part) - 1] if part else self.digits)
        if part or self.exponent:
            number: int | float = float(f"{whole or 0}.{part or 0}e{self.exponent or 0}")
        else:
            number = int(whole)
        return -number if self.negative else number


def read_number(text: str) -> WrittenNumber | None:
    """Read a cell as a number; None where it is none, or its sign is stated twice."""
    text = stripped(text)
    is_plain = (PLAIN_INTEGER.fullmatch(text) or PLAIN_REAL.fullmatch(text)) is not None
    if guarded := re.fullmatch(r'=\s*"(.*)"|\'(.*)', text):  # what makes a spreadsheet take it for text
        text = guarded[1] or guarded[2] or ""
    found = _NUMBER.fullmatch(text)
    if found is None or bool(found["open"]) != bool(found["close"]):
        return None
    signs = [found[name] for name in ("open", "sign", "inner", "trailing", "last") if found[name]]
    exponent, digits = found["exponent"] or "", found["digits"].removesuffix(".")
    if len(signs) > 1 or (exponent[1:].isdigit() and not re.search("[.,]", found["digits"])):
        return None
    if found["even"]:  # 5,- and 5.--: no cents
        digits += found["even"][0] + "00"
    units = (found[name] for name in ("before", "within", "after"))
    unit = " ".join(filter(None, units)).casefold().rstrip(".")
    negative, plus, power = signs not in ([], ["+"]), "+" in signs, found["power"] or ""
    number = WrittenNumber(digits, negative, unit, is_plain, plus, power, exponent[1:])
    values = [value for mark in MARKS if (value := number.value(mark)) is not None]
    return number if values and all(map(math.isfinite, values)) else None


def is_infinite(text: str) -> bool:
    """Tell whether it is the infinity of programs and spreadsheets, which no column of numbers should hold."""
    return re.fullmatch(r"[-+]?(?:inf(?:inity)?|\u221e)", text, re.IGNORECASE) is not None


def is_nearly_number(text: str) -> bool:
    """Tell whether a cell is a number but for a bound or a footnote, such as `<0.5`, `~5`, `12*` and `3.1 p`."""
    found = _NEARLY.fullmatch(text)
    return bool(found and (found["bound"] or found["note"]) and read_number(found["number"]))


def is_unit(text: str) -> bool:
    """Tell whether a text is a unit, a currency or a type of columns alone, in brackets or not."""
    return _UNIT.fullmatch(text.strip("()[] ")) is not None


def decimal_marks(numbers: Collection[WrittenNumber]) -> list[DecimalMark]:
    """Return the decimal marks under which all of a column's numbers can be read: two where it is ambiguous."""
    readings = {mark: [number.value(mark) for number in numbers] for mark in MARKS}
    if readings["."] == readings[","]:
        return ["."]
    return [mark for mark, values in readings.items() if None not in values]


def is_code_name(column: str) -> bool:
    """Tell whether a column is called like one of versions and the like, whose 1.10 is no number."""
    words = ("version", "release", "build", "revision", "section", "chapter")
    return not set(words).isdisjoint(re.findall("[a-z]+", column.lower()))


class Twins:
    """Looks for two plain numbers that differ as texts and are one number, as `1.1` and `1.10` are: codes, it may be.

    `pair`: the first two. A column with a negative number or an exponent holds quantities. Memory is bounded: a column
    of codes has few.
    """

    MOST = 10_000

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._first: dict[float, str] = {}
        self._known: set[str] = set()
        self.pair: tuple[str, str] | None = None
        self.ended = False
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Look at a plain number; where it has `ended`, more would change nothing."""
        if text in self._known or self.ended:
            return
        self._known.add(text)
        first = self._first.setdefault(float(text), text)
        if first != text and float(text):
            self.pair = self.pair or (first, text)
        if text.startswith("-") or "e" in text or "E" in text:
            self.ended, self.pair = True, None
        self.ended |= len(self._known) == self.MOST


ISO_FORM = "2024-05-01"
COMPACT_FORM = "20240501"
AMBIGUOUS_FORM = "01/05/2024"
"""The form in which either the day or the month may come first."""
ISO_MONTH_FORM = "2024-05"
MONTH_FORM = "May 2024"
CLOCK_FORM = "5:30 PM"
SORTED_FORMS = frozenset((ISO_FORM, ISO_MONTH_FORM, COMPACT_FORM))
PARTIAL_FORMS = frozenset((ISO_MONTH_FORM, MONTH_FORM, CLOCK_FORM))
"""Those of a month or a time of the day, which are no day."""
_CLOCK = (
    r"(?P<hour>\d{1,2})(?::(?P<rest>\d{2}(?::\d{2}(?:\.\d+)?)?))?(?:\s*(?P<half>[ap])\.?\s?m\.?)?"
    r"(?:\s*(?P<zone>z|gmt|utc|[+-]\d\d:?\d\d))?"
)
_TIME = rf"(?:(?:t|:|,?\s+(?:(?:at|um|a las|as)\s+)?){_CLOCK})?"
_WEEKDAY = (
    r"(?:(?:mon|tue|wed|thu|fri|sat|sun|mo|di|mi|do|fr|sa|so|lun|mar|mer|jeu|ven|sam|dim|mie|jue|vie|sab|dom|gio|seg|ter|"
    r"qua|qui|sex|man|tir|ons|tor|fre|lor|son)[^\W\d_]{0,10}\.?,?\s+)?"
)
_MONTH = r"(?P<month>[^\W\d_]{3,12})\.?"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th|er|\.?[oa]|\.)?"
_YEAR = r"(?P<year>\d{4}|\d{2})"
_GAP = r",?[\s./-]*(?:(?:de|del|of|di)\s+)?"
_FORMS = {
    form: [re.compile(each) for each in patterns]
    for form, patterns in {
        ISO_FORM: [rf"(?P<year>\d{{4}})-(?P<month>\d{{2}})-(?P<day>\d{{2}}){_TIME}"],
        COMPACT_FORM: [r"(?P<year>(?:19|20)\d\d)(?P<month>0[1-9]|1[0-2])(?P<day>0[1-9]|[12]\d|3[01])"],
        "2024/5/1": [rf"(?P<year>\d{{4}})(?P<mark>[-/.])(?P<month>\d{{1,2}})(?P=mark)(?P<day>\d{{1,2}}){_TIME}"],
        "1.5.2024": [rf"{_WEEKDAY}(?P<day>\d{{1,2}})\.\s?(?P<month>\d{{1,2}})\.\s?{_YEAR}{_TIME}"],
        AMBIGUOUS_FORM: [rf"{_WEEKDAY}(?P<day>\d{{1,2}})(?P<mark>[-/])(?P<month>\d{{1,2}})(?P=mark){_YEAR}{_TIME}"],
        "1 May 2024": [rf"{_WEEKDAY}{_DAY}{_GAP}{_MONTH}{_GAP}{_YEAR}{_TIME}"],
        "May 1, 2024": [
            rf"{_WEEKDAY}{_MONTH}[\s-]*{_DAY}(?:,\s*|[\s-]+)(?P<year>\d{{4}}){_TIME}",
            rf"(?P<year>\d{{4}})[\s-]+{_MONTH}[\s-]+{_DAY}{_TIME}",
        ],
        ISO_MONTH_FORM: [r"(?P<year>(?:1[5-9]|20)\d\d)-(?P<month>0[1-9]|1[0-2])"],
        MONTH_FORM: [
            rf"{_MONTH}{_GAP}(?:'|\u2019)?{_YEAR}",
            rf"(?P<year>\d{{4}})[\s-]+{_MONTH}",
            r"(?P<month>0?[1-9]|1[0-2])/(?P<year>(?:19|20)\d\d)",
        ],
        CLOCK_FORM: [_CLOCK],
    }.items()
}
"""How dates are written, each called by an example."""


def _bare(text: str) -> str:
    """Return the text in lower case and without accents."""
    if text.isascii():
        return text.lower()
    bare = unicodedata.normalize("NFKD", text.casefold().replace("\u0131", "i"))
    return "".join(each for each in bare if not unicodedata.combining(each))


_MONTH_NAMES = """
    january february march april may june july august september october november december
    januar februar marz april mai juni juli august september oktober november dezember
    janvier fevrier mars avril mai juin juillet aout septembre octobre novembre decembre
    enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
    gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre
    janeiro fevereiro marco abril maio junho julho agosto setembro outubro novembro dezembro
    januari februari maart april mei juni juli augustus september oktober november december
    janner feber marts april maj juni juli augusti september oktober november december
    jan feb maerz april mai jun jul aug sept okt nov des
    jan feb mrz apr mai jun jul aug sep okt nov dez
    jan feb mrt april mei jun jul aug setiembre okt nov desember
    stycznia lutego marca kwietnia maja czerwca lipca sierpnia wrzesnia pazdziernika listopada grudnia
    ocak subat mart nisan mayis haziran temmuz agustos eylul ekim kasim aralik
    января февраля марта апреля мая июня июля августа сентября октября ноября декабря
"""
"""In a dozen languages, without accents."""


def _month_prefixes() -> dict[str, int]:
    """Map each beginning of a month's name that means one month in all languages to its number."""
    found: dict[str, set[int]] = defaultdict(set)
    for line in _MONTH_NAMES.strip().splitlines():
        for number, name in enumerate(map(_bare, line.split()), start=1):
            for end in range(3, len(name) + 1):
                found[name[:end]].add(number)
    return {prefix: numbers.pop() for prefix, numbers in found.items() if len(numbers) == 1}


_MONTHS = _month_prefixes()


@dataclass(frozen=True, slots=True)
class WrittenDate:
    """A date as it is written. Of the ambiguous form, `day` is the first number and `month` the second.

    Of a month alone `day` is 0, of a time of the day the year is "". `sorts`: its order as text is that of time among
    those of its form and zone.
    """

    form: str
    day: int
    month: int
    year: str
    time: str = ""
    zone: str = ""
    sorts: bool = False

    @property
    def has_short_year(self) -> bool:
        """Whether its century is not stated."""
        return len(self.year) == 2

    def iso(self, day_first: bool, pivot_year: int = 0) -> str | None:
        """Return it as SQLite's date functions read it; None for a day that there never was.

        `pivot_year`: the last two-digit year of this century.
        """
        if self.form == CLOCK_FORM:
            return self.time + self.zone
        swap = self.form == AMBIGUOUS_FORM and not day_first
        day, month = (self.month, self.day) if swap else (self.day, self.month)
        year = int(self.year)
        if self.has_short_year:
            year += 2000 if year <= pivot_year else 1900
        try:
            written = date(year, month, day or 1).isoformat()
        except ValueError:
            return None
        return f"{written} {self.time}{self.zone}" if self.time else written if day else written[:-3]


def read_date(text: str) -> WrittenDate | None:
    """Read a cell as a date, a month or a time of the day; None where it is none."""
    text = stripped(text)
    bare = _bare(text)
    if not bare[:1].isalnum() or not any(each.isdigit() for each in bare):
        return None
    for form, patterns in _FORMS.items():
        for pattern in patterns:
            if (found := pattern.fullmatch(bare)) and (written := _written(form, found.groupdict(), text)):
                return written
    return None


def _written(form: str, found: dict[str, str | None], text: str) -> WrittenDate | None:
    """Return the date of a match; None where its word is no month, or its time no time."""
    hour, rest, half, zone = (found.get(name) or "" for name in ("hour", "rest", "half", "zone"))
    time, is_padded = "", len(hour) == 2 and not half
    if hour:
        number = int(hour) % 12 + 12 * (half == "p") if half else int(hour)
        time = f"{number:02d}:{rest or '00'}"
        if not (rest or half) or number > 23 or int(rest[:2] or 0) > 59 or (half and not 0 < int(hour) < 13):
            return None
        zone = "Z" if zone in ("z", "gmt", "utc") else f"{zone[:3]}:{zone[-2:]}" if zone else ""
    if form == CLOCK_FORM:
        return WrittenDate(form, 0, 0, "", time, zone, is_padded)
    month = found["month"] or ""
    number = int(month) if month.isdecimal() else _MONTHS.get(month, 0)
    if not number and not month.isdecimal():
        return None
    sorts = form in SORTED_FORMS and (is_padded or not hour)
    if form == "2024/5/1":
        sorts = re.match(r"\d{4}\W\d\d\W\d\d", text) is not None
    return WrittenDate(form, int(found.get("day") or 0), number, found["year"] or "", time, zone, sorts)


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
