"""Reading a file that grows by whole lines: only what is new, and all of it again when it is another file.

Promises: a line is given out once it is complete. A file that was replaced, or cut off and written anew as by a run
that resumes, is told from one that has grown, even where it is longer than before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TAIL = 512
"""Bytes before the place that are compared: the ends of two lines differ in their tokens, rewards or texts."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a file has been read: which file it is, how many bytes, and the last of them."""

    inode: int = 0
    offset: int = 0
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class News:
    """Lines that were not read before, the place after them, and whether the file has to be read from its beginning.

    `start` is where the first line begins; `more`: there is more to be read at once.
    """

    lines: list[bytes]
    start: int
    place: Place
    restarted: bool = False
    more: bool = False


def read_news(path: Path, place: Place, limit: int) -> News:
    """Return the complete lines after a place, of about `limit` bytes. Raises OSError."""
    with path.open("rb") as file:
        inode = os.fstat(file.fileno()).st_ino
        file.seek(max(0, place.offset - len(place.tail)))
        same = inode == place.inode and file.read(len(place.tail)) == place.tail
        start = place.offset if same else 0
        file.seek(start)
        text = file.read(limit)
        if len(text) == limit:
            text += file.readline()
        text = text[: text.rfind(b"\n") + 1]
        end = start + len(text)
        file.seek(max(0, end - TAIL))
        tail = file.read(end - file.tell())
        # Not `splitlines`, for which a carriage return ends a line as well.
        lines = [line + b"\n" for line in text.split(b"\n")[:-1]]
        return News(lines, start, Place(inode, end, tail), not same and place != Place(), len(text) >= limit)
