"""What is wrong with the tables and columns of a database, told from its survey. Pure.

A check speaks only where a person who reads the values would agree: a column is numbers when all that is left besides
numbers stands for missing values, codes with leading zeros are no numbers, and years stay years. A fix changes only
cells whose meaning is certain; where the column leaves it open, the hint names the flag that states it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from env_server.data.cells import (
    AMBIGUOUS_FORM,
    ISO_FORM,
    ISO_MONTH_FORM,
    MARKS,
    MONTH_FORM,
    NO,
    PARTIAL_FORMS,
    YES,
    YES_NO,
    DecimalMark,
    Twins,
    WrittenDate,
    WrittenNumber,
    date_orders,
    decimal_marks,
    fix_mojibake,
    is_code_name,
    is_infinite,
    is_missing,
    is_mojibake,
    is_nearly_number,
    is_placeholder,
    normal,
    read_date,
    read_number,
    stripped,
)
from env_server.dataset import SQLValue
from env_server.tools.findings import CellFix, Finding, Kind, Order, Place, Stated, TableFix
from env_server.tools.keys import is_called_key, likely_references, table_keys
from env_server.tools.survey import SENTINELS, UNKNOWN_COLLATION, ColumnSurvey, DatabaseSurvey, TableSurvey

MIN_CONSTANT_ROWS = 5
MAX_DISTINCT_SHARE = 0.8
"""Where nearly each row has a text of its own, two spellings may be two things."""
MIN_DATES = 3
MIN_NUMBERS = 5
"""Different ones, beside which a repeated text that is none stands for nothing."""
MAX_ODD_SHARE = 0.05
"""Cells that are neither numbers nor missing, in a column that is taken for numbers all the same."""
SENTINEL_FACTOR = 5
"""How much greater a sentinel is than every other number."""
_WORD = re.compile(r"(?=.{3})[^\W\d_][^\W\d_ .,'&/-]*(?:[ .,'&/-]+[^\W\d_]+)*\.?")
_TOTALS = frozenset(("total", "totals", "sum", "grand total", "overall", "all", "summe", "gesamt", "subtotal"))
_SAME = 1e-6
_SHOWN = 3

TableMarks = tuple[DecimalMark | None, DecimalMark | None]
Texts = Sequence[tuple[str, int]]
"""Texts of a column, and how often each occurs."""


def check_tables(
    survey: DatabaseSurvey, stated: Stated, delimiters: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """Yield what is wrong with the tables and columns of a database. `delimiters`: of the files of imported tables."""
    suggested: dict[str, DecimalMark] = {",": ".", ";": ","}
    keys = {(each.table, each.column) for each in likely_references(survey)}
    keys |= {(table, column.name) for table, column in table_keys(survey).items()}
    for table in survey.tables:
        place = Place(survey.db_id, table.name)
        yield from (replace(each, place=place) for each in _check_rows(table))
        marks = _table_mark(table), suggested.get((delimiters or {}).get(table.name, ""))
        for column in table.columns:
            is_key = (table.name, column.name) in keys
            found = check_column(column, stated, marks, imported=survey.imported, is_key=is_key)
            yield from (replace(each, place=replace(place, column=column.name)) for each in found)


def check_column(
    column: ColumnSurvey, stated: Stated, table_marks: TableMarks, *, imported: bool, is_key: bool = False
) -> Iterator[Finding]:
    """Yield what is wrong with a column.

    `table_marks`: the decimal mark that its table states, and the one that its delimiter suggests. `is_key`: it is a
    primary or foreign key, declared or by its name.
    """
    if column.problem:
        yield _not_examined("it", column.problem)
    if column.problem or column.rows == 0:
        return
    yield from _emptiness(column)
    yield from _sentinels(column)
    yield from _letters(column)
    yield from _blobs(column)
    padded = [text for text, _ in column.texts if stripped(text) and text != stripped(text)]
    if padded:
        message = f"{_count(column.texts, padded)} with white space around, such as {_shown(padded)}"
        fix = CellFix(Order.WHITESPACE, _of_text(stripped))
        yield Finding(Kind.SURROUNDING_WHITESPACE, message, "Strip it", fix, _few(padded))
    counts: Counter[str] = Counter()
    for text, count in column.texts:
        counts[stripped(text)] += count
    texts = list(counts.items())
    is_code = is_key or is_code_name(column.name)
    numbers = [] if is_code else list(_numbers(column, texts, stated, table_marks, imported=imported))
    special = numbers or list(_dates(texts, stated))
    yield from special or _words(column, texts)


def _not_examined(what: str, problem: str) -> Finding:
    if missing := UNKNOWN_COLLATION.search(problem):
        hint = f"Copy the database without it: sqlite3 OLD .dump | sed 's/COLLATE {missing[1]}//I' | sqlite3 NEW"
        message = f"{what} is sorted by {missing[1]!r}, and queries that need that order fail"
        return Finding(Kind.UNKNOWN_COLLATION, message, hint)
    hint = "Nothing is known of it. Examine it yourself"
    return Finding(Kind.NOT_EXAMINED, f"{what} cannot be examined: {problem}", hint)


def _check_rows(table: TableSurvey) -> Iterator[Finding]:
    if table.problem:
        if not any(UNKNOWN_COLLATION.search(column.problem) for column in table.columns):
            yield _not_examined("an index of it" if UNKNOWN_COLLATION.search(table.problem) else "it", table.problem)
    elif not table.rows:
        yield Finding(Kind.EMPTY_TABLE, "it has no rows", "Leave it out, or check that it was exported whole")
    if table.duplicates:
        row = ", ".join(_short(value) for value in table.duplicate[:6])
        occur = "row occurs" if table.duplicates == 1 else "rows occur"
        message = f"{table.duplicates:,} {occur} already, such as ({row}): counts and sums count them again"
        yield Finding(Kind.DUPLICATE_ROWS, message, "Keep each row once", TableFix.DROP_DUPLICATES)
    label = next((str(v) for v in table.last if isinstance(v, str) and v.strip(" :").casefold() in _TOTALS), "")
    sums = [value for value, total in zip(table.last, table.totals, strict=True) if _is_sum(value, total)]
    if label and sums:
        message = f"the last row is called {label!r} and has the sum of the others, {sums[0]!r}: sums are twice as high"
        yield Finding(Kind.TOTAL_ROW, message, "Leave the row out", TableFix.DROP_LAST_ROW, (label,))


def _is_sum(value: SQLValue, total: SQLValue) -> bool:
    if not isinstance(value, int | float) or not isinstance(total, int | float) or not total:
        return False
    return abs(value - total) <= _SAME * abs(total)


def _emptiness(column: ColumnSurvey) -> Iterator[Finding]:
    empty = sum(count for text, count in column.texts if not text.strip())
    if column.nulls + empty == column.rows:
        message = f"none of its {column.rows:,} rows has a value"
        yield Finding(Kind.EMPTY_COLUMN, message, "Leave it out", TableFix.DROP_COLUMN)
    elif column.distinct == 1 and not column.nulls and column.rows >= MIN_CONSTANT_ROWS and not column.primary_key:
        value = column.texts[0][0] if column.texts else column.numbers[0][0] if column.numbers else "the same"
        hint = "Check that it was exported whole; leave it out if it says nothing"
        yield Finding(Kind.CONSTANT_COLUMN, f"all of its {column.rows:,} rows have {value!r}", hint)


def _sentinels(column: ColumnSurvey) -> Iterator[Finding]:
    if column.low is None or column.high is None or column.primary_key:
        return
    bound = SENTINEL_FACTOR * max(abs(column.low), abs(column.high), 1)
    for number, count in column.numbers:
        if count > 1 and number in SENTINELS and abs(number) > bound:
            message = f"{count:,} cells are {number}; all others lie between {column.low} and {column.high}"
            hint = "If it stands for a missing value, leave the cells empty: averages and maxima count it"
            yield Finding(Kind.SENTINEL_NUMBER, message, hint, CellFix(Order.VALUES, _without(number)), (str(number),))


def _without(number: int | float) -> Callable[[SQLValue], SQLValue]:
    def convert(value: SQLValue) -> SQLValue:
        written = read_number(value) if isinstance(value, str) else None
        return None if (written.value(".") if written else value) == number else value

    return convert


def _letters(column: ColumnSurvey) -> Iterator[Finding]:
    broken = [text for text, _ in column.texts if is_mojibake(text)]
    if broken:
        fixed = {text: fix_mojibake(text) for text in broken}
        fix = CellFix(Order.LETTERS, _of_text(lambda text: fix_mojibake(text) or text)) if all(fixed.values()) else None
        hint = f"Restore the letters{f', as in {fixed[broken[0]]!r}' if fix else ' from their source'}"
        yield Finding(
            Kind.MOJIBAKE, f"{_count(column.texts, broken)} such as {_shown(broken)}", hint, fix, _few(broken)
        )
    if apart := [text for text, _ in column.texts if normal(text) != text]:
        message = f"{_count(column.texts, apart)} such as {_shown([normal(text) for text in apart])}"
        hint = "Compose them (NFC), as keyboards and models write them"
        yield Finding(Kind.DECOMPOSED_LETTERS, message, hint, CellFix(Order.LETTERS, _of_text(normal)), _few(apart))


def _blobs(column: ColumnSurvey) -> Iterator[Finding]:
    """BLOBs in a column of numbers or texts: what numpy's numbers and Python's bytes become in SQLite."""
    if not column.blobs or re.search("BLOB|BINARY", column.declared, re.IGNORECASE):
        return
    is_text, is_real = (re.search(words, column.declared, re.I) for words in ("CHAR|TEXT|CLOB", "REAL|FLOA|DOUB"))
    sizes = {len(blob) for blob in column.blobs}
    convert: Callable[[bytes], SQLValue] | None = None
    if is_text and all(map(_text_of, column.blobs)):
        convert = _text_of
    elif is_real and sizes in ({4}, {8}):
        convert = _float_of
    elif re.search("INT", column.declared, re.I) and sizes in ({1}, {2}, {4}, {8}):
        convert = _int_of
    elif not (column.declared or column.number_cells or column.text_cells):
        return
    message = f"cells such as {', '.join(repr(blob[:20]) for blob in column.blobs[:_SHOWN])} are BLOBs"
    if convert is None:
        yield Finding(Kind.BLOB_FOR_VALUE, message, "Write them again as numbers or texts, or declare the column BLOB")
        return
    hint = f"Write them as {', '.join(repr(convert(blob)) for blob in column.blobs[:_SHOWN])}"
    of_blob = convert
    fix = CellFix(Order.LETTERS, lambda value: of_blob(value) if isinstance(value, bytes) else value)
    yield Finding(Kind.BLOB_FOR_VALUE, message, hint, fix)


def _int_of(blob: bytes) -> SQLValue:
    return int.from_bytes(blob, "little", signed=True)


def _float_of(blob: bytes) -> SQLValue:
    (value,) = struct.unpack("<d" if len(blob) == 8 else "<f", blob)
    return float(value)


def _text_of(blob: bytes) -> SQLValue:
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() else None


def _table_mark(table: TableSurvey) -> DecimalMark | None:
    """Return the decimal mark that the columns of numbers agree on."""
    marks: set[DecimalMark] = set()
    for column in table.columns:
        numbers = [number for text, _ in column.texts if (number := read_number(text))]
        is_numeric = len(numbers) * 2 > len(column.texts)
        marked = [number for number in numbers if re.search(r"[.,]\d", number.digits)]
        if is_numeric and marked and len(possible := decimal_marks(marked)) == 1:
            marks.update(possible)
        if any(isinstance(number, float) for number, _ in column.numbers):
            marks.add(".")
    return marks.pop() if len(marks) == 1 else None


def _numbers(
    column: ColumnSurvey, texts: Texts, stated: Stated, table_marks: TableMarks, *, imported: bool
) -> Iterator[Finding]:
    """Numbers that are text, alone or among others that are not."""
    counts = dict(texts)
    read = {text: number for text in counts if (number := read_number(text))}
    missing = [text for text in counts if text not in read and is_missing(text)]
    odd = [text for text in counts if text not in read and text not in missing]
    odd_cells = sum(counts[text] for text in odd)
    cells = sum(counts[text] for text in read) + column.number_cells
    if not texts or not cells or any(number.is_code for number in read.values()):
        return
    is_rare = odd_cells <= MAX_ODD_SHARE * cells and (column.distinct >= 20 or not odd)
    if not is_rare and not _stands_out(odd, counts, read, column, odd_cells < cells):
        return
    unusual = [text for text, number in read.items() if not number.plain]
    if not odd and not unusual and (twins := Twins(read).pair):
        message = f"{_shown(twins)} are one number and two texts, as codes and versions are: it was left text"
        hint = "If it holds quantities, make it a column of numbers"
        plain = _to_numbers(".", [number.value(".") for number in read.values()])
        yield Finding(Kind.NUMBER_OR_CODE, message, hint, plain, twins)
        return
    if not (unusual or missing or odd):
        if not imported:
            yield from _stored_as_text(column, read)
        return
    units = {number.unit for number in read.values()}
    if len(units - {""}) > 1 or units >= {"%", ""} or any(number.power for number in read.values()):
        by_unit: dict[str, str] = {}
        for text, number in read.items():
            by_unit.setdefault(number.unit + number.power, text)
        hint = "Convert them to one unit, and name it in the column's name"
        message = f"quantities such as {_shown(list(by_unit.values()))}"
        yield Finding(Kind.MIXED_UNITS, message, hint, None, _few(unusual))
        return
    shown = [*unusual, *missing, *odd]
    numeric = column.text_cells + column.number_cells - odd_cells - sum(counts[text] for text in missing)
    message = f"{numeric:,} of {column.rows:,} cells are numbers, but it is text for cells such as {_shown(shown)}"
    marks = decimal_marks(read.values())
    if len(marks) > 1:
        is_plain = all(number.plain for number in read.values() if re.search("[.,]", number.digits))
        table_mark, suggested = table_marks
        # An amount of money has no three decimals, whatever the delimiter; and SQLite reads plain ones with a point.
        is_money = suggested == "," and any(number.unit for number in read.values())
        told = {mark for mark in (table_mark or (None if is_money else suggested), "." if is_plain else None) if mark}
        marks = [stated.decimal_mark] if stated.decimal_mark else list(told) if len(told) == 1 else marks
    fix = None
    if not marks:
        hint = "Decimal points and commas are mixed. Write all numbers the same way"
    elif odd:
        hint = f"Correct {_shown(odd)} by hand, or leave the cells empty; then it can be made numbers"
    elif len(marks) > 1:
        example = next(text for text in read if len(decimal_marks([read[text]])) > 1)
        hint = (
            f"Whether {example!r} has thousands or decimals is open: state it with --decimal point or --decimal comma"
        )
    else:
        examples = [f"{text!r} as {_or_null(read[text].value(marks[0]))}" for text in unusual]
        examples += [f"{text!r} as NULL" for text in missing]
        hint = f"Make it a column of numbers: {', '.join(_few(examples))}"
        fix = _to_numbers(marks[0], [*(n.value(marks[0]) for n in read.values()), *(n for n, _ in column.numbers)])
    yield Finding(Kind.NUMBER_AS_TEXT, message, hint, fix, _few(shown))


def _stands_out(
    odd: Sequence[str],
    counts: Mapping[str, int],
    read: Mapping[str, WrittenNumber],
    column: ColumnSurvey,
    is_minority: bool,
) -> bool:
    """Tell whether what is no number spoils a column of numbers: a repeated word for nothing, a bound, a footnote."""
    if all(is_infinite(text) for text in odd):
        return True
    different = len(read) + len(column.numbers)
    words = len(odd) <= 2 and all(counts[text] > 1 and not (len(text) == 1 and text.isalnum()) for text in odd)
    has_parts = any(mark in number.digits for number in read.values() for mark in MARKS)
    notes = all(is_nearly_number(text) and (has_parts or text[0] in "<>≤≥~≈") for text in odd)
    return is_minority and different >= (MIN_NUMBERS if words else MIN_DATES) and (words or notes)


def _or_null(value: SQLValue) -> str:
    return "NULL" if value is None else str(value)


def _to_numbers(mark: DecimalMark, values: Iterable[SQLValue]) -> CellFix:
    def convert(value: SQLValue) -> SQLValue:
        if not isinstance(value, str):
            return value
        if is_missing(stripped(value)):
            return None
        written = read_number(value)
        return value if written is None or (number := written.value(mark)) is None else number

    whole = all(isinstance(value, int) for value in values)
    return CellFix(Order.VALUES, convert, "INTEGER" if whole else "REAL")


def _stored_as_text(column: ColumnSurvey, read: Mapping[str, WrittenNumber]) -> Iterator[Finding]:
    """Plain numbers in a column of text; where their order as text is that of numbers, nothing goes wrong."""
    if column.number_cells or len(read) < MIN_DATES or is_called_key(column.name):
        return
    by_value = sorted(read, key=lambda text: read[text].value(".") or 0)
    if by_value != sorted(read):
        message = f"its numbers are stored as text, so that their MAX is {max(read)!r} and their MIN {min(read)!r}"
        hint = f"Make it a column of numbers: the greatest is {by_value[-1]}, the smallest {by_value[0]}"
        yield Finding(Kind.NUMBER_AS_TEXT, message, hint, _to_numbers(".", [n.value(".") for n in read.values()]))


def _dates(texts: Texts, stated: Stated) -> Iterator[Finding]:
    read = {text: written for text, _ in texts if (written := read_date(text))}
    odd = [text for text, _ in texts if text not in read and not is_missing(text)]
    if len(read) < MIN_DATES or len(odd) > MAX_ODD_SHARE * len(read):
        return
    dates = {text: each for text, each in read.items() if each.month}  # the others are times of the day
    impossible = [text for text, each in dates.items() if each.iso(True) is None and each.iso(False) is None]
    if impossible:
        hint = "Correct it; date functions return NULL for it"
        yield Finding(Kind.IMPOSSIBLE_DATE, f"there is no {_shown(impossible)}", hint, None, _few(impossible))
    forms = Counter(each.form for each in read.values())
    zones = {each.zone: text for text, each in read.items()}
    hint, fix = _to_dates({text: each for text, each in read.items() if text not in impossible}, stated)
    if odd:
        hint, fix = f"Correct {_shown(odd)} by hand; then all can be written as {ISO_FORM}", None
    if len(zones) > 1:
        message = f"times of different zones, such as {_shown(list(zones.values()))}"
        hint = "Convert all to one zone: as text they are compared by their local times"
        yield Finding(Kind.MIXED_DATES, message, hint, None, _few(list(zones.values())))
    elif len(forms) > 1 and not (forms.keys() <= {ISO_FORM, ISO_MONTH_FORM} and all(d.sorts for d in read.values())):
        examples = [next(text for text in read if read[text].form == form) for form, _ in forms.most_common()]
        message = f"dates such as {_shown(examples)}" + (f", and {_shown(odd)}" if odd else "")
        yield Finding(Kind.MIXED_DATES, message, hint, fix, _few(examples[1:]))
    elif not all(each.sorts for each in read.values()) and (dates or sorted(read) != sorted(read, key=_clock_of(read))):
        message = f"dates such as {_shown(list(read))}, whose order as text is not that of time"
        yield Finding(Kind.NON_ISO_DATES, message, hint, fix)


def _clock_of(read: Mapping[str, WrittenDate]) -> Callable[[str], str]:
    return lambda text: read[text].time


def _to_dates(dates: Mapping[str, WrittenDate], stated: Stated) -> tuple[str, CellFix | None]:
    """Return the hint and the fix: none where the order or the century is open, or where some lack the day."""
    orders = date_orders(dates.values())
    day_first = stated.day_first if len(orders) > 1 else next(iter(orders), None)
    forms = {each.form for each in dates.values()}
    if forms & PARTIAL_FORMS and len(forms) > 1:
        return "Some are a month or a time without a day: add it, or make it a column of its own", None
    if not orders:
        return "Some begin with the day and others with the month: correct them by hand", None
    if day_first is None and AMBIGUOUS_FORM in forms:
        return "Whether the day or the month comes first is open: state it with --dates day-first or month-first", None
    if stated.pivot_year is None and (short := next((text for text, each in dates.items() if each.has_short_year), "")):
        hint = "The century is open: state the last year of this one with --pivot_year, such as 29 for 2029"
        return hint + (f", if {short!r} ends with a year, not a day" if MONTH_FORM in forms else ""), None
    pivot_year = stated.pivot_year or 0

    def convert(text: str) -> str | None:
        if is_missing(stripped(text)):
            return None
        written = read_date(text)
        return text if written is None else written.iso(bool(day_first), pivot_year) or text

    example = next((text for text in dates if convert(text) != text), "")
    hint = f"Write {example!r} as {convert(example)}, and so on: SQLite compares, sorts and computes with that form"
    return hint, CellFix(Order.VALUES, _of_text(convert))


def _words(column: ColumnSurvey, texts: Texts) -> Iterator[Finding]:
    missing = [text for text, _ in texts if is_placeholder(text)]
    # Where all are marks, as + and - or * and ** are, none of them stands for nothing.
    if missing and any(each.isalnum() for text, _ in texts for each in text if text not in missing):
        message = f"{_count(texts, missing)}: {_shown(missing)}"
        fix = _replaced(dict.fromkeys(missing))
        yield Finding(
            Kind.NULL_PLACEHOLDER, message, "Leave the cells empty, so that they are NULL", fix, _few(missing)
        )
    if column.primary_key:
        return
    others = [(text, count) for text, count in texts if text not in missing]
    folded = {text.casefold() for text, _ in others}
    if folded <= YES | NO and folded & YES and folded & NO:
        if len(others) > 2:
            message = f"yes and no are written as {_shown([text for text, _ in others], 8)}"
            yield _respelled(Kind.MIXED_YES_NO, message, _yes_no(others))
        return
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for text, count in others:
        groups[" ".join(text.split()).casefold()].append((text, count))
    varied = [group for group in groups.values() if len(group) > 1 and _WORD.fullmatch(group[0][0])]
    if varied and len(groups) <= MAX_DISTINCT_SHARE * sum(count for _, count in others):
        message = "; ".join(" and ".join(repr(text) for text, _ in group) for group in varied[:_SHOWN])
        message += f"; and {len(varied) - _SHOWN} more" if len(varied) > _SHOWN else ""
        new = {text: _commonest(group) for group in varied for text, _ in group}
        yield _respelled(Kind.INCONSISTENT_VALUES, message, new)


def _yes_no(texts: Texts) -> dict[str, str]:
    """Return what each text becomes: one of the pair of words that most cells have."""
    pair = max(YES_NO, key=lambda pair: sum(count for text, count in texts if text.casefold() in pair))
    words = [_commonest([each for each in texts if each[0].casefold() == word]) or word for word in pair]
    if words[0].isupper() or words[0].istitle():
        words = [word if word != plain else word.title() for word, plain in zip(words, pair, strict=True)]
    return {text: words[0] if text.casefold() in YES else words[1] for text, _ in texts}


def _commonest(texts: Texts) -> str:
    return max(texts, key=lambda each: (each[1], not each[0].isupper()), default=("", 0))[0]


def _respelled(kind: Kind, message: str, new: Mapping[str, str]) -> Finding:
    changed = {old: text for old, text in new.items() if old != text}
    hint = f"Write {', '.join(_few([f'{text} for {old!r}' for old, text in changed.items()]))}"
    return Finding(kind, message, hint, _replaced(changed), _few(list(changed)))


def _replaced(new: Mapping[str, str | None]) -> CellFix:
    return CellFix(Order.TEXTS, lambda value: new.get(stripped(value), value) if isinstance(value, str) else value)


def _of_text(convert: Callable[[str], SQLValue]) -> Callable[[SQLValue], SQLValue]:
    return lambda value: convert(value) if isinstance(value, str) else value


def _count(texts: Texts, chosen: Sequence[str]) -> str:
    wanted = set(chosen)
    count = sum(count for text, count in texts if text in wanted)
    return f"{count:,} cell" if count == 1 else f"{count:,} cells"


def _few(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(items[:_SHOWN])


def _shown(texts: Sequence[str], most: int = _SHOWN) -> str:
    """Show some texts so that white space is seen."""
    return ", ".join(repr(text) if len(text) <= 60 else repr(text[:60] + "...") for text in texts[:most])


def _short(value: SQLValue) -> str:
    text = "NULL" if value is None else repr(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 30 else text[:30] + "..."
