"""A folder that a run begins to fill, and leaves as it was when the run comes to nothing.

A folder holds one run. One that failed before it had anything to show (a server that is not there, a model that does
not fit) would be in the way of the same command, once what was wrong is put right.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def taken_back(folder: Path, came_to_nothing: Callable[[], bool]) -> Iterator[None]:
    """Remove what the block has put into the folder, when it ends early and has come to nothing.

    What was there before stays, and so do folders above that were. Raises what the block raises.
    """
    before = set(folder.iterdir()) if folder.is_dir() else None
    made = [parent for parent in folder.absolute().parents if not parent.exists()]
    try:
        yield
    except BaseException:
        if came_to_nothing():
            _remove(folder, before, made)
        raise


def _remove(folder: Path, before: set[Path] | None, made: list[Path]) -> None:
    if before is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        for path in set(folder.iterdir()) - before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for parent in made:
        with suppress(OSError):  # somebody else has put something there
            parent.rmdir()
