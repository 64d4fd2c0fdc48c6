"""Where the databases of a data set lie, and which files cannot be used.

Guarantees:
- A db_id is a name that was found in a folder, never a path made from one: it cannot lead out of the folder.
- A file that SQLite would read wrongly, or less than whole, without an error is refused with the reason: one that is
  empty (it would pass for a database without tables) or cut off (the rest would pass for zeros), and one whose last
  changes are still in a journal beside it (the sandbox reads the file alone).

Nothing is written. Hidden files and folders, and those that archives of other systems leave, are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

DATABASE_SUFFIXES = (".sqlite", ".db", ".sqlite3")
SEARCH_DEPTH = 2
"""Levels of folders inside folders that are searched, since archives unpack into a top folder of their own."""

_MAGIC = b"SQLite format 3\0"
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def visible(folder: Path) -> list[Path]:
    """Return what a folder holds, in the order of names; nothing where it cannot be listed."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))
    except OSError:
        return []


def folder_levels(root: Path) -> Iterator[list[Path]]:
    """Yield `[root]`, then the folders in it, then those in them, down to SEARCH_DEPTH."""
    level = [root]
    for _ in range(SEARCH_DEPTH):
        yield level
        level = [entry for folder in level for entry in visible(folder) if entry.is_dir()]
    yield level


def find_databases(root: Path, folder_names: Sequence[str]) -> dict[str, Path]:
    """Map db_id to its file, for each database in a folder of one of the names; the first that is found counts.

    The folder may lie in `root` or deeper, as far as SEARCH_DEPTH, and holds `ID/ID.sqlite` or `ID.sqlite`.
    """
    found: dict[str, Path] = {}
    for level in folder_levels(root):
        for folder in (above / name for name in folder_names for above in level):
            for candidate in (file for entry in visible(folder) for file in _candidates(entry)):
                if candidate.is_file():
                    found.setdefault(candidate.stem, candidate)
    return found


def is_database_name(path: Path) -> bool:
    """Tell whether the file is called like a SQLite database."""
    return path.suffix.lower() in DATABASE_SUFFIXES


def file_problem(path: Path) -> str:
    """Say why a database file cannot be used as it is, and what helps; empty where nothing is seen to be wrong."""
    try:
        head = _head(path)
        if not head:
            return f"{path} is empty (0 bytes). Copy or unpack it again"
        if head.startswith(b"version https://git-lfs"):
            return f"{path} is a Git LFS pointer, not the database itself. Fetch it with: git lfs pull"
        if not head.startswith(_MAGIC):
            return f"{path} is not a SQLite database, or it is encrypted. Export it as a plain SQLite file"
        size, whole = path.stat().st_size, _stated_size(head)
        if size < whole:
            return f"{path} is cut off: it has {size:,} of its {whole:,} bytes. Copy or unpack it again"
        wal, journal = path.with_name(path.name + "-wal"), path.with_name(path.name + "-journal")
        if _head(wal) or _head(journal).startswith(_JOURNAL_MAGIC):
            beside = wal if _head(wal) else journal
            return (
                f"{path} is in use, or was not closed: {beside.name} may hold changes that are not in it. Close the "
                f"program that uses it, or open it once with: sqlite3 {path.name} .tables"
            )
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}. Check that it is readable"
    return ""


def _candidates(entry: Path) -> Iterator[Path]:
    if is_database_name(entry):
        yield entry
    yield from (entry / (entry.name + suffix) for suffix in DATABASE_SUFFIXES)


def _stated_size(head: bytes) -> int:
    """Return the size that a database's header states; 0 where it states none, as old versions of SQLite left it."""
    page, change, pages, valid_for = (
        int.from_bytes(head[start:end]) for start, end in ((16, 18), (24, 28), (28, 32), (92, 96))
    )
    return (65_536 if page == 1 else page) * pages if change == valid_for else 0


def _head(path: Path) -> bytes:
    """Return the first bytes of a file; none where there is no such file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(100)
    return b""
