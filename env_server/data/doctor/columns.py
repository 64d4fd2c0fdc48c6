"""What is wrong with one column, told from its survey. Pure.

A check speaks only where a person who looks at the values would agree: a column is numbers when all that is left
besides numbers stands for nothing, codes with leading zeros are no numbers, and years stay years.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from env_server.data.doctor.cells import (
    ISO_FORM,
    NO,
    NOTHING,
    SURELY_NOTHING,
    UNDECIDED_FORM,
    YES,
    WrittenDate,
    WrittenNumber,
    broken_letters,
    day_first,
    decimal_mark,
    mended_letters,
    spelling_key,
    written_date,
    written_number,
)
from env_server.data.doctor.findings import (
    ClearNumbers,
    DropColumn,
    Finding,
    Kind,
    MendLetters,
    Place,
    Repair,
    Replace,
    ToDates,
    ToNumbers,
    Trim,
)
from env_server.data.doctor.references import is_called_key
from env_server.data.doctor.survey import SENTINELS, ColumnSurvey

MIN_CONSTANT_ROWS = 5
MAX_DISTINCT_SHARE = 0.8
"""Where nearly each row has a text of its own, two spellings may be two things."""
MIN_DATES = 3
MAX_ODD_SHARE = 0.05
"""Cells that are neither number nor nothing, in a column that is taken for numbers all the same."""
SENTINEL_FACTOR = 5
"""How much greater a sentinel is than every other number."""
_WORDS = re.compile(r"[^\W\d_][^\W\d_ .,'&/-]*(?:[ .,'&/-]+[^\W\d_]+)*\.?")
_MIN_WORD = 3
_SHOWN = 3

Texts = Sequence[tuple[str, int]]


def check_column(
    column: ColumnSurvey, place: Place, *, imported: bool, is_key: bool = False, order: bool | None = None
) -> Iterator[Finding]:
    """Yield what is wrong with a column.

    `is_key`: it is a primary or foreign key, declared or by its name. `order`: whether the day comes first in dates
    that do not say it.
    """
    if column.problem:
        advice = "Nothing is known of it. Look at it yourself"
        yield Finding(Kind.NOT_EXAMINED, place, f"it was too much to look through: {column.problem}", advice)
        return
    if column.rows == 0:
        return
    yield from _emptiness(column, place)
    yield from _sentinels(column, place)
    yield from _letters(column, place)
    blanks = [text for text, _ in column.texts if text.strip() and text != text.strip()]
    if blanks:
        said = f"{_count(column.texts, blanks)} with blanks around, such as {_shown(blanks)}"
        yield Finding(Kind.OUTER_BLANKS, place, said, "Take the blanks away", Trim(), _few(blanks))
    stripped = _merged((text.strip(), count) for text, count in column.texts)
    special = [] if is_key else _numbers(column, stripped, place, imported=imported)
    special = special or _dates(stripped, place, order)
    yield from special
    if not special:
        yield from _words(column, stripped, place)


def _emptiness(column: ColumnSurvey, place: Place) -> Iterator[Finding]:
    empty = sum(count for text, count in column.texts if not text.strip())
    if column.nulls + empty == column.rows:
        yield Finding(
            Kind.EMPTY_COLUMN, place, f"none of its {column.rows:,} rows has a value", "Leave it out", DropColumn()
        )
    elif column.distinct == 1 and not column.nulls and column.rows >= MIN_CONSTANT_ROWS and not column.primary_key:
        value = column.texts[0][0] if column.texts else column.numbers[0][0] if column.numbers else "the same"
        said = f"all of its {column.rows:,} rows have {value!r}"
        yield Finding(
            Kind.CONSTANT_COLUMN, place, said, "Check that it was exported whole; leave it out if it says nothing"
        )


def _sentinels(column: ColumnSurvey, place: Place) -> Iterator[Finding]:
    if column.low is None or column.high is None or column.primary_key:
        return
    bound = max(abs(column.low), abs(column.high))
    for number, count in column.numbers:
        if count > 1 and number in SENTINELS and abs(number) > SENTINEL_FACTOR * max(bound, 1):
            said = f"{_times(count, f'cell is {number}')}; all others lie between {column.low} and {column.high}"
            advice = "If it stands for no value, leave the cells empty: averages and maxima count it"
            yield Finding(Kind.SENTINEL_NUMBER, place, said, advice, ClearNumbers((number,)), (str(number),))


def _letters(column: ColumnSurvey, place: Place) -> Iterator[Finding]:
    broken = [text for text, _ in column.texts if broken_letters(text)]
    if broken:
        mended = {text: mended_letters(text) for text in broken}
        can = all(mended.values())
        said = f"{_count(column.texts, broken)} such as {_shown(broken)}"
        example = f", as in {mended[broken[0]]!r}" if can else " from their source"
        yield Finding(
            Kind.BROKEN_LETTERS,
            place,
            said,
            f"Restore the letters{example}",
            MendLetters() if can else None,
            _few(broken),
        )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How the texts of a column read as numbers."""

    read: list[tuple[str, WrittenNumber, int]]
    nothing: list[tuple[str, int]]
    odd: list[tuple[str, int]]

    @property
    def cells(self) -> int:
        return sum(count for *_, count in self.read)


def _read_numbers(texts: Texts) -> _Numbers:
    found = _Numbers([], [], [])
    for text, count in texts:
        number = written_number(text)
        if number is not None:
            found.read.append((text, number, count))
        elif text.casefold() in NOTHING:
            found.nothing.append((text, count))
        else:
            found.odd.append((text, count))
    return found


def _numbers(column: ColumnSurvey, texts: Texts, place: Place, *, imported: bool) -> list[Finding]:
    """Numbers that are text, alone or among others that are not."""
    found = _read_numbers(texts)
    cells = found.cells + column.number_cells
    odd = sum(count for _, count in found.odd)
    codes = any(number.is_code for _, number, _ in found.read)
    if not texts or not cells or codes:
        return []
    if odd > MAX_ODD_SHARE * cells or (odd and column.distinct < 20):
        return []
    if not found.nothing and not odd and all(number.plain for _, number, _ in found.read):
        return [] if imported else _stored_as_text(column, found, place)
    if not found.read and not column.number_cells:
        return []
    numbers = [number for _, number, _ in found.read]
    units = {number.unit for number in numbers if number.unit}
    written = [text for text, number, _ in found.read if not number.plain]
    strange = [*written, *(text for text, _ in found.nothing), *(text for text, _ in found.odd)]
    if len(units) > 1:
        advice = "Convert them to one unit, and name it in the column's name"
        return [
            Finding(
                Kind.MIXED_UNITS, place, f"quantities such as {_shown(_by_unit(found))}", advice, None, _few(written)
            )
        ]
    mark = decimal_mark(numbers)
    numeric = column.text_cells + column.number_cells - odd - sum(count for _, count in found.nothing)
    said = f"{numeric:,} of {column.rows:,} cells are numbers, but it is text for cells such as {_shown(strange)}"
    if mark is None:
        advice = "Decimal points and commas are mixed. Write all numbers the same way"
        return [Finding(Kind.NUMBER_AS_TEXT, place, said, advice, None, _few(strange))]
    if odd:
        advice = f"Correct {_shown([text for text, _ in found.odd])} by hand; then it can be made numbers"
        return [Finding(Kind.NUMBER_AS_TEXT, place, said, advice, None, _few(strange))]
    examples = [f"{text!r} as {_or_null(number, mark)}" for text, number, _ in found.read if not number.plain]
    examples += [f"{text!r} as NULL" for text, _ in found.nothing]
    advice = f"Make it a column of numbers: {', '.join(_few(examples))}"
    return [Finding(Kind.NUMBER_AS_TEXT, place, said, advice, ToNumbers(mark), _few(strange))]


def _or_null(number: WrittenNumber, mark: object) -> str:
    value = number.value("," if mark == "," else ".")
    return "NULL" if value is None else str(value)


def _stored_as_text(column: ColumnSurvey, found: _Numbers, place: Place) -> list[Finding]:
    """Plain numbers in a column of text; where their order as text is that of numbers, nothing goes wrong."""
    if column.number_cells or len(found.read) < MIN_DATES or is_called_key(column.name):
        return []
    values = [(text, number.value(".")) for text, number, _ in found.read]
    by_value = [text for text, _ in sorted(values, key=lambda each: each[1] or 0)]
    if by_value == sorted(text for text, _ in values):
        return []
    low, high = min(by_value), max(by_value)
    said = f"all its numbers are stored as text, so that their MAX is {high!r} and their MIN {low!r}"
    advice = f"Make it a column of numbers: the greatest is {by_value[-1]}, the smallest {by_value[0]}"
    return [Finding(Kind.NUMBER_AS_TEXT, place, said, advice, ToNumbers("."), ())]


def _by_unit(found: _Numbers) -> list[str]:
    by_unit: dict[str, str] = {}
    for text, number, _ in found.read:
        by_unit.setdefault(number.unit, text)
    return list(by_unit.values())


def _dates(texts: Texts, place: Place, stated: bool | None) -> list[Finding]:
    read: list[tuple[str, WrittenDate, int]] = []
    odd: list[str] = []
    for text, count in texts:
        written = written_date(text)
        if written is not None:
            read.append((text, written, count))
        elif text.casefold() not in NOTHING:
            odd.append(text)
    if len(read) < MIN_DATES or len(odd) > MAX_ODD_SHARE * len(read):
        return []
    told = day_first([date for _, date, _ in read])
    order = stated if told is None else told
    forms = Counter(date.form for _, date, _ in read)
    undecided = order is None and UNDECIDED_FORM in forms
    findings = []
    impossible = [text for text, date, _ in read if date.iso(True) is None and date.iso(False) is None]
    if impossible:
        advice = "Correct it; date functions return NULL for it"
        findings.append(
            Finding(Kind.IMPOSSIBLE_DATE, place, f"there is no {_shown(impossible)}", advice, None, _few(impossible))
        )
    examples = [next(text for text, date, _ in read if date.form == form) for form, _ in forms.most_common()]
    if len(forms) > 1:
        said = f"dates such as {_shown(examples)}" + (f", and {_shown(odd)}" if odd else "")
        findings.append(
            Finding(Kind.MIXED_DATES, place, said, *_to_dates(order, undecided, odd), shown=_few(examples[1:]))
        )
    elif not _sortable(next(iter(forms)), read):
        said = f"dates such as {_shown([text for text, *_ in read])}, whose order as text is not that of time"
        findings.append(Finding(Kind.UNSORTABLE_DATES, place, said, *_to_dates(order, undecided, odd)))
    return findings


def _to_dates(order: bool | None, undecided: bool, odd: Sequence[str]) -> tuple[str, Repair | None]:
    if odd:
        return f"Correct {_shown(odd)} by hand; then all can be written as {ISO_FORM}", None
    if undecided:
        asked = "Whether the day or the month comes first cannot be told from the column"
        return f"{asked}: say it with --dates day-first or --dates month-first", None
    return f"Write all as {ISO_FORM}, which SQLite compares, sorts and computes with", ToDates(bool(order))


def _sortable(form: str, read: Sequence[tuple[str, WrittenDate, int]]) -> bool:
    """Tell whether texts of one form sort as the days do."""
    if form == ISO_FORM:
        return True
    return form == "2024/5/1" and len({len(text.split(" ")[0]) for text, *_ in read}) == 1


def _words(column: ColumnSurvey, texts: Texts, place: Place) -> Iterator[Finding]:
    nothing = [text for text, _ in texts if text.casefold() in SURELY_NOTHING]
    if nothing and len(nothing) < len(texts):
        said = f"{_count(texts, nothing)}: {_shown(nothing)}"
        repair = Replace(tuple((text, None) for text in nothing))
        yield Finding(
            Kind.MISSING_WORD, place, said, "Leave the cells empty, so that they are NULL", repair, _few(nothing)
        )
    if column.primary_key:
        return
    others = [(text, count) for text, count in texts if text not in nothing]
    said_yes_or_no = {text.casefold() for text, _ in others}
    if said_yes_or_no <= YES | NO and said_yes_or_no & YES and said_yes_or_no & NO:
        if len(others) > 2:
            repair = _one_spelling([[e for e in others if e[0].casefold() in side] for side in (YES, NO)])
            said = f"yes and no are written as {_shown([text for text, _ in others], 8)}"
            yield Finding(
                Kind.MIXED_YES_NO, place, said, _spelled(repair), repair, _few([old for old, _ in repair.texts])
            )
        return
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for text, count in others:
        groups[spelling_key(text)].append((text, count))
    varied = [group for group in groups.values() if len(group) > 1 and _is_word(group[0][0])]
    if varied and len(groups) <= MAX_DISTINCT_SHARE * sum(count for _, count in others):
        repair = _one_spelling(varied)
        said = "; ".join(" and ".join(repr(text) for text, _ in group) for group in varied[:_SHOWN])
        rest = f"; and {len(varied) - _SHOWN} more" if len(varied) > _SHOWN else ""
        yield Finding(
            Kind.SPELLINGS, place, said + rest, _spelled(repair), repair, _few([old for old, _ in repair.texts])
        )


def _is_word(text: str) -> bool:
    return len(text) >= _MIN_WORD and _WORDS.fullmatch(text) is not None


def _one_spelling(groups: Iterable[Texts]) -> Replace:
    """Replace every spelling by the commonest of its group."""
    texts: list[tuple[str, str | None]] = []
    for group in groups:
        best = max(group, key=lambda each: (each[1], not each[0].isupper()))[0]
        texts += [(text, best) for text, _ in group if text != best]
    return Replace(tuple(texts))


def _spelled(repair: Replace) -> str:
    return f"Write {', '.join(f'{new} for {old!r}' for old, new in repair.texts[:_SHOWN])}"


def _merged(texts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    for text, count in texts:
        counts[text] += count
    return list(counts.items())


def _count(texts: Texts, chosen: Sequence[str]) -> str:
    wanted = set(chosen)
    return _times(sum(count for text, count in texts if text in wanted), "cell")


def _times(count: int, noun: str) -> str:
    return (
        f"{count:,} {noun}"
        if count == 1
        else f"{count:,} {noun.replace('cell', 'cells').replace('cells is', 'cells are')}"
    )


def _few(items: Sequence[str]) -> tuple[str, ...]:
    return tuple(items[:_SHOWN])


def _shown(texts: Sequence[str], most: int = _SHOWN) -> str:
    """Show some texts; blanks are to be seen."""
    return ", ".join(repr(text) if len(text) <= 60 else repr(text[:60] + "...") for text in texts[:most])
