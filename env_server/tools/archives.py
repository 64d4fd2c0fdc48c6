"""Zip archives from elsewhere, unpacked without trusting them.

Promises: nothing is written outside the folder, whatever the archive's names say; links and devices are refused; an
archive that would not fit on the disk is refused before anything is written; a file appears under its name only when
it is whole, so what was interrupted is never taken for a database. Archives inside an archive are unpacked where they
lie, one level deep. What archives of other systems leave (`__MACOSX`, `.DS_Store`) is passed over.
"""

from __future__ import annotations

import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from env_server.errors import DataError

_LEFTOVERS = ("__MACOSX", ".DS_Store")


def unpack(archive: Path, folder: Path, *, nested: bool = True) -> None:
    """Unpack an archive into the folder. Raises DataError when it is broken or unsafe, OSError when writing fails."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = list(_members(archive, opened))
            refuse_full_disk(folder, sum(member.file_size for member in members))
            targets = [_extract(opened, member, folder) for member in members]
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: a member is encrypted.
        raise DataError(f"{archive} cannot be unpacked: {error}. Remove it and fetch it again") from error
    for target in targets:
        if nested and target.suffix.lower() == ".zip":
            unpack(target, target.parent, nested=False)
            target.unlink()


def _members(archive: Path, opened: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    """Yield the files to unpack. Raises DataError when one leads out of the folder or is no plain file."""
    for member in opened.infolist():
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if member.is_dir() or any(part in _LEFTOVERS for part in path.parts):
            continue
        kind = stat.S_IFMT(member.external_attr >> 16)
        leads_out = not path.parts or path.is_absolute() or ".." in path.parts or PureWindowsPath(member.filename).drive
        if leads_out or kind not in (0, stat.S_IFREG):
            raise DataError(f"{archive} is not safe to unpack: it holds {member.filename!r}. Use another archive")
        yield member


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raises DataError when the disk of the folder has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        needs = f"{folder} has {size_text(free)} free, and {size_text(needed)} are needed"
        raise DataError(f"{needs}. Free space or choose another")


def size_text(count: int) -> str:
    """Return a number of bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Raise what the disk refuses as a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}. Free space, or choose another"
        ) from error


def _extract(opened: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> Path:
    target = folder / PurePosixPath(member.filename.replace("\\", "/"))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with opened.open(member) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    partial.replace(target)
    return target
