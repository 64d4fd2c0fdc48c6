"""What a cell becomes under the repairs of its column. Pure.

Repairs of one column go in a fixed order, whatever order they were chosen in: letters, blanks, whole texts, then
numbers and dates.
"""

from __future__ import annotations

from collections.abc import Iterable

from env_server.data.doctor.cells import NOTHING, mended_letters, written_date, written_number
from env_server.data.doctor.findings import CellRepair, ClearNumbers, MendLetters, Replace, ToDates, ToNumbers, Trim
from env_server.dataset import SQLValue

_ORDER = (MendLetters, Trim, Replace, ClearNumbers, ToNumbers, ToDates)


def mended(value: SQLValue, repairs: Iterable[CellRepair]) -> SQLValue:
    """Return what a value becomes."""
    for repair in sorted(repairs, key=lambda each: _ORDER.index(type(each))):
        value = _once(value, repair)
    return value


def mended_text(cell: str, repairs: Iterable[CellRepair]) -> str:
    """Return what a cell of a CSV file becomes; an empty one is NULL."""
    value: SQLValue = cell
    for repair in sorted(repairs, key=lambda each: _ORDER.index(type(each))):
        if isinstance(repair, ClearNumbers) and isinstance(value, str):
            number = written_number(value)
            value = None if number is not None and number.value(".") in repair.numbers else value
        else:
            value = _once(value, repair)
    return "" if value is None else str(value)


def _once(value: SQLValue, repair: CellRepair) -> SQLValue:
    if isinstance(repair, ClearNumbers):
        return None if isinstance(value, int | float) and value in repair.numbers else value
    if not isinstance(value, str):
        return value
    match repair:
        case MendLetters():
            return mended_letters(value) or value
        case Trim():
            return value.strip()
        case Replace():
            return dict(repair.texts).get(value.strip(), value)
        case ToNumbers():
            if value.strip().casefold() in NOTHING:
                return None
            number = written_number(value)
            return value if number is None or (read := number.value(repair.mark)) is None else read
        case ToDates():
            if value.strip().casefold() in NOTHING:
                return None
            written = written_date(value)
            return value if written is None else written.iso(repair.day_first) or value
