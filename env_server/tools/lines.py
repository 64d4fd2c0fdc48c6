"""What is wrong with a CSV file as it is written: its first line, and lines that are no rows of the table. Pure.

A line is no row when it is blank, the header again, a title above the header, units or types beneath it, or a remark at
the end. Where the numbers around it and the words in it leave that open, it is left to the user.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from env_server.data.cells import is_missing, is_unit, read_date, read_number
from env_server.data.csv_table import DELIMITERS
from env_server.data.source_table import bare_name, column_names
from env_server.tools.findings import DropLines, Finding, Kind, Place

Record = tuple[int, Sequence[str]]
"""The line on which a record begins, and its cells."""
_HEAD, _TITLES, _REMARKS = 60, 12, 8
"""Records that tell which columns are numbers, among which the header is, and the last ones that may be remarks."""
_SHOWN = 3
_YEAR = re.compile(r"(?:19|20)\d\d")
_REMARK = re.compile(r"(?:source|note|notes|generated|exported|downloaded|copyright|quelle|stand|fuente)\b|[©*]", re.I)


def check_lines(records: Iterable[Record], place: Place) -> Finding | None:
    """Return what is wrong with lines of the file; its fix, where it is certain, leaves them out."""
    left = iter(records)
    head = list(islice(left, _HEAD))
    widths = Counter(len(cells) for _, cells in head)
    width = max(widths, key=lambda each: (widths[each], each), default=0)
    if width < 2:
        return None
    start = _header(head, width)
    header = [cell.strip().casefold() for cell in head[start][1]]
    numeric = _numeric([cells for _, cells in head[start + 1 :]], width)
    titles = [_text(cells) for _, cells in head[:start]]
    found = {line: f"a title, {title!r}" if title else "blank" for (line, _), title in zip(head, titles, strict=False)}
    # A single word may be the name of the first column, and the others have none.
    is_certain = not titles or (bool(numeric) and (len(titles) > 1 or " " in titles[0]))
    last: deque[tuple[int, list[str], bool]] = deque(maxlen=_REMARKS)
    end = head[start][0]
    for line, cells in chain(head[start + 1 :], left):
        bare = [cell.strip() for cell in cells]
        if not any(bare):
            found[line] = "blank"
        elif [cell.casefold() for cell in bare] == header:
            found[line] = "the header again"
        elif not last and (words := _words(bare, numeric)):
            found[line] = f"units, {_text(cells)!r}"
            is_certain &= all(is_unit(word) for word in words)
        last.append((line, bare, line > end + 1 or len(bare) != width or 0 in numeric))
        end = line + "".join(cells).count("\n") if any(bare) else 0
    for line, bare, is_apart in reversed(last):
        text = _text(bare)
        if line not in found:
            is_remark = _REMARK.match(text) or (is_apart and " " in text)
            if not _is_title(bare, width) or _is_number(text) or not is_remark:
                break
            found[line] = f"a remark, {text!r}"
    if not found:
        return None
    lines = sorted(found)
    told = "; ".join(f"line {line} is {found[line]}" for line in lines[:_SHOWN])
    message = told + (f"; and {len(lines) - _SHOWN:,} more" if len(lines) > _SHOWN else "")
    hint = "Leave them out; what else may be wrong with the table is seen then"
    fix = DropLines(tuple(lines)) if is_certain else None
    return Finding(Kind.EXTRA_LINES, message, hint if fix else "Leave them out, if they are no rows", fix, place=place)


def _text(cells: Sequence[str]) -> str:
    return " ".join(cell.strip() for cell in cells if cell.strip())[:60]


def _is_title(cells: Sequence[str], width: int) -> bool:
    """Tell whether the cells are few, and the first among them, as those of a title or a remark are."""
    filled = sum(bool(cell.strip()) for cell in cells)
    return filled <= max(1, width // 3) and (not filled or bool(cells[0].strip()))


def _header(head: Sequence[Record], width: int) -> int:
    """Return which record is the header: below titles the first that is filled with names."""
    for number, (_, cells) in enumerate(head[:_TITLES]):
        if _is_title(cells, width):
            continue
        names = [cell for cell in cells if cell.strip()]
        is_full = len(cells) == width and len(names) * 2 > width
        return number if is_full and not any(_is_number(name) and not _YEAR.fullmatch(name) for name in names) else 0
    return 0


def _is_number(text: str) -> bool:
    return bool(read_number(text) or read_date(text))


def _numeric(rows: Sequence[Sequence[str]], width: int) -> set[int]:
    """Return which columns are numbers or dates, but for a cell here and there."""
    found = set()
    for place in range(width):
        cells = [row[place] for row in rows if len(row) == width and not is_missing(row[place].strip())]
        if sum(map(_is_number, cells)) * 2 > len(cells):
            found.add(place)
    return found


def _words(bare: Sequence[str], numeric: set[int]) -> list[str]:
    """Return the words of a record that has them where numbers are, and nothing else; of one of types all of them."""
    filled = {place for place, cell in enumerate(bare) if cell and not is_missing(cell)}
    words = [bare[place] for place in sorted(filled)]
    has_words = filled <= numeric or (filled & numeric and all(map(is_unit, words)))
    return words if has_words and not any(map(_is_number, words)) else []


def check_header(cells: Sequence[str], rows: int, delimiter: str, place: Place) -> Iterator[Finding]:
    """Yield what is wrong with the first line of a file of tables, as it is written."""
    named = [bare_name(cell) for cell in cells]
    data = [cell for cell in named if _is_number(cell)]
    years = all(_YEAR.fullmatch(cell) for cell in data) and len(set(data)) == len(data) > 1  # a column for each
    if rows and data and not years and len(data) * 2 >= len(named):
        message = f"the first line has {', '.join(map(repr, data[:3]))}"
        yield Finding(Kind.NO_HEADER, message, "Put a line with the names of the columns above it", place=place)
        return
    inner = re.compile(f"[{''.join(DELIMITERS).replace(delimiter, '')}](?! )")
    if rows and (name := next((name for name in named if len(inner.findall(name)) == 1), "")):
        message = f"column {name!r} holds another delimiter than {delimiter!r}, by which the file is divided"
        hint = f"If it is divided wrongly, state the delimiter in a line above: sep={inner.findall(name)[0]}"
        yield Finding(Kind.OTHER_DELIMITER, message, hint, place=place)
    called = list(enumerate(zip(named, column_names(cells), strict=True), start=1))
    blank = [f"column {number} has no name, and was called {new}" for number, (old, new) in called if not old]
    twice = [
        f"column {number} is another {old!r}, and was called {new}"
        for number, (old, new) in called
        if old not in ("", new)
    ]
    for found, hint in ((blank, "Give it a name, or leave it out"), (twice, "Give each a name of its own")):
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        if found:
            yield Finding(Kind.RENAMED_COLUMN, "; ".join(found[:_SHOWN]) + more, hint, place=place)
