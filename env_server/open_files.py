"""How many files this process may have open: sockets are files, and many a shell allows 1,024."""

from __future__ import annotations

import resource
import sys

SPARE_FILES = 256
"""What a process has open besides the connections that it counts: libraries, logs, databases."""


def allow_open_files(needed: int) -> int:
    """Let this process have `needed` files open, as far as it may decide that itself; return how many it may have."""
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    allowed = max(soft, min(needed, hard))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, _limits()[1]))
    return allowed


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)
