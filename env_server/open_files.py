"""How many files this process may have open: sockets are files, and many a shell allows 1,024."""

from __future__ import annotations

import resource

SPARE_FILES = 256
"""Beside what is counted: libraries, logs, databases."""


def allow_open_files(needed: int) -> int:
    """Let this process have `needed` files open and SPARE_FILES more, as far as it may decide that itself.

    Returns how many of `needed` it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return needed if soft == resource.RLIM_INFINITY else max(0, min(needed, soft - SPARE_FILES))
